"""The exact Hessian at 0 of a smoothed function of two variables, from its values on rings, without derivatives.

With f − f(0) averaged over the angle with weights 1, cos 2φ and sin 2φ to a(r), c(r) and s(r), and p the density of the
radius,

    H₁₁, H₂₂ = ∫ [r²(a ± c)/2σ⁴ − a/σ²] p(r) dr,      H₁₂ = ∫ r² s/2σ⁴ p(r) dr,      p(r) = r/σ² exp(−r²/2σ²),

so one set of values is used for every σ. This is independent of the estimator, which uses gradients only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ENTRIES", "Rings"]

ENTRIES = {"H₁₁": (0, 0), "H₁₂": (0, 1), "H₂₂": (1, 1)}
_BATCH = 8_192  # points per forward pass


@dataclass(frozen=True, eq=False)
class Rings:
    """Angular means of f − f(0) on rings around 0, with radii in a geometric sequence, for its smoothed Hessian.

    f − f(0) is set to zero where `where` is False: the Hessian is linear in f, so this gives the contribution of a
    region.

    >>> saddle = Rings.of(lambda x: x[:, 0] * x[:, 1])
    >>> saddle.hessian(torch.tensor([0.01, 1.0])).round(decimals=6).abs()
    tensor([[[0., 1.],
             [1., 0.]],
    <BLANKLINE>
            [[0., 1.],
             [1., 0.]]], dtype=torch.float64)
    """

    radii: Tensor  # (R,)
    mean: Tensor  # (R,)
    cos2: Tensor  # (R,)
    sin2: Tensor  # (R,)

    @classmethod
    def of(
        cls,
        function: Callable[[Tensor], Tensor],
        *,
        smallest: float = 1e-5,
        largest: float = 30.0,
        n_radii: int = 900,
        n_angles: int = 256,
        where: Callable[[Tensor], Tensor] | None = None,
        device: str = "cpu",
    ) -> Rings:
        """Values of `function` (B, 2) → (B,) in float64; enough for σ between 100 `smallest` and `largest`/8."""
        radii = torch.logspace(math.log10(smallest), math.log10(largest), n_radii, dtype=torch.float64, device=device)
        # half a step off the axes, where a function may have its kinks
        angle = (torch.arange(n_angles, dtype=torch.float64, device=device) + 0.5) * (2 * math.pi / n_angles)
        circle = torch.stack([angle.cos(), angle.sin()], -1)  # (A, 2)
        points = (radii[:, None, None] * circle).flatten(0, 1)  # (R·A, 2)
        with torch.no_grad():
            centre = function(points.new_zeros(1, 2))
            values = torch.cat([function(batch) - centre for batch in points.split(_BATCH)])
            if where is not None:
                values = torch.where(where(points), values, 0.0)
        values = values.reshape(n_radii, n_angles)
        cos2, sin2 = (values @ wave / n_angles for wave in ((2 * angle).cos(), (2 * angle).sin()))
        return cls(radii, values.mean(1), cos2, sin2)

    def hessian(self, sigma2: Tensor) -> Tensor:
        """∇²E[f(δ)], δ ~ N(0, σ²I), for each σ² of (S,); (S, 2, 2)."""
        s2, r2, weight = sigma2.to(self.radii)[:, None], self.radii.square(), self._weight(sigma2)
        along, across = ((weight * r2 / 2 * wave).sum(1) / s2[:, 0] ** 2 for wave in (self.cos2, self.sin2))
        # half the Laplacian
        level = (weight * self.mean * (r2 / (2 * s2) - 1)).sum(1) / s2[:, 0]
        return torch.stack([torch.stack([level + along, across], -1), torch.stack([across, level - along], -1)], -2)

    def expectation(self, sigma2: Tensor) -> Tensor:
        """E[f(δ)] − f(0), δ ~ N(0, σ²I), for each σ² of (S,); (S,)."""
        return self._weight(sigma2) @ self.mean

    def _weight(self, sigma2: Tensor) -> Tensor:
        """p(r) dr with dr = r d(log r), (S, R); the trapezoid rule is a plain sum, since both ends vanish."""
        s2, r2 = sigma2.to(self.radii)[:, None], self.radii.square()
        step = math.log(float(self.radii[-1] / self.radii[0])) / (len(self.radii) - 1)
        return r2 / s2 * torch.exp(-r2 / (2 * s2)) * step

    def entries(self, sigma2: list[float]) -> dict[str, list[float]]:
        """The Hessian's entries by name, one number for each σ²."""
        hessian = self.hessian(torch.tensor(sigma2, dtype=torch.float64))
        return {name: hessian[:, i, j].tolist() for name, (i, j) in ENTRIES.items()}
