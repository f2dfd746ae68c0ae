"""Which estimate should choose the pairs that a list holds? Recall of the largest pairs, and coverage of those chosen.

    python benchmarks/choice_of_pairs.py
    python benchmarks/choice_of_pairs.py --seeds 2

The pairs are the 20 with the largest |H_ij| in the denoised or in the unbiased estimate of the same draws; the
intervals are those of the unbiased estimate. The networks have two hidden layers of 64 ReLUs and random weights. The
truth is an unbiased run of 40 000 calls.
"""

from __future__ import annotations

import argparse
import platform
import time

import torch
from torch import Tensor, nn

from smoothhess import SmoothHess
from smoothhess.estimate import student_t

TOP, INPUTS = 20, 3


def choices(
    net: nn.Module, x: Tensor, truth: Tensor, calls: int | None, control: str | None, seeds: int
) -> tuple[list[list[float]], list[float]]:
    """Recall and coverage by the denoised and by the unbiased estimate, and the relative errors of both."""
    d = truth.shape[1]
    i, j = torch.triu_indices(d, d, 1)
    found: dict[str, list[Tensor]] = {"denoised": [], "unbiased": []}
    errors: list[Tensor] = []
    for seed in range(seeds):
        result = SmoothHess(net).attribute(x, radius=1.0, n_calls=calls, seed=seed, control=control)
        plain = result.unshrunk()
        reach = student_t.quantile(0.95, result.noise.df).to(truth)[:, None, None] * result.stderr()
        inside = ((plain.hessian - truth).abs() <= reach)[:, i, j].double()
        errors.append(torch.stack([result.relative_error, plain.relative_error]).mean(1))
        for name, matrix in (("denoised", result.hessian), ("unbiased", plain.hessian)):
            chosen, largest = (m[:, i, j].abs().topk(TOP).indices for m in (matrix, truth))
            recall = (chosen[:, :, None] == largest[:, None]).any(2).double().mean()
            found[name].append(torch.stack([recall, inside.gather(1, chosen).mean()]))
    return [torch.stack(found[name]).mean(0).tolist() for name in found], torch.stack(errors).mean(0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    heads = (
        "d",
        "calls",
        "control",
        "error, denoised",
        "unbiased",
        "found by denoised",
        "unbiased",
        "covered",
        "unbiased",
    )
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for d, seed in ((20, 0), (64, 1)):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        x = torch.randn(INPUTS, d)
        truth = SmoothHess(net).attribute(x, radius=1.0, n_calls=40_000, seed=99).unshrunk().hessian
        for calls in (d, 2 * d, 8 * d, None):
            for control in (None, "auto"):
                (denoised, unbiased), (error, own) = choices(net, x, truth, calls, control, options.seeds)
                row = [d, "tol = 0.1" if calls is None else calls, control, f"{error:.2f}", f"{own:.2f}"]
                shares = (denoised[0], unbiased[0], denoised[1], unbiased[1])
                print(f"| {' | '.join(map(str, [*row, *(f'{share:.2f}' for share in shares)]))} |", flush=True)
    machine = f"{platform.machine()} CPU, Python {platform.python_version()}, torch {torch.__version__}"
    print(f"*{machine}, {time.strftime('%Y-%m-%d')}; `python benchmarks/choice_of_pairs.py --seeds {options.seeds}`*")


if __name__ == "__main__":
    main()
