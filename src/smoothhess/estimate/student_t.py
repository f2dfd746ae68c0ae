"""Student's t without scipy: two-sided p-values and quantiles, in float64, for tensors of degrees of freedom."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HILL_FROM = 20.0  # degrees of freedom from which Hill's expansion is accurate to about 1e-7
FRACTION_TO = 1000.0  # and up to which tables are made by the continued fraction, which takes longer
MANY, NODES = 20_000, 1024  # from so many t on, a table of so many entries is read instead
FAR = 250 * math.log(10)  # a table goes to about the t where log p is minus this


def two_sided_p(t: Tensor, df: Tensor) -> Tensor:
    """P(|T| ≥ |t|) for T of Student's law with `df` > 0 degrees of freedom (infinite: normal).

    >>> two_sided_p(torch.tensor(2.0), torch.tensor(10.0))
    tensor(0.0734, dtype=torch.float64)
    """
    if df.numel() == 1 and t.numel() >= MANY:
        return Tails(df.reshape(1))(t.reshape(1, -1)).reshape(t.shape)
    t, df = torch.broadcast_tensors(t.double().abs(), df.double())
    finite, t = t.isfinite(), torch.where(t.isinf(), 0.0, t)
    if (df >= HILL_FROM).all():
        return torch.where(finite, torch.erfc(_normal_equivalent(t, df) / math.sqrt(2)), t)
    p = torch.where(
        df >= HILL_FROM,
        torch.erfc(_normal_equivalent(t, df.clamp_min(HILL_FROM)) / math.sqrt(2)),
        _beta_tail(t, df.clamp_max(HILL_FROM)),
    )
    return torch.where(finite, p, t)  # 0 beyond all bounds, NaN for NaN


class Tails:
    """The same for many t of a few examples, each with degrees of freedom of its own, from tables.

    log p is smooth in asinh t, and its slope is known, so cubic pieces give p to 1e-7.

    >>> Tails(torch.tensor([10.0, torch.inf]))(torch.tensor([[2.0], [2.0]]))
    tensor([[0.0734],
            [0.0455]], dtype=torch.float64)
    """

    def __init__(self, df: Tensor) -> None:
        self.df = df.double()[:, None]  # (b, 1)
        finite = self.df.clamp_max(1e12)
        self.top = (finite * torch.expm1((2 * FAR / finite).clamp_max(60.0))).sqrt()
        u = torch.linspace(0, 1, NODES, dtype=torch.float64, device=df.device) * torch.asinh(self.top)
        node = torch.sinh(u)
        # Hill's expansion is not good enough in the far tails of fewer degrees of freedom: cubic pieces would overshoot
        few, many = self.df.clamp_max(FRACTION_TO), self.df.clamp_min(FRACTION_TO)
        hill = torch.erfc(_normal_equivalent(node, many) / math.sqrt(2))
        p = torch.where(self.df <= FRACTION_TO, _beta_tail(node, few), hill)
        self.step = u[:, 1:2]
        value, slope = p.log(), -2 * _density(node, self.df) * torch.cosh(u) / p * self.step
        (a, b), (m, n) = ((c[:, :-1], c[:, 1:]) for c in (value, slope))  # at both ends of each piece
        self.pieces = torch.stack([a, m, 3 * (b - a) - 2 * m - n, 2 * (a - b) + m + n], 1)  # (b, 4, NODES − 1)

    def __getitem__(self, rows: slice) -> Tails:
        part = object.__new__(Tails)
        part.__dict__.update({name: t[rows] for name, t in vars(self).items()})
        return part

    def __call__(self, t: Tensor) -> Tensor:
        """P(|T| ≥ |t|) for each of (b, n)."""
        t = t.double().abs()
        inside = t < self.top  # not the largest, infinity and NaN
        place = torch.asinh(torch.where(inside, t, 0.0)).div_(self.step).clamp_max_(NODES - 1.001)
        left = place.long()
        x = place.sub_(left)
        constant, first, second, third = (c.gather(1, left) for c in self.pieces.unbind(1))
        for lower in (second, first, constant):
            third = torch.addcmul(lower, third, x, out=lower)
        found = third.exp_()
        rest = torch.nonzero(~inside)
        if len(rest):
            row, column = rest.unbind(1)
            found[row, column] = two_sided_p(t[row, column], self.df[row, 0])
        return found


def quantile(level: float, df: Tensor) -> Tensor:
    """The t that |T| stays below with probability `level`; infinite where df is 0.

    >>> quantile(0.95, torch.tensor([1.0, 10.0, torch.inf]))
    tensor([12.7062,  2.2281,  1.9600], dtype=torch.float64)
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}.")
    df = df.double()
    safe = df.clamp_min(0.05)
    log_t = torch.zeros_like(safe)
    # Newton on log p against log t: nearly a straight line in the heavy tails where p against t is hopeless.
    for _ in range(60):
        t = log_t.exp()
        p = two_sided_p(t, safe).clamp_min(torch.finfo(torch.float64).tiny)
        step = torch.log(p / (1 - level)) * p / (2 * t * _density(t, safe))
        log_t = log_t + step.clamp(-1, 3)
        if (step.abs() < 1e-13).all():
            break
    return torch.where(df > 0, log_t.exp(), torch.inf)


def normal_score(t: Tensor, df: Tensor) -> Tensor:
    """The normal deviate that is about as improbable as t with `df` degrees of freedom, with its sign (Wallace 1959).

    Within 0.05 from 2 degrees of freedom on; it neither overflows nor underflows, however large t is.

    >>> normal_score(torch.tensor([2.0, -6.0]).double(), torch.tensor([10.0, 40.0]).double())
    tensor([ 1.7901, -5.0356], dtype=torch.float64)
    """
    t, df = t.double(), df.double()
    finite = df.clamp_max(1e12)
    return ((8 * finite + 1) / (8 * finite + 3) * (finite * torch.log1p(t * t / finite)).sqrt()).copysign(t)


def _density(t: Tensor, df: Tensor) -> Tensor:
    """Student's density."""
    finite = df.clamp_max(1e12)
    normaliser = torch.lgamma((finite + 1) / 2) - torch.lgamma(finite / 2) - torch.log(finite * math.pi) / 2
    normaliser = torch.where(finite > 1e6, -math.log(2 * math.pi) / 2, normaliser)  # lgammas of large numbers cancel
    return torch.exp(normaliser - (finite + 1) / 2 * torch.log1p(t * t / finite))


def _normal_equivalent(t: Tensor, df: Tensor) -> Tensor:
    """The normal deviate with the same two-sided probability (Hill 1970, CACM algorithm 395)."""
    finite = df.clamp_max(1e12)
    a = finite - 0.5
    b = 48 * a * a
    y = a * torch.log1p(t * t / finite)
    correction = ((((-0.4 * y - 3.3) * y - 24) * y - 85.5) / (0.8 * y * y + 100 + b) + y + 3) / b + 1
    return correction * y.sqrt()


def _beta_tail(t: Tensor, df: Tensor) -> Tensor:
    """I_x(df/2, 1/2) at x = df/(df + t²), by its continued fraction on the side where it converges fast."""
    x = df / (df + t * t)
    a, b = df / 2, torch.full_like(df, 0.5)
    direct = x < (a + 1) / (a + b + 2)
    inner = _beta_fraction(torch.where(direct, a, b), torch.where(direct, b, a), torch.where(direct, x, 1 - x))
    return torch.where(direct, inner, 1 - inner).clamp(0, 1)


def _beta_fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """The regularised incomplete beta function I_x(a, b), modified Lentz."""
    tiny = 1e-300
    front = torch.exp(
        torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b) + torch.xlogy(a, x) + torch.xlogy(b, 1 - x)
    )
    c = torch.ones_like(x)
    d = 1 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    h = d
    for m in range(1, 200):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _away_from_zero(1 + even * d, tiny)
        c = _away_from_zero(1 + even / c, tiny)
        h = h * c * d
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away_from_zero(1 + odd * d, tiny)
        c = _away_from_zero(1 + odd / c, tiny)
        step = c * d
        h = h * step
        if ((step - 1).abs() < 1e-15).all():
            break
    return front * h / a


def _away_from_zero(x: Tensor, tiny: float) -> Tensor:
    return torch.where(x.abs() < tiny, tiny, x)
