"""Wall-clock time on one GPU for the error of the published recipe, against that recipe in a clean PyTorch loop.

    python benchmarks/speed.py --data DIR --only mnist --device cuda
    python benchmarks/speed.py --data DIR --only cifar10 --device cuda --images 4

The published recipe is 100 000 (MNIST) or 480 000 (CIFAR10) antithetic gradient calls an input. The loop that runs it
here is generous to it: draws, model and accumulation stay on the GPU, batches are as large as pays, nothing is
checked, and no error bar comes out. Its error at that many calls is measured; ours samples until it reports that error
as reached (n_calls=None, tol), and its true error is measured as well. Both sides use the same precision, memory format
and inputs, are warmed up and synchronised, and are timed in turn; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cases
import torch
from cases import Case
from efficiency import Truth, mean_of, median
from torch import Tensor

from smoothhess import Interactions, Isotropic, SmoothHess

RECIPE = {"mnist": 100_000, "cifar10": 480_000}
AUTHORS = {"mnist": 0.77, "cifar10": 34.6}  # seconds an input, the authors' code on an H200, as measured elsewhere


def recipe(case: Case, index: int, calls: int, batch: int, seed: int) -> Tensor:
    """Eq. 8 with antithetic draws: H of one input, (d, d), all on the device."""
    x, d = case.inputs[index : index + 1], case.d
    rng = torch.Generator(device=x.device).manual_seed(seed)
    total = torch.zeros(d, d, device=x.device)
    done = 0
    while done < calls:
        pairs = min(batch, calls - done) // 2
        z = torch.randn(pairs, d, generator=rng, device=x.device)
        delta = (case.sigma * z).reshape(pairs, *x.shape[1:])
        points = torch.cat([x + delta, x - delta]).requires_grad_()
        output = case.model(points)
        value = output.sum() if case.target is None else output[:, case.target[index]].sum()
        (gradient,) = torch.autograd.grad(value, points)
        there, back = gradient.flatten(1).split(pairs)
        total.addmm_(z.mT, (there - back) / 2)
        done += 2 * pairs
    mean = total / (calls / 2) / case.sigma
    return (mean + mean.mT) / 2


def ours(case: Case, indices: list[int], tol: float, precision: str) -> Interactions:
    target = None if case.target is None else [case.target[i] for i in indices]
    return SmoothHess(case.model).attribute(
        case.inputs[indices], target, gaussian=Isotropic(case.sigma), tol=tol, precision=precision
    )


def _explain(case: Case, indices: list[int], tol: float, precision: str) -> Tensor:
    return ours(case, indices, tol, precision).hessian


def timed(work: Callable[[], object], repeats: int) -> float:
    """Median seconds; the first run is thrown away."""
    times = []
    for _ in range(repeats + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SMOOTHHESS_DATA"))
    parser.add_argument("--only", choices=list(RECIPE), default="mnist")
    parser.add_argument("--images", type=int, default=4, help="inputs whose error is measured")
    parser.add_argument("--batch", type=int, default=1024, help="inputs that are explained together (MNIST)")
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.25, 1.0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--reference", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", default=["float32"], help="of ours; the recipe keeps float32")
    parser.add_argument("--part", type=int, default=1, help="time the recipe with so many times fewer calls, and scale")
    options = parser.parse_args()
    if not options.data:
        parser.error("expected --data DIR (or SMOOTHHESS_DATA).")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # as inside the library
    warnings.simplefilter("ignore")
    calls = RECIPE[options.only]
    together = options.batch if options.only == "mnist" else 1
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"{platform.machine()} CPU"
    print(f"{machine}, torch {torch.__version__}, float32 without TF32, {time.strftime('%Y-%m-%d')}\n")
    print("| network | recipe: error, s/input | ours | calls, passes, error | s/input | time ratio | pass ratio |")
    print("|---|---|---|---|---|---|---|")
    count = max(options.images, together)
    batch = 16_384 if options.only == "mnist" else 4_096
    for case in cases.MAKERS[options.only](options.device, count, options.epsilons, Path(options.data)):
        truths = [Truth.of(case, i, options.reference) for i in range(options.images)]
        theirs = mean_of([t.errors(recipe(case, i, calls, batch, 1))[0] for i, t in enumerate(truths)])
        fewer = calls // options.part
        loop = options.part * timed(partial(recipe, case, 0, fewer, batch, 1), options.repeats)
        for precision in options.precisions:
            found = ours(case, list(range(options.images)), theirs, precision)
            error = mean_of([t.errors(h)[0] for t, h in zip(truths, found.hessian, strict=True)])
            passes, n = mean_of(found.n_passes.tolist()), mean_of(found.n_calls.tolist())
            own = timed(partial(_explain, case, list(range(together)), theirs, precision), options.repeats) / together
            noise = "" if found.precision_error is None else f", noise {float(found.precision_error.mean()):.2f}"
            print(
                f"| {case.name}, {together} together | {theirs:.3f}, {loop:.4f} | {precision}{noise} | {n:.0f}, "
                f"{passes:.0f}, {error:.3f} | {own:.5f} | {loop / own:.1f}× | {calls / passes:.0f}× |",
                flush=True,
            )
    print(f"\nThe authors' code on the same kind of GPU: {AUTHORS[options.only]} s an input.")


if __name__ == "__main__":
    main()
