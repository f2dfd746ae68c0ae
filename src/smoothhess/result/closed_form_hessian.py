"""H₁ alone: the one-flip Hessian without a single draw, which layer makes it, and how far a sample says it is off."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.draws.designs import find_design
from smoothhess.estimate.statistics import Statistics, symmetric
from smoothhess.estimate.variance import Noise
from smoothhess.result.interactions import Estimate, Interactions
from smoothhess.result.taylor import Taylor

MIN_UNITS = 4  # complete blocks of draws from which the uncertainty of the error is known
SEEN = 3  # standard errors by which ‖H‖² must differ from zero for an error relative to it
NORMAL = 1.959964  # standard errors that a 95 % interval of a normal distribution reaches
LAYER_BYTES = 1 << 31  # of all layers' Hessians together; where they do not fit, none are kept


@dataclass(frozen=True, eq=False)
class Layer:
    """What one activation call of the network adds to H₁."""

    name: str  # of the module that made the call
    kind: str  # "relu", "gelu", "softmax", …
    units: int  # per example
    hessian: Tensor  # (B, d, d); those of all layers add up to H₁
    share: Tensor  # (B,) ⟨H_layer, H₁⟩/‖H₁‖²; the shares of all layers add up to 1


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """The one-flip Hessian of B examples: an approximation, exact for one hidden layer, with no draws at all.

    It freezes the network at x and lets each unit flip alone, so it is right where few units flip within σ and can be
    badly wrong where many do. `error` says how far off a small sample sees it, `suspect` where that is more than
    `tolerance`; `check` is that sample, an unbiased result that `SmoothHess.more` can go on with.
    """

    inputs: Tensor  # (B, *shape)
    hessian: Tensor  # (B, d, d) H₁
    gradient: Tensor  # (B, *shape) ∇f(x) + the mean change of the gradient by single flips
    output: Tensor  # (B,) f(x)
    check: Interactions
    layers: tuple[Layer, ...]
    tolerance: float
    n_passes: Tensor  # (B,) all work, that of the check included

    def __len__(self) -> int:
        return len(self.inputs)

    @cached_property
    def error(self) -> Tensor:
        """Estimated ‖H₁ − H‖_F/‖H‖_F from the check, (B,): 0 where the sample sees no difference."""
        return self._missed.value.clamp_min(0).sqrt().to(self.hessian)

    def error_interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the confidence interval of `error`, (B,) each; 0 and infinity where it is unknown.

        That of the squared error, which is estimated without bias, with its ends' square roots.
        """
        low, high = self._missed.interval(level)
        low, high = (torch.where(end.isnan(), other, end) for end, other in ((low, 0.0), (high, torch.inf)))
        return low.clamp_min(0).sqrt().to(self.hessian), high.clamp_min(0).sqrt().to(self.hessian)

    @cached_property
    def error_stderr(self) -> Tensor:
        """How uncertain `error` is, (B,): error ± 1.96 of these holds the 95 % interval; infinite where it is unknown.

        It is unknown with fewer than MIN_UNITS complete blocks of draws, 2d calls each, and where the check does not
        tell ‖H‖ from zero. Raise `check_calls`.
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

        With the estimate D_u of H − H₁ by each of U independent blocks, ‖H − H₁‖² is the mean of ⟨D_u, D_v⟩ over u ≠ v,
        and ‖H‖² = ‖H₁‖² + 2⟨H₁, H − H₁⟩ + ‖H − H₁‖², both without bias; the variance of their ratio is the jackknife's.
        """
        whole = self.check.unshrunk()
        left = replace(whole.statistics, known=None)  # what the closed form leaves over
        features = left.map(whole.gaussian.push)
        units = complete_units(features)
        if units is None:
            return self._missed_without_units(left, features)
        found = [_ratio(u, h) for u, h in zip(units, self.hessian.double(), strict=True)]  # (b, 2)
        value, stderr = torch.stack(found).unbind(1)
        return Estimate(value, stderr, torch.full_like(value, units.shape[1] - 1))

    def _missed_without_units(self, left: Statistics, features: Statistics) -> Estimate:
        """The same from the symmetric and antisymmetric halves of the estimate; its error is unknown."""
        noise = Noise(left, features, self.check.gaussian)
        missed = noise.squared_norm - noise.of_frobenius
        known = self.hessian.double()
        cross = 2 * (known * symmetric(features.summed() / features.n[:, None, None])).sum((-1, -2))
        size = (known.square().sum((-1, -2)) + cross + missed).clamp_min(torch.finfo(torch.float64).tiny)
        return Estimate(missed / size, torch.full_like(size, torch.inf), torch.zeros_like(size))

    def by_layer(self) -> tuple[Layer, ...]:
        """The activation calls in the order they are made, each with its part of H₁: which layer makes an interaction.

        Layers that no modelled unit belongs to (max-pooling, hard-swish, …) are missing from H₁ altogether.
        """
        if not self.layers:
            raise ValueError(
                f"the layers' Hessians would have held more than {LAYER_BYTES / 2**30:.0f} GiB, so none were kept. "
                "Ask for fewer examples at once."
            )
        return self.layers

    def taylor(self) -> Taylor:
        """The surrogate f(x₀) + G₁ᵀδ + ½δᵀH₁δ."""
        return Taylor(self.inputs, self.output, self.gradient.flatten(1), lambda rows: rows @ self.hessian)

    def __matmul__(self, v: Tensor) -> Tensor:
        """H₁ v for a vector of the shape of one input or of the batch, with the examples in front."""
        flat = torch.as_tensor(v).to(self.hessian).reshape(-1, self.hessian.shape[-1]).expand(len(self), -1)
        return (self.hessian @ flat[..., None])[..., 0].reshape(self.inputs.shape)

    def __repr__(self) -> str:
        lines = [
            f"Closed form (one flip) of {len(self)} example(s), an approximation checked with "
            f"{int(self.check.n_calls[0])} calls",
            "  example      f(x)  seen to be off by      passes",
        ]
        for i in range(min(len(self), 8)):
            stderr = float(self.error_stderr[i])
            off = f"{float(self.error[i]):.3g} ± {f'{stderr:.1g}' if math.isfinite(stderr) else 'unknown'}"
            flag = f"  more than {self.tolerance:g}" if bool(self.suspect[i]) else ""
            lines.append(f"  {i:7d}  {float(self.output[i]):8.4g}  {off:<20} {float(self.n_passes[i]):7.0f}{flag}")
        return "\n".join(lines + ([f"  … and {len(self) - 8} more"] if len(self) > 8 else []))


def complete_units(features: Statistics) -> Tensor | None:
    """Estimates by each complete block of the first rows, (B, U, d, d) float64; None where these are too few."""
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

    def ratio(pairs: Tensor, cross: Tensor, n: int) -> Tensor:
        missed = pairs / (n * (n - 1))
        return torch.stack([missed, square + 2 * cross / n + missed])

    whole = ratio(total, cross.sum(), count)  # ‖D‖², ‖H‖²
    without = ratio(total - 2 * products.sum(1), cross.sum() - cross, count - 1)  # of all blocks but one, (2, U)
    spread = (without - without.mean(1, keepdim=True)).square().sum(1) * (count - 1) / count
    shares = without[0] / without[1]
    variance = (shares - shares.mean()).square().sum() * (count - 1) / count
    seen = (whole[1] > SEEN * spread[1].sqrt()) & (without[1] > 0).all()
    return torch.stack(
        [whole[0] / whole[1].clamp_min(torch.finfo(torch.float64).tiny), torch.where(seen, variance.sqrt(), torch.inf)]
    )
