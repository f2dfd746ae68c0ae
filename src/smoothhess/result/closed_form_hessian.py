"""ClosedForm: the one-flip Hessian H₁, its parts by layer, and the estimate of its error from a sample.

This module holds the record and computes the error. H₁ itself is computed in `smoothhess.curvature.one_flip`, and the
sample is drawn by `SmoothHess.closed_form`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.draws.designs import find_design
from smoothhess.estimate.statistics import Statistics, symmetric
from smoothhess.estimate.variance import Noise
from smoothhess.linalg.memory import LAYER_HESSIANS
from smoothhess.result.interactions import Interactions
from smoothhess.result.intervals import Estimate, plus_minus
from smoothhess.result.taylor import Taylor

MIN_UNITS = 4  # minimum number of complete blocks of draws for a standard error of the error
SEEN = 3  # standard errors by which ‖H‖² must exceed zero for an error relative to it
NORMAL = 1.959964  # half-width of a 95 % interval of a normal distribution, in standard errors


@dataclass(frozen=True, eq=False)
class Layer:
    """The part of H₁ from one activation call of the network."""

    name: str  # of the module that made the call
    kind: str  # "relu", "gelu", "softmax", …
    units: int  # per example
    hessian: Tensor  # (B, d, d); the Hessians of all layers add up to H₁
    share: Tensor  # (B,) ⟨H_layer, H₁⟩/‖H₁‖²; the shares of all layers add up to 1


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """The one-flip Hessian H₁ of B examples: an approximation in closed form, exact for one hidden layer.

    `SmoothHess.closed_form` returns it. The network is frozen at x and the curvature of each unit is averaged
    separately, so H₁ is accurate where few units flip within σ and can be badly wrong where many do. `error` is its
    relative error, estimated from a small sample; `suspect` is True where it exceeds `tolerance`; `check` is that
    sample, an unbiased result that `SmoothHess.more` can extend.
    """

    inputs: Tensor  # (B, *shape)
    hessian: Tensor  # (B, d, d) H₁
    gradient: Tensor  # (B, *shape) ∇f(x) plus the mean change of the gradient by single flips
    output: Tensor  # (B,) f(x)
    check: Interactions
    layers: tuple[Layer, ...]
    tolerance: float
    n_passes: Tensor  # (B,) total work in gradient calls, the check included

    def __len__(self) -> int:
        return len(self.inputs)

    @cached_property
    def error(self) -> Tensor:
        """Estimated ‖H₁ − H‖_F/‖H‖_F from the check, (B,); 0 where the estimate of its square is not positive."""
        return self._missed.value.clamp_min(0).sqrt().to(self.hessian)

    def error_interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Confidence interval of `error`: the square roots of the interval of the squared error, which is unbiased.

        Args:
            level: probability with which the interval contains the true error, between 0 and 1.

        Returns:
            The lower and upper ends, (B,) each; 0 and infinity where the uncertainty is unknown.
        """
        low, high = self._missed.interval(level)
        low, high = (torch.where(end.isnan(), other, end) for end, other in ((low, 0.0), (high, torch.inf)))
        return low.clamp_min(0).sqrt().to(self.hessian), high.clamp_min(0).sqrt().to(self.hessian)

    @cached_property
    def error_stderr(self) -> Tensor:
        """Standard error of `error`, (B,): error ± 1.96 of it contains the 95 % interval.

        It is infinite (unknown) with fewer than 4 complete blocks of draws, of 2d calls each, and where ‖H‖ of the
        check cannot be distinguished from zero. Raise `check_calls` then.
        """
        low, high = self.error_interval()
        return torch.maximum(high - self.error, self.error - low) / NORMAL

    @property
    def suspect(self) -> Tensor:
        """Where `error` exceeds the tolerance, (B,)."""
        return self.error > self.tolerance

    @cached_property
    def _missed(self) -> Estimate:
        """‖H₁ − H‖²/‖H‖² of each example.

        With the estimates D_u of H − H₁ from U independent blocks, the mean of ⟨D_u, D_v⟩ over u ≠ v is an unbiased
        estimate of ‖H − H₁‖², and so is that of ‖H‖² = ‖H₁‖² + 2⟨H₁, H − H₁⟩ + ‖H − H₁‖². The variance of their ratio
        is estimated by the jackknife; as long as few rows differ from the closed form, events that no row contains are
        added.
        """
        check = self.check.unshrunk()
        residual = replace(check.statistics, known=None)  # statistics of the residual H − H₁
        features = residual.map(check.gaussian.push)
        units = complete_units(features)
        if units is None:
            return self._missed_without_units(residual, features)
        found = [_ratio(u, h) for u, h in zip(units, self.hessian.double(), strict=True)]  # (b, 2)
        value, stderr = torch.stack(found).unbind(1)
        size = self.hessian.double().square().sum((-1, -2)).clamp_min(torch.finfo(torch.float64).tiny)
        stderr = (stderr.square() + (check.noise.control_errors.of_unseen / size).square()).sqrt()
        return Estimate(value, stderr, torch.full_like(value, units.shape[1] - 1))

    def _missed_without_units(self, residual: Statistics, features: Statistics) -> Estimate:
        """The ratio from the symmetric and antisymmetric halves of the estimate; its standard error is unknown."""
        noise = Noise(residual, features, self.check.gaussian)
        missed = noise.estimate.squared_norm - noise.of_frobenius
        known = self.hessian.double()
        cross = 2 * (known * symmetric(features.summed() / features.n[:, None, None])).sum((-1, -2))
        size = (known.square().sum((-1, -2)) + cross + missed).clamp_min(torch.finfo(torch.float64).tiny)
        return Estimate(missed / size, torch.full_like(size, torch.inf), torch.zeros_like(size))

    def by_layer(self) -> tuple[Layer, ...]:
        """The parts of H₁ from each activation call, in the order of the calls.

        Layers without modelled units (hard-swish, …) do not contribute to H₁; a relu before or after max-pooling is
        part of the layer of its windows.

        Returns:
            One `Layer` per activation call; their Hessians add up to H₁.

        Raises:
            ValueError: if the Hessians of the layers were too large to be kept.
        """
        if not self.layers:
            raise ValueError(
                f"the Hessians of all layers take more than {LAYER_HESSIANS.n_bytes / 2**30:.0f} GiB and were not "
                "kept. Pass fewer examples to closed_form."
            )
        return self.layers

    def taylor(self) -> Taylor:
        """The surrogate f(x₀) + G₁ᵀδ + ½δᵀH₁δ."""
        return Taylor(self.inputs, self.output, self.gradient.flatten(1), lambda rows: rows @ self.hessian)

    def __matmul__(self, v: Tensor) -> Tensor:
        """The product H₁ v for a vector with the shape of one input or of the batch, (B, *shape)."""
        flat = torch.as_tensor(v).to(self.hessian).reshape(-1, self.hessian.shape[-1]).expand(len(self), -1)
        return (self.hessian @ flat[..., None])[..., 0].reshape(self.inputs.shape)

    def __repr__(self) -> str:
        lines = [
            f"Closed form (one flip) of {len(self)} example(s), an approximation checked with "
            f"{int(self.check.n_calls[0])} calls",
            "  example      f(x)  estimated error ± 95 %  passes",
        ]
        for i in range(min(len(self), 8)):
            off = plus_minus(float(self.error[i]), NORMAL * float(self.error_stderr[i]))
            flag = f"  more than {self.tolerance:g}" if bool(self.suspect[i]) else ""
            lines.append(f"  {i:7d}  {float(self.output[i]):8.4g}  {off:<22} {float(self.n_passes[i]):7.0f}{flag}")
        return "\n".join(lines + ([f"  … and {len(self) - 8} more"] if len(self) > 8 else []))


def complete_units(features: Statistics) -> Tensor | None:
    """Estimates from each complete block of the first rows, (B, U, d, d) float64; None if there are too few blocks."""
    size = find_design(features.design).replicate_rows(features.rank)
    count = int(features.n_head.min()) // size
    if count < MIN_UNITS:
        return None
    score, odd = (
        t[:, : count * size].unflatten(1, (count, size)).double() for t in (features.head.score, features.head.odd)
    )
    return symmetric(score.mT @ odd / size)


def _ratio(units: Tensor, known: Tensor) -> Tensor:
    """‖D‖²/‖H‖² and its standard error, (2,), from independent estimates (U, d, d) of D = H − H₁, and H₁ (d, d)."""
    flat, count = units.flatten(1), len(units)
    products = flat @ flat.mT
    products.fill_diagonal_(0)
    cross, total = flat @ known.reshape(-1), products.sum()
    square = known.square().sum()

    def squared_norms(pairs: Tensor, cross: Tensor, n: int) -> Tensor:
        missed = pairs / (n * (n - 1))
        return torch.stack([missed, square + 2 * cross / n + missed])

    norms = squared_norms(total, cross.sum(), count)  # ‖D‖², ‖H‖²
    without = squared_norms(total - 2 * products.sum(1), cross.sum() - cross, count - 1)  # without one block, (2, U)
    spread = (without - without.mean(1, keepdim=True)).square().sum(1) * (count - 1) / count
    shares = without[0] / without[1]
    variance = (shares - shares.mean()).square().sum() * (count - 1) / count
    seen = (norms[1] > SEEN * spread[1].sqrt()) & (without[1] > 0).all()
    return torch.stack(
        [
            norms[0] / norms[1].clamp_min(torch.finfo(torch.float64).tiny),
            torch.where(seen, variance.sqrt(), torch.inf),
        ]
    )
