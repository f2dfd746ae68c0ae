"""Student's t distribution for tensors of degrees of freedom: two-sided p-values and quantiles in float64, by scipy.

Only functions of the distribution belong here; the degrees of freedom are computed in `variance`, q-values in
`smoothhess.result.pairs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NORMAL_FROM = 1e12  # degrees of freedom from which the normal distribution is used
LEAST_DF = 0.05  # quantiles with fewer degrees of freedom overflow
MANY, NODES = 20_000, 1024  # number of t from which a table is used, and its number of nodes
FAR = 250 * math.log(10)  # a table covers |t| up to about log p = −FAR


def two_sided_p(t: Tensor, df: Tensor) -> Tensor:
    """P(|T| ≥ |t|) for T of Student's distribution with `df` > 0 degrees of freedom (infinite: normal).

    Args:
        t: values of the statistic.
        df: degrees of freedom, broadcastable with t.

    Returns:
        p-values in float64.

    >>> two_sided_p(torch.tensor(2.0), torch.tensor(10.0))
    tensor(0.0734, dtype=torch.float64)
    """
    if df.numel() == 1 and t.numel() >= MANY:
        return Tails.of(df.reshape(1))(t.reshape(1, -1)).reshape(t.shape)
    t, df = torch.broadcast_tensors(t.double().abs(), df.double())
    return torch.where(df >= NORMAL_FROM, torch.erfc(t / math.sqrt(2)), _beta_tail(t, df.clamp_max(NORMAL_FROM)))


def _beta_tail(t: Tensor, df: Tensor) -> Tensor:
    """I_x(df/2, 1/2) at x = df/(df + t²)."""
    from scipy.special import betainc

    x = df / (df + t * t)
    return torch.as_tensor(betainc(df.cpu().numpy() / 2, 0.5, x.cpu().numpy())).to(t)


@dataclass(frozen=True, eq=False)
class Tails:
    """Two-sided p-values from tables, for many t of a few examples with different degrees of freedom.

    log p is a smooth function of asinh t with a known derivative, so cubic Hermite interpolation is accurate to 1e-7.

    >>> Tails.of(torch.tensor([10.0, torch.inf]))(torch.tensor([[2.0], [2.0]]))
    tensor([[0.0734],
            [0.0455]], dtype=torch.float64)
    """

    df: Tensor  # (b, 1) degrees of freedom
    top: Tensor  # (b, 1) largest |t| of the table
    step: Tensor  # (b, 1) distance of two nodes in asinh t
    pieces: Tensor  # (b, 4, NODES − 1) coefficients of log p in each interval

    @staticmethod
    def of(df: Tensor) -> Tails:
        """Compute the tables for degrees of freedom (b,)."""
        df = df.double()[:, None]
        finite = df.clamp_max(NORMAL_FROM)
        top = (finite * torch.expm1((2 * FAR / finite).clamp_max(60.0))).sqrt()
        u = torch.linspace(0, 1, NODES, dtype=torch.float64, device=df.device) * torch.asinh(top)
        node = torch.sinh(u)
        p = two_sided_p(node, df)
        step = u[:, 1:2]
        value, slope = p.log(), -2 * _density(node, df) * torch.cosh(u) / p * step
        (a, b), (m, n) = ((c[:, :-1], c[:, 1:]) for c in (value, slope))  # at both ends of each interval
        return Tails(df, top, step, torch.stack([a, m, 3 * (b - a) - 2 * m - n, 2 * (a - b) + m + n], 1))

    def __getitem__(self, rows: slice) -> Tails:
        return Tails(self.df[rows], self.top[rows], self.step[rows], self.pieces[rows])

    def __call__(self, t: Tensor) -> Tensor:
        """P(|T| ≥ |t|) for each of (b, n)."""
        t = t.double().abs()
        inside = t < self.top  # False for t beyond the table, infinity and NaN
        place = torch.asinh(torch.where(inside, t, 0.0)).div_(self.step).clamp_max_(NODES - 1.001)
        interval = place.long()
        x = place.sub_(interval)
        constant, first, second, third = (c.gather(1, interval) for c in self.pieces.unbind(1))
        for lower in (second, first, constant):
            third = torch.addcmul(lower, third, x, out=lower)
        found = third.exp_()
        rest = torch.nonzero(~inside)
        if len(rest):
            row, column = rest.unbind(1)
            far, df = t[row, column], self.df[row, 0]
            exact = [two_sided_p(far[i : i + MANY - 1], df[i : i + MANY - 1]) for i in range(0, len(far), MANY - 1)]
            found[row, column] = torch.cat(exact)
        return found


def quantile(level: float, df: Tensor) -> Tensor:
    """The t with P(|T| ≤ t) = `level`; infinite where df is 0.

    Args:
        level: probability, between 0 and 1.
        df: degrees of freedom.

    Returns:
        Quantiles in float64, with the shape of df.

    Raises:
        ValueError: if `level` is not between 0 and 1.

    >>> quantile(0.95, torch.tensor([1.0, 10.0, torch.inf]))
    tensor([12.7062,  2.2281,  1.9600], dtype=torch.float64)
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}. Pass 0.95 for 95 %.")
    from scipy.special import betaincinv, ndtri

    df = df.double()
    half = df.clamp(LEAST_DF, NORMAL_FROM) / 2
    x = torch.as_tensor(betaincinv(half.cpu().numpy(), 0.5, 1 - level)).to(half)  # df/(df + t²)
    rest = torch.as_tensor(betaincinv(0.5, half.cpu().numpy(), level)).to(half)  # t²/(df + t²), where x is near 1
    t = (2 * half * torch.where(x < 0.5, (1 - x) / x, rest / (1 - rest))).sqrt()
    t = torch.where(df >= NORMAL_FROM, float(ndtri((1 + level) / 2)), t)
    return torch.where(df > 0, t, torch.inf)


def normal_score(t: Tensor, df: Tensor) -> Tensor:
    """The normal deviate with about the same p-value as t with `df` degrees of freedom, with its sign (Wallace 1959).

    The error is below 0.05 from 2 degrees of freedom on; there is no overflow or underflow for any t.

    >>> normal_score(torch.tensor([2.0, -6.0]).double(), torch.tensor([10.0, 40.0]).double())
    tensor([ 1.7901, -5.0356], dtype=torch.float64)
    """
    t, df = t.double(), df.double()
    finite = df.clamp_max(NORMAL_FROM)
    return ((8 * finite + 1) / (8 * finite + 3) * (finite * torch.log1p(t * t / finite)).sqrt()).copysign(t)


def _density(t: Tensor, df: Tensor) -> Tensor:
    """Student's density."""
    finite = df.clamp_max(NORMAL_FROM)
    normaliser = torch.lgamma((finite + 1) / 2) - torch.lgamma(finite / 2) - torch.log(finite * math.pi) / 2
    normaliser = torch.where(finite > 1e6, -math.log(2 * math.pi) / 2, normaliser)  # large lgammas cancel
    return torch.exp(normaliser - (finite + 1) / 2 * torch.log1p(t * t / finite))


def pooled_df(*parts: tuple[Tensor, Tensor]) -> Tensor:
    """Degrees of freedom of a sum of independent variances, from pairs of a variance and its own, (B,) (Satterthwaite).

    >>> four, nine = torch.tensor([4.0]), torch.tensor([9.0])
    >>> pooled_df((torch.tensor([1.0]), four), (torch.tensor([1.0]), four)), pooled_df((four * 0, four), (four, nine))
    (tensor([8.]), tensor([9.]))
    """
    total = sum(variance for variance, _ in parts)
    assert isinstance(total, Tensor)
    spread = sum((variance / total.clamp_min(1e-300)).square() / df.clamp_min(1) for variance, df in parts)
    assert isinstance(spread, Tensor)
    return torch.where(total > 0, 1 / spread.clamp_min(1e-300), parts[0][1])
