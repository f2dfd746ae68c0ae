"""Denoising of the sampled Hessian by block-wise James–Stein shrinkage.

H is symmetric, so the antisymmetric half A of the unsymmetrised estimate contains only noise, and each of its entries
has the variance of the corresponding entry of the symmetric half S. This also holds in the basis V in which the sampled
gradients are uncorrelated, where H is concentrated and the noise is not. There the pairs of directions are divided into
blocks, and each block of S is multiplied by the share of its energy that is not noise,

    S_block · max(0, 1 − ‖A_block‖²/‖S_block‖²),

the James–Stein rule with a noise level that needs no model. Diagonal entries, whose variance is twice that of the other
entries, form separate blocks. The deviation from a centre is shrunk: from the closed form W₁ if there is a control
variate, and from a multiple of the identity, chosen so that the trace of the whitened Hessian, tr(ΣH), is kept.

The result is biased by construction: its error is smaller, but it has no intervals. Its error is estimated as the sum
of the remaining noise and the removed signal; the constants below are calibrated with measured errors.

The denoised estimate and its error belong in this module. The unbiased estimate is in `unbiased_hessian`, its variance
in `variance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from smoothhess.draws.designs import mixing
from smoothhess.draws.gaussian import Gaussian, Isotropic
from smoothhess.estimate.antisymmetric_variance import goes_by_rows
from smoothhess.estimate.incomplete_blocks import correct, has_complete_blocks
from smoothhess.estimate.statistics import Statistics, symmetric
from smoothhess.linalg.gram import Grams, inner, squared_norm, symmetric_product
from smoothhess.linalg.low_rank import Known
from smoothhess.linalg.memory import EXAMPLE_MATRICES
from smoothhess.linalg.principal_directions import strongest_directions

FIRST_BLOCK = 4  # directions in the first blocks,
GROWTH = 1.5  # and the factor by which the ends of blocks grow
# The shrinkage factors are fitted to the numbers that they multiply, so the risk is too small. It is multiplied by
OPTIMISM, CENTRED = 1.2, 1.5  # one of these, the latter if the centre is a closed form (error less evenly spread),
PARTIAL = 0.4  # and by 1 + PARTIAL × (missing share of a block) if no block of the design is complete
RESOLUTION = 2.0  # lower bound of the squared error: 2/k of the noise
COHERENT = 1.5  # factor for the correlation of the errors of denoised entries in sums over groups
FEW_SUMS = 8  # with fewer independent sums the estimated error of the denoised sums is reduced by its uncertainty
MOSTLY = 0.8  # weight of the denoised sums above which ‖H‖² is estimated from them
LEAST_SIGNAL = 0.1  # the estimate of ‖H‖² must exceed this share of ‖Ĥ‖² + ‖Ĥ − H‖²
CUT = 1e-9  # directions with an eigenvalue below this share of the largest are rounding
FEW_MATRICES, SMALL_MATRIX = 8, 512  # more and smaller matrices than these use the batched driver on a GPU


@dataclass(frozen=True, eq=False)
class Denoised:
    """The denoised whitened Hessian of B examples, in parts whose examples have the same number of rows."""

    parts: tuple[tuple[Tensor, Part], ...]  # indices of the examples of each part, and the part

    def product(self, q: Tensor) -> Tensor:
        """Each row of (B, n, k) times the whitened Hessian."""
        return self._in_order([part.product(q[index]) for index, part in self.parts])

    def dense(self) -> Tensor:
        """The whitened Hessian, (B, k, k)."""
        return self._in_order([part.dense() for _, part in self.parts])

    @property
    def error2(self) -> Tensor:
        """Estimated ‖Ĥ − H‖²_F in the coordinates of the features, (B,)."""
        return self._in_order([part.error2 for _, part in self.parts])

    @property
    def norm2(self) -> Tensor:
        """‖Ĥ‖²_F in the coordinates of the features, (B,)."""
        return self._in_order([part.norm2 for _, part in self.parts])

    @property
    def true2(self) -> Tensor:
        """Estimated ‖H‖²_F in the coordinates of the features, (B,); 0 where it cannot be distinguished from zero."""
        return self._in_order([part.true2 for _, part in self.parts])

    @property
    def explained(self) -> Tensor:
        """E‖Ĥδ‖², the variation of the gradient that the denoised Hessian explains, (B,)."""
        return self._in_order([part.explained for _, part in self.parts])

    def group_error2(self, sums: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Estimated squared error of all group sums, (B,); `sums` maps whitened rows of examples to group sums."""
        return self._in_order([part.group_error2(lambda rows, i=i: sums(rows, i)) for i, part in self.parts])

    def to(self, device: torch.device | str) -> Denoised:
        """Copy to another device."""
        return Denoised(tuple((index.to(device), part.to(device)) for index, part in self.parts))

    def select(self, index: Tensor) -> Denoised:
        """The examples at `index`, in that order."""
        parts = []
        for ids, part in self.parts:
            place = torch.full((sum(len(i) for i, _ in self.parts),), -1, device=ids.device)
            place[ids] = torch.arange(len(ids), device=ids.device)
            local = place[index]
            chosen = torch.nonzero(local >= 0).reshape(-1)
            if len(chosen):
                parts.append((chosen, part.select(local[chosen])))
        return Denoised(tuple(parts))

    @staticmethod
    def cat(results: Sequence[Denoised]) -> Denoised:
        """Concatenate the denoised Hessians of different examples."""
        parts, start = [], 0
        for result in results:
            parts += [(start + index, part) for index, part in result.parts]
            start += sum(len(index) for index, _ in result.parts)
        return Denoised(tuple(parts))

    def _in_order(self, found: list[Tensor]) -> Tensor:
        place = torch.cat([index for index, _ in self.parts])
        if torch.equal(place, torch.arange(len(place), device=place.device)):
            return found[0] if len(found) == 1 else torch.cat(found)
        return torch.cat(found)[place.argsort()]


@dataclass(frozen=True, eq=False)
class Part:
    """The whitened Hessian `known` + cI + BMBᵀ of some examples, with B the directions of its basis."""

    basis: DenseBasis | FactoredBasis
    constant: Tensor  # (b,) c
    damped: Tensor  # (b, r, r) M
    risk: Tensor  # (b, r, r) expected squared error of the entries of M
    known: Known | None  # expectation of the control variate
    error2: Tensor  # (b,) estimated ‖Ĥ − H‖²_F
    norm2: Tensor  # (b,) ‖Ĥ‖²_F
    explained: Tensor  # (b,) E‖Ĥδ‖²
    true2: Tensor  # (b,) estimated ‖H‖²_F

    def product(self, q: Tensor) -> Tensor:
        """Each row of (b, n, k) times the whitened Hessian."""
        result = self.constant[:, None, None].to(q) * q
        if self.known is not None:
            result = result + self.known.product(q)
        return result + self.basis.combined(self.basis.along(q) @ self.damped.to(q))

    def dense(self) -> Tensor:
        """The whitened Hessian, (b, k, k)."""
        dense = self.basis.dense(self.damped)
        dense.diagonal(dim1=-2, dim2=-1).add_(self.constant[:, None].to(dense))
        return symmetric(dense if self.known is None else dense.add_(self.known.dense()))

    def stored(self, dtype: torch.dtype) -> Part:
        """With matrices in the precision of the inputs, and without what only their computation needs."""
        return replace(self, basis=self.basis.stored(dtype), damped=self.damped.to(dtype), risk=self.risk.to(dtype))

    def to(self, device: torch.device | str) -> Part:
        """Copy to another device."""
        tensors = {f.name: t.to(device) for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}
        known = None if self.known is None else self.known.to(device)
        return replace(self, basis=self.basis.to(device), known=known, **tensors)

    def select(self, index: Tensor) -> Part:
        """The examples at `index`."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        chosen = {name: t[index] for name, t in tensors.items() if isinstance(t, Tensor)}
        known = None if self.known is None else self.known.select(index)
        return replace(self, basis=self.basis.select(index), known=known, **chosen)

    def group_error2(self, sums: Callable[[Tensor], Tensor]) -> Tensor:
        """Estimated squared error of sums over groups of features, (b,)."""
        p = self.basis.lengths(sums)
        return (self.risk * p[:, :, None] * p[:, None]).sum((-1, -2))


@dataclass(frozen=True, eq=False)
class Shrunk:
    """Combinations of unbiased and denoised group sums; they are kept with the groups."""

    hessian: Tensor  # (B, K, K)
    error2: Tensor  # (B,) estimated squared error of all sums
    true2: Tensor  # (B,) estimated squared norm of the true sums; 0 where it cannot be distinguished from zero

    @staticmethod
    def combine(
        unbiased: Tensor, variance: Tensor, denoised: Tensor, risk: Tensor, gram: Tensor, energy: Tensor
    ) -> Shrunk:
        """Combine unbiased sums U (B, K, K) with their variances and denoised sums D with their estimated error `risk`.

        `gram` and `energy` (1 or B, K, K) are the products of the groups' whitened directions and of their gradients.

        Denoising distributes the kept trace over all directions, while true entries may cancel inside a group, so the
        sums of D can have a large error that `risk` does not contain. Since E‖U − D‖² = Var U + error² − 2 Cov(U, D),
        the error of D can be estimated, and U + λ(D − U) has the smallest error for λ = (Var U − Cov(U, D))/E‖U − D‖².
        """
        apart = (unbiased - denoised).square().sum((-1, -2))
        total = variance.sum((-1, -2))
        known = total.isfinite()
        # number of sums that carry the noise (each occurs twice); small if the groups' directions are nearly parallel
        shared = total.square() / (2 * variance.square().sum((-1, -2))).clamp_min(_TINY)
        shared = torch.minimum(shared, _participation(gram) * _participation(energy)).clamp_min(1)
        deviation = total * (2 / shared).sqrt()
        common = torch.minimum(COHERENT * risk, total)  # Cov(U, D), the noise that remains after shrinkage
        error2 = apart - total + 2 * common - deviation * (FEW_SUMS / shared).clamp_max(1)
        error2 = torch.maximum(error2, common)
        weight = ((total - common) / (total + error2 - 2 * common).clamp_min(_TINY)).clamp(0, 1)
        weight = torch.where(known & (total > 0), weight, 1.0)
        served = torch.lerp(unbiased, denoised, weight[:, None, None])
        error_after = (1 - weight).square() * total + weight.square() * error2 + 2 * weight * (1 - weight) * common
        error_after = torch.where(known, error_after, risk)
        size = served.square().sum((-1, -2))
        seen2 = unbiased.square().sum((-1, -2)) - total  # unbiased estimate of ‖H‖²
        is_large = known & (seen2 > 2 * deviation)
        # E‖D‖² is smaller than ‖H‖² by about the error of D, which must be small compared with ‖D‖²
        mostly = ~known | ((weight > MOSTLY) & (2 * error_after < size))
        return Shrunk(served, error_after, torch.where(is_large, seen2, torch.where(mostly, size + error_after, 0.0)))

    def select(self, index: Tensor) -> Shrunk:
        """The examples at `index`."""
        return Shrunk(self.hessian[index], self.error2[index], self.true2[index])

    def to(self, device: torch.device | str) -> Shrunk:
        """Copy to another device."""
        return Shrunk(self.hessian.to(device), self.error2.to(device), self.true2.to(device))

    @staticmethod
    def cat(parts: Sequence[Shrunk]) -> Shrunk:
        """Concatenate the group sums of different examples."""
        return Shrunk(*(torch.cat([getattr(p, name) for p in parts]) for name in ("hessian", "error2", "true2")))


def _participation(matrix: Tensor) -> Tensor:
    """Participation number (tr M)²/‖M‖² of a positive semidefinite matrix, (1 or B,)."""
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    return trace.square() / matrix.square().sum((-1, -2)).clamp_min(_TINY)


def denoise(stats: Statistics, gaussian: Gaussian, d: int) -> Denoised:
    """The denoised Hessian of whitened statistics of d features, separately for each example."""
    width = min(stats.k, max(stats.head.odd.shape[1], 1))
    step = EXAMPLE_MATRICES.items(8 * stats.k * width, stats.gradient.device)
    parts = []
    for count in stats.n.unique().tolist():
        for index in torch.nonzero(stats.n == count).reshape(-1).split(step):
            part = stats if len(index) == len(stats) else stats.select(index)
            parts.append((index, _denoise(part, gaussian, d)))
    return Denoised(tuple(parts))


def _points(stats: Statistics) -> Tensor:
    """z of each row of the head: denoising is used for designs with s = w z, or s = z and w = 1."""
    weight = stats.head.weight[..., None]
    return torch.where(weight > 0, stats.head.score / weight, 0.0)


def _denoise(stats: Statistics, gaussian: Gaussian, d: int) -> Part:
    """The denoised Hessian of examples with the same number of rows."""
    m, k = stats.head.odd.shape[1:]
    centred = gaussian.has_mean_curvature
    basis = FactoredBasis(stats, centred) if m < k and stats.total is None else DenseBasis(stats, centred)
    estimate = basis.estimate
    half, skew = symmetric(estimate), (estimate - estimate.mT) / 2
    correction = correct(stats)
    damped, risk, noise, factor = _damp(half, skew, correction.corrected + correction.plain, correction.radial, k)
    damped = damped * basis.own_lengths[:, :, None] * basis.own_lengths[:, None]
    constant = basis.offset - _trace(damped) / k if centred else torch.zeros_like(basis.offset)
    optimism = torch.full_like(constant, OPTIMISM)
    if stats.known is not None:
        optimism = torch.where(stats.known.is_zero, optimism, CENTRED)
    optimism = optimism * (1 + PARTIAL * max(0.0, 1 - m / k))
    risk = optimism[:, None, None] * risk
    precisions = gaussian.precisions(d).double().to(constant)
    alike = isinstance(gaussian, Isotropic)
    p = precisions[0] * basis.own_lengths if alike else basis.lengths(gaussian.push)
    weigh = p[:, :, None] * p[:, None]
    # Outside of the span of the rows, H is taken to explain the same share of the gradients as inside.
    linear = (estimate * estimate.mT).sum((-1, -2)) / basis.energy.clamp_min(_TINY)  # ‖S‖² − ‖A‖²
    lost = basis.lost * linear.clamp(0, 1)
    error2 = (risk * weigh).sum((-1, -2)) + 2 * lost * precisions.mean().square()
    error2 = torch.maximum(error2, RESOLUTION / k * (noise * weigh).sum((-1, -2)))
    if centred:  # error of the multiple of the identity
        error2 = error2 + correction.radial * precisions.square().sum()
    common = None
    if not alike:  # the entries of a block have different norms in feature coordinates
        shift = basis.offset - constant
        least, common = _entrywise_error(basis, gaussian, half, skew, factor, noise, shift)
        error2 = torch.maximum(error2, least)
    if m < FIRST_BLOCK:  # too few rows for an estimate of the error: use the energy of the gradients
        error2 = torch.maximum(error2, basis.energy * precisions.mean().square())
    part = Part(basis, constant, damped, risk, stats.added, error2, error2, error2, error2)
    norm2, explained = _norms(part, gaussian, d, precisions)
    true2 = norm2 + error2  # the squared norm of a shrunk estimate is on average too small by its error
    if common is not None and stats.added is None:  # ‖H‖² = ‖Ĥ − H‖² + 2⟨Ĥ, H⟩ − ‖Ĥ‖²
        found = error2 + 2 * common - norm2
        true2 = torch.where(found > LEAST_SIGNAL * true2, torch.minimum(found, true2), 0.0)
    # The part of ‖Ĥ‖² that is error beyond the risk of the rule does not explain anything.
    excess = error2 - (risk * weigh).sum((-1, -2)) / optimism
    explained = explained * (1 - excess / norm2.clamp_min(_TINY))
    return replace(part, norm2=norm2, explained=explained, true2=true2).stored(stats.gradient.dtype)


def _entrywise_error(
    basis: DenseBasis | FactoredBasis,
    gaussian: Gaussian,
    s: Tensor,
    a: Tensor,
    factor: Tensor,
    noise: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of ‖Ĥ − H‖²_F and ⟨Ĥ, H⟩ in feature coordinates, inside the span of the basis, (b,) each.

    With F the shrinkage factors, S = W + N, and the entries of A distributed like those of N, F∘S − W has the mean
    square ‖(1 − F)∘S‖² − ‖(1 − F)∘A‖² + ‖F∘A‖², and ⟨F∘S, W⟩ the mean ⟨F∘S, S⟩ − ⟨F∘A, A⟩, in any norm.
    """
    gram, offset = basis.products(gaussian.push), basis.offset

    def product(x: Tensor, y: Tensor) -> Tensor:
        return (gram @ x * (y @ gram)).sum((-1, -2))

    def norm2(x: Tensor) -> Tensor:
        return product(x, x)

    removed = (1 - factor) * s
    removed.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
    own = gram.diagonal(dim1=-2, dim2=-1).square() * noise.diagonal(dim1=-2, dim2=-1)
    kept = factor.diagonal(dim1=-2, dim2=-1)
    diagonal = ((kept.square() - (1 - kept).square()) * own).sum(-1)
    error2 = norm2(removed) - norm2((1 - factor) * a) + norm2(factor * a) + diagonal
    served, sampled = (torch.diag_embed(c[:, None].expand_as(kept)) for c in (offset - shift, offset))
    common = product(factor * s + served, s + sampled) - product(factor * a, a) - (kept * own).sum(-1)
    return error2.clamp_min(0), common


def _damp(s: Tensor, a: Tensor, incomplete: Tensor, radial: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The shrunk S, and for each entry the expected squared error, the variance and the factor, (b, r, r) each.

    `incomplete` and `radial` (b,) are variances that A does not contain, see `incomplete_blocks`: for a linear field in
    incomplete blocks E[N_ij² − A_ij²] = C (2 W_ii W_jj − 4 W_ij²/k), and at most 3C W_ii² on the diagonal.
    """
    r = s.shape[-1]
    member = _blocks(r).to(s)  # (r, blocks)
    ones = torch.ones(r, r, dtype=s.dtype, device=s.device).fill_diagonal_(0)
    count = member.mT @ ones @ member
    own = s.diagonal(dim1=-2, dim2=-1)
    signal = member.mT @ (s.square() - torch.diag_embed(own.square())) @ member
    shown = a.square()
    missing = incomplete[:, None, None] * (2 * own[..., None] * own[:, None] - 4 / k * s.square())
    missing = missing + radial[:, None, None]
    # the noise of a radial function lies along its rows, which may span the basis if there are few
    unshown = 3 * incomplete[:, None] * own.square() + (k + 2) * radial[:, None]
    entries = torch.maximum(shown + missing, shown / 2)
    entries = entries - torch.diag_embed(entries.diagonal(dim1=-2, dim2=-1))
    noise = member.mT @ entries @ member
    keep = torch.where(signal > 0, 1 - noise / signal.clamp_min(_TINY), 0.0).clamp_min(0)
    level = noise / count.clamp_min(1)
    # diagonal entries have twice the variance of the other entries of their block
    own_noise = (member.mT @ shown @ member / count.clamp_min(1)).diagonal(dim1=-2, dim2=-1)
    own_noise = 2 * own_noise + unshown @ member / member.sum(0)
    own_level = torch.where(count.diagonal() > 0, own_noise, torch.inf)
    own_signal = (own.square() @ member) / member.sum(0)
    own_keep = torch.where(own_signal > 0, 1 - own_level / own_signal.clamp_min(_TINY), 0.0).clamp_min(0)
    own_level = torch.where(own_level.isinf(), own_signal, own_level)
    factor, variance = (member @ x @ member.mT for x in (keep, level))
    factor.diagonal(dim1=-2, dim2=-1).copy_(own_keep @ member.mT)
    variance.diagonal(dim1=-2, dim2=-1).copy_(own_level @ member.mT)
    return factor * s, factor * variance, variance, factor


def _blocks(r: int) -> Tensor:
    """Membership of r directions, strongest first, in blocks: 0/1, (r, blocks)."""
    ends = [0]
    while ends[-1] < r:
        ends.append(max(ends[-1] + FIRST_BLOCK, int(ends[-1] * GROWTH)))
    if len(ends) > 2 and r - ends[-2] < FIRST_BLOCK:
        ends.pop(-2)
    member = torch.bucketize(torch.arange(r), torch.tensor(ends[1:]), right=True)
    return torch.nn.functional.one_hot(member).double()


class _Basis:
    """Directions of b examples; `offset` is (b,), and tensors that all examples share have one row."""

    offset: Tensor

    def select(self, index: Tensor) -> Self:
        """The basis of the examples at `index`."""
        return self._changed(lambda t: t[index] if len(t) == len(self.offset) else t)

    def to(self, device: torch.device | str) -> Self:
        """Copy to another device."""
        return self._changed(lambda t: t.to(device))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = copy(self)
        for name, kept in vars(self).items():
            if isinstance(kept, Tensor):
                setattr(changed, name, change(kept))
        return changed


class DenseBasis(_Basis):
    """Whitened directions in which the gradients are uncorrelated, strongest first, as columns of a k × k matrix."""

    def __init__(self, stats: Statistics, centred: bool) -> None:
        self.k = stats.k
        raw = stats.sampled() / stats.n.double()[:, None, None]
        self.offset = raw.diagonal(dim1=-2, dim2=-1).sum(-1) / self.k * centred
        a, z = self.offset[:, None, None], _points(stats).double()
        rows = stats.head.odd.double() - a * z
        self.vectors = strongest_directions(symmetric_product(rows.mT, rows.mT), mixing)
        if stats.total is None and not has_complete_blocks(stats):  # the same mean over rows with z instead of γ
            raw = raw - a * ((stats.head.score.double().mT @ z) / stats.n.double()[:, None, None])
        else:
            raw.diagonal(dim1=-2, dim2=-1).sub_(self.offset[:, None])
        self.estimate = self.vectors.mT @ raw @ self.vectors
        self.energy = rows.square().sum((-1, -2)) / rows.shape[1]  # mean over rows
        self.lost = torch.zeros_like(self.offset)  # energy of a row outside of the span of the others
        self.dtype = stats.gradient.dtype

    def stored(self, dtype: torch.dtype) -> DenseBasis:
        """With directions of the given precision, and without the estimate."""
        stored = copy(self)
        stored.vectors, stored.estimate = self.vectors.to(dtype), self.estimate[:, :0]
        return stored

    def along(self, q: Tensor) -> Tensor:
        """Rows (b, n, k) in the directions of the basis, (b, n, r)."""
        return q @ self.vectors.to(q)

    def combined(self, c: Tensor) -> Tensor:
        """The inverse of `along` inside the span of the basis."""
        return c @ self.vectors.mT.to(c)

    def dense(self, matrix: Tensor) -> Tensor:
        """BMBᵀ for a symmetric M (b, r, r), (b, k, k)."""
        return symmetric_product(self.vectors.to(matrix) @ matrix, self.vectors.to(matrix))

    @property
    def own_lengths(self) -> Tensor:
        """Squared lengths of the directions, (b, r)."""
        return torch.ones_like(self.vectors[:, 0])

    def lengths(self, push: Callable[[Tensor], Tensor]) -> Tensor:
        """Squared lengths of the directions after a linear map of whitened rows, (b, r)."""
        return push(self.vectors.mT.to(self.dtype)).double().square().sum(-1)

    def products(self, push: Callable[[Tensor], Tensor]) -> Tensor:
        """Inner products of the directions after a linear map, (b, r, r)."""
        pushed = push(self.vectors.mT.to(self.dtype))
        return inner(pushed, pushed)


class FactoredBasis(_Basis):
    """As `DenseBasis`, as combinations Q of rows γ − a z, if these are fewer than k; no k × k matrix is made."""

    def __init__(self, stats: Statistics, centred: bool) -> None:
        self.k = stats.k
        n = stats.n.double()
        self.odd, self.z = stats.head.odd, _points(stats)
        # (b, m, m) each; those of the statistics are reused if the antisymmetric half is stored as rows
        odd, cross, square = stats.grams if goes_by_rows(stats) else Grams.of(stats.head.odd, stats.head.score)
        self.offset = cross.diagonal(dim1=-2, dim2=-1).sum(-1) / n / self.k * centred
        a = self.offset[:, None, None]
        weight = stats.head.weight.double()  # s = w z
        back = torch.where(weight > 0, 1 / weight, 0.0)
        mixed = cross * back[:, None]  # γ·z
        gram = odd - a * (mixed + mixed.mT) + a.square() * square * back[:, None] * back[..., None]
        values, vectors = _eigenpairs(symmetric(gram))
        least = CUT * values[:, :1].clamp_min(_TINY)
        root = values.clamp_min(0).sqrt()
        self.own_lengths = (values > least).double()  # squared, (b, r): 0 for directions that are rounding
        self.combine = self.own_lengths[:, None] * vectors / root[:, None].clamp_min(_TINY)  # Q
        scored = cross - a * square * back[..., None]
        self.estimate = self.combine.mT @ scored @ (vectors * root[:, None]) / n[:, None, None]
        self.energy = values.clamp_min(0).sum(-1) / values.shape[-1]
        inverse = (vectors.square() / values.clamp_min(least)[:, None]).sum(-1)
        self.lost = (1 / inverse).mean(-1)

    def stored(self, dtype: torch.dtype) -> FactoredBasis:
        """Without the estimate; the combinations stay in float64, since rows may be nearly dependent."""
        stored = copy(self)
        stored.estimate = self.estimate[:, :0]
        return stored

    def along(self, q: Tensor) -> Tensor:
        """Rows (b, n, k) in the directions of the basis, (b, n, r)."""
        return (q @ self.rows.to(q).mT) @ self.combine.to(q)

    def combined(self, c: Tensor) -> Tensor:
        """The inverse of `along` inside the span of the basis."""
        return (c @ self.combine.mT.to(c)) @ self.rows.to(c)

    def dense(self, matrix: Tensor) -> Tensor:
        """BMBᵀ for a symmetric M (b, r, r), (b, k, k)."""
        return self.combined(self.combined(matrix).mT)

    @cached_property
    def rows(self) -> Tensor:
        """γ − a z, (b, m, k)."""
        return self.odd - self.offset[:, None, None].to(self.odd) * self.z.to(self.odd)

    def products_with(self, known: Known) -> Tensor:
        """Inner products of the directions with their products with a matrix, (b, r, r)."""
        return self.combine.mT @ inner(self.rows, known.product(self.rows)) @ self.combine

    def lengths(self, push: Callable[[Tensor], Tensor]) -> Tensor:
        """Squared lengths of the directions after a linear map of whitened rows, (b, r)."""
        pushed = push(self.rows)
        return (self.combine * (inner(pushed, pushed) @ self.combine)).sum(1)

    def products(self, push: Callable[[Tensor], Tensor]) -> Tensor:
        """Inner products of the directions after a linear map, (b, r, r)."""
        pushed = push(self.rows)
        return self.combine.mT @ inner(pushed, pushed) @ self.combine


def _norms(part: Part, gaussian: Gaussian, d: int, precisions: Tensor) -> tuple[Tensor, Tensor]:
    """‖Ĥ‖²_F in feature coordinates, and E‖Ĥδ‖², (b,) each."""
    basis, known = part.basis, part.known
    if isinstance(gaussian, Isotropic) and (known is None or not known.is_thin):  # the basis is orthonormal
        square = _squared_norm(part, known)
        return precisions[0].square() * square, precisions[0] * square
    if isinstance(basis, DenseBasis) or (known is not None and not known.is_thin):
        dtype = basis.dtype if isinstance(basis, DenseBasis) else basis.odd.dtype
        if d > 2 * basis.k:  # more features than dimensions: WP has the same nonzero eigenvalues as H
            directions = gaussian.push(torch.eye(basis.k, dtype=dtype, device=part.constant.device))
            turned = part.dense() @ inner(directions[None], directions[None])
            return (turned * turned.mT).sum((-1, -2)), (turned * part.dense()).sum((-1, -2))
        half = gaussian.push(part.dense().to(dtype))
        full = gaussian.push(half.mT)
        norm2, explained = (
            torch.linalg.vector_norm(m, dim=(-1, -2), dtype=torch.float64).square() for m in (full, half)
        )
        return norm2, explained
    c, core, rows = part.constant, basis.combine @ part.damped @ basis.combine.mT, basis.rows
    if known is not None and known.factor is not None:  # further rows with their core matrix
        core = torch.stack([torch.block_diag(a, b) for a, b in zip(core, known.core.to(core), strict=True)])
        rows = torch.cat([rows, known.factor.to(rows)], 1)
    if isinstance(gaussian, Isotropic):
        white = inner(rows, rows)
        once, both = precisions[0] * white, precisions[0].square() * white
    else:
        pushed = gaussian.push(rows)
        white, once = inner(rows, rows), inner(pushed, pushed)
        both = inner(gaussian.push(gaussian.whiten(pushed)), pushed)
    turned = core @ once

    def trace(x: Tensor, y: Tensor) -> Tensor:
        return (x * y.mT).sum((-1, -2))

    norm2 = c.square() * precisions.square().sum() + 2 * c * trace(core, both) + trace(turned, turned)
    explained = c.square() * precisions.sum() + 2 * c * trace(core, once) + trace(core @ white, turned)
    return norm2, explained


def _squared_norm(part: Part, known: Known | None) -> Tensor:
    """‖K + cI + BMBᵀ‖²_F in whitened coordinates, (b,), for a dense K or none."""
    basis, c, m = part.basis, part.constant, part.damped
    if known is not None and isinstance(basis, DenseBasis):
        return squared_norm(part.dense())
    found = m.square().sum((-1, -2)) + c * (2 * _trace(m) + c * basis.k)
    if known is None or isinstance(basis, DenseBasis):
        return found
    trace = known.diagonal().double().sum(-1)
    return found + known.squared_norm + 2 * c * trace + 2 * (basis.products_with(known) * m).sum((-1, -2))


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _eigenpairs(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of positive semidefinite matrices, largest first."""
    if not matrices.is_cuda or len(matrices) <= FEW_MATRICES or matrices.shape[-1] > SMALL_MATRIX:
        values, vectors = torch.linalg.eigh(matrices)
        return values.flip(-1), vectors.flip(-1)
    # On a GPU eigh is not batched. gesvda is, but may fail for repeated eigenvalues, which are separated here. It
    # squares its argument, so it is applied to a factor R of the matrix RᵀR, which keeps V orthonormal.
    spread = torch.linspace(1, 2, matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    size = matrices.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    parted = matrices / torch.where(size > 0, size, 1.0) + torch.diag(spread) * (CUT / 10)
    factors = torch.linalg.cholesky_ex(parted).L.mT
    values, vectors = (torch.cat(found) for found in zip(*map(_batched_eigenpairs, factors.split(64)), strict=True))
    return values * size[..., 0], vectors


def _batched_eigenpairs(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenpairs of RᵀR for a batch of factors R; a batch that fails is halved, a single factor uses eigh."""
    try:
        _, roots, rows = torch.linalg.svd(factors, driver="gesvda")
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        if len(factors) > 1:
            halves = [_batched_eigenpairs(half) for half in factors.split(-(-len(factors) // 2))]
            values, vectors = (torch.cat(found) for found in zip(*halves, strict=True))
            return values, vectors
        values, vectors = torch.linalg.eigh(factors.mT @ factors)
        return values.flip(-1), vectors.flip(-1)
    return roots.square(), rows.mT


_TINY = torch.finfo(torch.float64).tiny
