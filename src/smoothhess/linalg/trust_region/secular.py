"""The trust-region problem with a diagonal Hessian, by Newton's method for the secular equation.

The minimum of aᵀy + ½Σ wᵢyᵢ² over ‖y‖ ≤ r is the Newton step yᵢ = −aᵢ/wᵢ if no wᵢ is negative and the step lies inside
the ball. Otherwise it lies on the sphere: yᵢ = −aᵢ/(wᵢ + λ) with the unique λ ≥ max(0, −min w) that satisfies the
secular equation ‖y(λ)‖ = r. In the hard case a has no component along the lowest wᵢ, and y(λ) lies inside the ball even
for λ = −min w: then a multiple of the lowest direction, with either sign, is added to reach the sphere.

All examples are iterated in one batch. Three choices limit rounding errors: everything is scaled by powers of two, so
that the radius is 1 and the largest of |w| and |a| is about 1; the unknown is μ = λ + min w, the distance from the
pole, which may be as small as 1e-280 and is still computed to full relative precision; and Newton's method is applied
to 1/‖y(μ)‖, which is concave and almost linear, so that it does not overshoot from the left. Where Newton's method is
slow, a bracket is bisected on the scale of log μ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smoothhess.linalg.trust_region.scaling import exponent, norm, power

MOST_STEPS = 64  # at most 16 were observed
NEAR = 4.0  # ratio of the ends of the bracket below which only Newton steps are made
_EPS = torch.finfo(torch.float64).eps
_NOTHING = 1e-280  # treated as zero in a problem scaled to 1


def minimize_diagonal(values: Tensor, coefficients: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """The minimiser y (…, k) of aᵀy + ½Σ wᵢyᵢ² over ‖y‖ ≤ radius, and its multiplier λ ≥ 0 (…).

    `values` w and `coefficients` a are (…, k) in any order, `radius` is (…), all float64; they broadcast.

    >>> w, a = torch.tensor([-1.0, 1.0]).double(), torch.tensor([0.0, 2.0]).double()
    >>> minimize_diagonal(w, a, torch.tensor(2.0).double())  # the hard case
    (tensor([ 1.7321, -1.0000], dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    w, a, r = torch.broadcast_tensors(values, coefficients, radius[..., None])
    r = r[..., 0]
    inner, inside = _newton_step(w, a, r)
    scaled_w, scaled_a, unit = _scaled(w, a, r)
    y, multiplier = _on_sphere(scaled_w, scaled_a)
    step = torch.where(inside[..., None], inner, r[..., None] * y)
    return step, torch.where(inside, 0.0, multiplier * unit)


def _newton_step(w: Tensor, a: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The shortest stationary point, and whether it is the minimum: w ≥ 0 and the point inside.

    Components along null eigenvectors that are below rounding count as zero; otherwise the step would follow rounding
    errors to the sphere.
    """
    noise = w.shape[-1] * _EPS
    zero = w.abs() <= noise * w.abs().amax(-1, keepdim=True)
    still = a.abs() <= noise * a.abs().amax(-1, keepdim=True)
    step = torch.where(a == 0, 0.0, -a / w)
    blunt = torch.where(zero & still, 0.0, step)
    settled = ((w > 0) | (zero & still)).all(-1)
    inside = settled & (norm(blunt / r[..., None]) <= 1)
    return torch.where(inside[..., None], blunt, 0.0), inside


def _scaled(w: Tensor, a: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w and a of the same problem with radius 1 and numbers about 1, and the unit of its multipliers."""
    mantissa, powers = torch.frexp(r)
    of_r, of_w, of_a = powers.double(), exponent(w), exponent(a)
    excess = of_w + of_r - of_a  # of w·r over a, in powers of two
    w = w * power(-of_w)[..., None] * (mantissa * power(excess.clamp_max(0)))[..., None]
    a = a * power(-of_a)[..., None] * power(-excess.clamp_min(0))[..., None]
    unit = power(torch.maximum(of_a, of_w + of_r) - of_r) / mantissa
    return w, a, unit


def _on_sphere(w: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum on the unit sphere, and λ."""
    a = torch.where(a.abs() > _NOTHING, a, 0.0)  # avoids underflow in quotients and roots
    low, lowest = w.min(-1)
    gap = w - low[..., None]
    size = a.abs()
    # bracket of the root: no |yᵢ| exceeds 1 there, and ‖a‖/μ, a bound of ‖y‖, is at least 1
    lo = torch.maximum((size - gap).amax(-1), low).clamp_min(0)
    hi = torch.maximum(norm(a), lo)
    at_pole = torch.where(a == 0, 0.0, -a / gap)
    length = norm(at_pole)
    hard = (lo == 0) & (length <= 1)
    lo = lo.clamp_min(_NOTHING)
    mu = _root(gap, a, lo, torch.maximum(hi, lo))
    y = -a / (gap + mu[..., None])
    y = y / norm(y).clamp_min(1)[..., None]
    rest = ((1 - length) * (1 + length)).clamp_min(0).sqrt()
    filled = torch.where(a == 0, 0.0, at_pole).scatter_add(-1, lowest[..., None], rest[..., None])
    y = torch.where(hard[..., None], filled, y)
    return y, (torch.where(hard, 0.0, mu) - low).clamp_min(0)


def _root(gap: Tensor, a: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """μ in [lo, hi] with ‖a/(gap + μ)‖ = 1."""
    mu = lo
    for _ in range(MOST_STEPS):
        far = gap + mu[..., None]
        y2 = (a / far).square()
        n2 = y2.sum(-1)
        n = n2.sqrt()
        slope = (y2 * (mu[..., None] / far)).sum(-1)  # −μ/2 times the derivative of ‖y‖²
        newton = mu + mu * (n - 1) * (n2 / slope)
        hi = torch.where(n < 1, torch.minimum(hi, mu), hi)
        lo = torch.where(n < 1, lo, torch.maximum(lo, mu))
        # the tangent of a concave function lies above it; far on the right its root is lost to rounding
        newton = torch.where(NEAR * newton >= mu, newton, 0.0)
        lo = torch.minimum(torch.fmax(lo, newton), hi)
        following = torch.where(hi > NEAR * lo, lo.sqrt() * hi.sqrt(), lo)
        settled = (following - mu).abs() <= 2 * _EPS * mu
        mu = following
        if bool(settled.all()):
            break
    return mu
