"""P_MSE of many surrogates around a batch of points: every radius, both samplers, all functions of a network at once.

The draws and the results are the same as those of `smoothhess.evaluate.compare`. Here a surrogate is evaluated only
through its two forms along the directions, gᵀu and uᵀHu, which are used for every radius and both samplers; and one
pass of the network is used for all its functions. On a GPU most passes of a convolutional network use TF32: the
difference is measured on the first draws in full precision and subtracted, so that the result is unbiased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from smoothhess.evaluate.ball_samples import BallSamples
from smoothhess.linalg.memory import BATCH_INPUTS
from smoothhess.model.float_precision import check_precision, evaluated
from smoothhess.model.gradients import Oracle
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed
from smoothhess.result.taylor import Taylor

__all__ = ["SAMPLERS", "Balls", "Forms", "Score"]

SAMPLERS = ("radius", "ball")  # that of the published tables, and the definition


class Forms(NamedTuple):
    """A surrogate along n unit directions of each of B points: f(x), gᵀu and uᵀHu."""

    value: Tensor  # (B,)
    linear: Tensor  # (B, n)
    square: Tensor | None  # (B, n); None: of first order


class Score(NamedTuple):
    """P_MSE of each point, (B,), and the standard error over draws of their mean."""

    per_point: Tensor
    stderr: float


@dataclass(frozen=True, eq=False)
class Balls:
    """Values of a network's functions at n displacements of each of B points, for every radius and sampler."""

    inputs: Tensor  # (B, *shape)
    directions: Tensor  # (n, d) of length 1
    shares: Mapping[str, Tensor]  # for each sampler: length of the displacements over the radius, (n,)
    truth: Mapping[tuple[str, float, str], Tensor]  # by function, radius and sampler: (B, n)
    exact: Mapping[tuple[str, float, str], Tensor]  # the same at the first draws, in full precision; empty: all are

    @staticmethod
    def around(
        call: ModelCall,
        targets: Mapping[str, Tensor],
        radii: Sequence[float],
        samples: BallSamples,
        *,
        n_exact: int | None = None,
        precision: str = "float32",
        show_progress: bool = False,
    ) -> Balls:
        """Evaluate the network.

        Args:
            call: a network from inputs to scores (N, C), and the inputs (B, *shape).
            targets: for each function, the index of its score at each point, (B,).
            radii: of the balls.
            samples: displacements of each point, the same for all, with sampling "ball".
            n_exact: how many of them are also evaluated in full precision; only for precision "tf32".
            precision: "float32" or, on a GPU, "tf32".
            show_progress: a bar over the draws.

        >>> f = lambda x: torch.stack([x.square().sum(1), x.sum(1)], 1)
        >>> call, samples = ModelCall(f, torch.zeros(1, 3)), BallSamples(100, "ball", 0)
        >>> balls = Balls.around(call, {"square": torch.tensor([0])}, [2.0], samples)
        >>> flat = Forms(torch.zeros(1), torch.zeros(1, 100), None)  # 0 everywhere, where |δ|² is correct
        >>> bool(balls.score("square", 2.0, "ball", flat).per_point < 16)
        True
        """
        inputs, n_samples = call.inputs, samples.n_samples
        check_precision(precision, inputs.device, inputs.dtype)
        d = inputs[0].numel()
        chosen = torch.stack([t.to(inputs.device) for t in targets.values()], 1)  # (B, F)
        n_exact = n_samples if precision == "float32" else min(n_exact or n_samples, n_samples)
        directions: list[Tensor] = []
        lengths: list[Tensor] = []
        found: dict[tuple[float, str, str], list[Tensor]] = {}
        bar = tqdm(total=n_samples, desc="network", unit="draw", disable=not show_progress, leave=False)
        with bar, borrowed(call.forward_func, inputs.device), torch.no_grad():
            oracle, start = call.oracle(), 0
            for drawn in samples.chunks(inputs):
                length = torch.linalg.vector_norm(drawn, dim=1)
                unit, shares = (drawn / length[:, None]).to(inputs.device), _shares(length.to(inputs.device), d)
                for radius in radii:
                    for sampler in SAMPLERS:
                        delta = (radius * shares[sampler][:, None] * unit).to(inputs)
                        if precision != "float32":
                            values = _values(oracle, inputs, delta, chosen, precision)
                            found.setdefault((radius, sampler, precision), []).append(values)
                        if start < n_exact:
                            values = _values(oracle, inputs, delta[: n_exact - start], chosen, "float32")
                            found.setdefault((radius, sampler, "float32"), []).append(values)
                directions.append(unit.to(inputs))
                lengths.append(length)
                start += len(unit)
                bar.update(len(unit))
        joined = {key: torch.cat(parts, 1) for key, parts in found.items()}  # (B, n, F)

        def split(kind: str) -> dict[tuple[str, float, str], Tensor]:
            return {
                (name, radius, sampler): values[..., f]
                for (radius, sampler, made), values in joined.items()
                if made == kind
                for f, name in enumerate(targets)
            }

        exact = {} if precision == "float32" else split("float32")
        return Balls(inputs, torch.cat(directions), _shares(torch.cat(lengths), d), split(precision), exact)

    def __len__(self) -> int:
        return len(self.inputs)

    def forms(self, taylor: Taylor) -> Forms:
        """Evaluate a surrogate along the directions."""
        linear = (taylor.gradient @ self.directions.mT).double()
        if taylor.product is None:
            return Forms(taylor.value.double(), linear, None)
        step = max(1, 4 * BATCH_INPUTS.n_bytes // (len(self) * self.directions[0].numel() * self.inputs.element_size()))
        square = []
        for u in self.directions.split(step):
            product = taylor.product(u.expand(len(self), -1, -1))
            square.append((product * u).sum(-1).double())
        return Forms(taylor.value.double(), linear, torch.cat(square, 1))

    def score(self, function: str, radius: float, sampler: str, forms: Forms) -> Score:
        """P_MSE of a surrogate of one function in the balls of one radius."""
        key = (function, radius, sampler)
        length = radius * self.shares[sampler].to(forms.linear)
        guess = forms.value[:, None] + length * forms.linear
        if forms.square is not None:
            guess = guess + length.square() / 2 * forms.square
        errors = (guess - self.truth[key]).square()  # (B, n)
        mean, variance = errors.mean(1), _variance_of_mean(errors)
        if key in self.exact:
            n = self.exact[key].shape[1]
            change = (guess[:, :n] - self.exact[key]).square() - errors[:, :n]
            mean, variance = mean + change.mean(1), variance + _variance_of_mean(change)
        return Score(mean.cpu(), variance**0.5)


def _shares(length: Tensor, d: int) -> dict[str, Tensor]:
    """Lengths for both samplers: |δ|^d of the uniform ball is uniform, and is the |δ| of the other sampler."""
    return {"radius": length**d, "ball": length}


def _values(oracle: Oracle, inputs: Tensor, delta: Tensor, chosen: Tensor, precision: str) -> Tensor:
    """Scores (B, c, F) at displacements (c, d) from each input."""
    points = (inputs[:, None] + delta.reshape(1, -1, *inputs.shape[1:])).flatten(0, 1)
    owner = torch.arange(len(inputs), device=inputs.device).repeat_interleave(len(delta))

    def picked(p: Tensor, o: Tensor) -> tuple[Tensor]:
        if p.is_cuda and p.ndim == 4:
            p = p.contiguous(memory_format=torch.channels_last)
        with evaluated(precision, p.device):
            return (oracle.bound(o)(p).gather(1, chosen[o]),)

    (values,) = oracle.in_batches(picked, points, owner, cautious=False)
    return values.reshape(len(inputs), len(delta), -1).double()


def _variance_of_mean(errors: Tensor) -> float:
    """Variance over draws of the mean over points and draws; all points share the draws."""
    per_draw = errors.mean(0)
    return float(per_draw.var() / len(per_draw)) if len(per_draw) > 1 else float("nan")
