"""H₁ alone: the one-flip Hessian without a single draw, which layer makes it, and how far a sample says it is off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from smoothhess.interactions import Interactions
from smoothhess.noise import Noise
from smoothhess.taylor import Taylor

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
        return self._missed[0]

    @cached_property
    def error_stderr(self) -> Tensor:
        """How uncertain `error` is, (B,): half the range that the check's own noise leaves open."""
        return self._missed[1]

    @property
    def suspect(self) -> Tensor:
        """Where `error` exceeds the tolerance, (B,)."""
        return self.error > self.tolerance

    @cached_property
    def _missed(self) -> tuple[Tensor, Tensor]:
        whole = self.check.unshrunk()
        left = replace(whole.statistics, known=None)  # what the closed form leaves over
        noise = Noise(left, left.map(whole.gaussian.push), whole.gaussian)
        missed, spread = _squared_norm(noise)
        norm2, reach = _squared_norm(whole._noise)
        size = torch.maximum(norm2, 2 * reach).clamp_min(torch.finfo(torch.float64).tiny)
        error = (missed.clamp_min(0) / size).sqrt()
        highest, lowest = (((missed + s * spread).clamp_min(0) / size).sqrt() for s in (1, -1))
        stderr = torch.hypot((highest - lowest) / 2, error * reach / size / 2)
        return error.to(self.hessian), stderr.to(self.hessian)

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
            off = f"{float(self.error[i]):.3g} ± {float(self.error_stderr[i]):.1g}"
            flag = f"  more than {self.tolerance:g}" if bool(self.suspect[i]) else ""
            lines.append(f"  {i:7d}  {float(self.output[i]):8.4g}  {off:<20} {float(self.n_passes[i]):7.0f}{flag}")
        return "\n".join(lines + ([f"  … and {len(self) - 8} more"] if len(self) > 8 else []))


def _squared_norm(noise: Noise) -> tuple[Tensor, Tensor]:
    """‖·‖²_F estimated without bias, and the standard deviation it would have were it zero, (B,) each."""
    signal, score = noise.squared_norm - noise.of_frobenius, noise.zero_score()
    return signal, torch.where((score != 0) & score.isfinite(), signal / score, 0.0).abs()
