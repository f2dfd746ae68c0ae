"""Designs: streams of white-noise rows with weights, reproducible from (seed, block).

A design is an infinite stream of rows, divided into blocks. Row i has a point z_i in R^k, a score s_i along it and a
weight w_i; a mirrored design evaluates the model at +z_i and −z_i. Scores and weights correct for a change of the
radial distribution, so that

    E[s γ(z)ᵀ] = W      (Hessian)        E[w γ(z)] = Γ      (gradient)

for every design. Rows of one *unit* may depend on each other, but units are independent: standard errors are computed
over units. Covariances are applied elsewhere, by `gaussian`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from smoothhess.draws.normals_on_gpu import computes_on, normals_on_gpu
from smoothhess.draws.seeding import generator, generators, states
from smoothhess.linalg.memory import FLOAT64_CHUNK
from smoothhess.linalg.orthonormal import cholesky_qr, gram_schmidt

Device = torch.device | str
EXACT = torch.empty(0, dtype=torch.float64)  # default device and dtype of draws


@dataclass(frozen=True)
class Draws:
    """Consecutive rows of a design; batched over several streams, with the streams in dimension 0."""

    z: Tensor  # (r, k)
    score: Tensor  # (r, k)
    weight: Tensor  # (r,)

    def __len__(self) -> int:
        return len(self.weight)

    def map(self, function: Callable[[Tensor], Tensor]) -> Draws:
        """Apply `function` to each tensor."""
        return Draws(function(self.z), function(self.score), function(self.weight))


def _joined(parts: Sequence[Draws]) -> Draws:
    """Concatenate; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return Draws(*(torch.cat([getattr(p, name) for p in parts]) for name in ("z", "score", "weight")))


class Design(ABC):
    """A stream of draws; other modules call `rows`, or `stacked` for several streams."""

    name: str
    mirrored: bool  # whether each row is used at ±z, which takes two gradient calls

    @abstractmethod
    def block_rows(self, k: int) -> int:
        """Rows in one block, which one random generator draws."""

    @abstractmethod
    def replicate_rows(self, k: int) -> int:
        """Rows in one independent unit."""

    @abstractmethod
    def block(self, key: tuple[int, int], low: int, high: int, k: int, like: Tensor = EXACT) -> Draws:
        """Rows low … high − 1 of the block of (seed, index); their values do not depend on low and high.

        Random numbers are those of NumPy in float64, on any device; further operations may use the device and dtype of
        `like`, with the same result up to rounding.
        """

    def rows(self, seed: int, start: int, stop: int, k: int, like: Tensor = EXACT) -> Draws:
        """Rows start … stop − 1 of the stream of `seed` in k dimensions, on the device of `like`; see `block`."""
        size = self.block_rows(k)
        parts = []
        for index in range(start // size, -(-stop // size)):
            first = index * size
            low, high = max(start - first, 0), min(stop - first, size)
            parts.append(self.block((seed, index), low, high, k, like))
        return _joined(parts).map(lambda t: t.to(like.device))

    def stacked(self, streams: Sequence[tuple[int, int]], count: int, k: int, like: Tensor) -> Draws:
        """`count` rows of each stream (seed, first row), stacked, in the dtype and on the device of `like`."""
        drawn = [
            self.rows(seed, first, first + count, k, like).map(lambda t: t.to(like)[None]) for seed, first in streams
        ]
        return _joined(drawn)

    @property
    def calls_per_row(self) -> int:
        """Gradient calls that one row costs."""
        return 2 if self.mirrored else 1


def _normals(keys: Sequence[tuple[int, ...]], rows: int, k: int, device: Device = "cpu") -> Tensor:
    """Standard normal rows of many generators, (len(keys), rows, k), drawn on the GPU or with torch's threads."""
    if computes_on(device, len(keys)):
        return normals_on_gpu(states(keys), rows * k, device).view(len(keys), rows, k)
    cuda = torch.device(device).type == "cuda"
    drawn = torch.empty(len(keys), rows, k, dtype=torch.float64, pin_memory=cuda)
    target = drawn.numpy()

    begin = states(keys)

    def fill(part: range) -> None:
        for i, numbers in zip(part, generators(begin[part.start : part.stop]), strict=True):
            numbers.standard_normal(out=target[i])

    parts = [range(i, min(i + FILLED, len(keys))) for i in range(0, len(keys), FILLED)]
    if (threads := min(torch.get_num_threads(), len(parts))) > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, parts))
    else:
        for part in parts:
            fill(part)
    return drawn.to(device, non_blocking=True)


def pilot_rows(seed: int, rows: int, k: int) -> torch.Tensor:
    """Standard normal rows of a stream that no design draws from, (rows, k)."""
    return torch.from_numpy(generator((seed, PILOT)).standard_normal((rows, k)))


def pilot_stack(seeds: Sequence[int], rows: int, k: int, like: Tensor) -> torch.Tensor:
    """The same for several seeds, (len(seeds), rows, k), in the dtype and on the device of `like`.

    >>> torch.equal(pilot_stack([3, 5], 2, 4, torch.empty(0).double())[1], pilot_rows(5, 2, 4))
    True
    """
    own = list(dict.fromkeys(seeds))  # equal seeds are drawn once
    if len(own) == 1:
        return _pilot(own[0], rows, k).to(like, copy=True).expand(len(seeds), -1, -1)
    drawn = _stack([(seed, PILOT) for seed in own], rows, k, like)
    if len(own) == len(seeds):
        return drawn
    places = {seed: place for place, seed in enumerate(own)}
    return drawn[torch.tensor([places[seed] for seed in seeds], device=like.device)]


def _stack(keys: Sequence[tuple[int, ...]], rows: int, k: int, like: Tensor) -> Tensor:
    """`_normals` in the dtype of `like`, in chunks that limit the memory for float64."""
    step = _streams_per_chunk(rows, k, like.device)
    parts = [keys[i : i + step] for i in range(0, len(keys), step)]
    return torch.cat([_normals(part, rows, k, like.device).to(like) for part in parts])


@lru_cache(maxsize=2)
def _pilot(seed: int, rows: int, k: int) -> Tensor:
    """Cached pilot rows: the next input often has the same seed."""
    return pilot_rows(seed, rows, k)


def _streams_per_chunk(rows: int, k: int, device: torch.device) -> int:
    """Number of streams per chunk of float64 numbers."""
    return FLOAT64_CHUNK.items(8 * rows * k, device)


def tau_rows(rows: int, k: int, like: Tensor = EXACT) -> torch.Tensor:
    """Standard normal rows independent of all designs and pilots, the same for every seed, (rows, k)."""
    if rows <= FEW_TAU:
        return _few_tau(rows, k).to(like, copy=True)
    return _stack([(0, TAU, row) for row in range(rows)], 1, k, like)[:, 0]


@lru_cache(maxsize=2)
def _few_tau(rows: int, k: int) -> Tensor:
    """Cached rows: every call of an explainer draws a few."""
    return _normals([(0, TAU, row) for row in range(rows)], 1, k)[:, 0]


PILOT, TAU, MIXING = 2**32 - 1, 2**32 - 2, 2**32 - 3  # keys of other streams, instead of a block number
FILLED = 8  # streams per task of a thread
FEW_TAU = 4  # rows of `tau_rows` that are kept for the next call


class Independent(Design):
    """Independent standard normal rows: Eq. 8 of the paper.

    >>> design = Independent()
    >>> design.rows(seed=0, start=0, stop=5, k=3).z.shape
    torch.Size([5, 3])
    """

    name = "iid"
    mirrored = False

    def block_rows(self, k: int) -> int:
        """64; rows are independent, so the size has no statistical meaning."""
        return 64

    def replicate_rows(self, k: int) -> int:
        """1: rows are independent."""
        return 1

    def block(self, key: tuple[int, int], low: int, high: int, k: int, like: Tensor = EXACT) -> Draws:
        """Standard normal rows of weight 1."""
        z = torch.from_numpy(generator(key).standard_normal((high, k))[low:])
        return Draws(z, z, torch.ones(high - low, dtype=torch.float64))


class Antithetic(Independent):
    """The same rows, each used at +z and −z: the paper's variance reduction, and exact for affine functions."""

    name = "antithetic"
    mirrored = True


class Orthogonal(Design):
    """Blocks of orthonormal directions u at ±, with independent radii R.

    The radii follow χ_{k+2}, and since E[F(R)] over χ_k is E[k/R² F(R)] over χ_{k+2}, the score is (k/R) u. The mean of
    score times point, k u uᵀ, over a block is then the identity for any radii: quadratics are exact from one block.

    The weights k/R² of the gradient have heavy tails in few dimensions. Up to SMALL dimensions a block holds two bases
    in random order: one with χ_{k+2} and twice the score, one with χ_k and score 0. The gradient is averaged over the
    mixture of both distributions, with weight 2/(1 + R²/k) < 2.

    >>> rows = Orthogonal().rows(seed=0, start=0, stop=8, k=8)
    >>> torch.allclose(rows.score.mT @ rows.z / 8, torch.eye(8).double())
    True
    """

    name = "orthogonal"
    mirrored = True

    def block_rows(self, k: int) -> int:
        """k, the largest number of orthogonal directions; 2k in few dimensions."""
        return 2 * k if k <= SMALL else k

    replicate_rows = block_rows

    def block(self, key: tuple[int, int], low: int, high: int, k: int, like: Tensor = EXACT) -> Draws:
        """Rows of a random orthogonal matrix times radii from a separate stream."""
        radii = generator((*key, 1))
        if k > SMALL:
            if k <= QR_LIMIT:
                rows = torch.from_numpy(_haar_rows(key, low, high, k))
            else:
                rows = _mixed_rows(key, low, high, k, like)
            chi = torch.from_numpy(np.sqrt(radii.chisquare(k + 2, high))[low:]).to(rows)[:, None]
            return Draws(chi * rows, k / chi * rows, (k / chi**2)[:, 0])
        order = radii.permutation(2 * k)
        radius = np.sqrt(radii.chisquare(np.where(order < k, k + 2, k)))[low:high]
        order = order[low:high]
        directions = np.concatenate([_haar_rows(key, 0, k, k), _haar_rows((*key, 2), 0, k, k)])[order]
        score = (2 * (order < k) * k / radius)[:, None] * directions
        weight = 2 / (1 + radius**2 / k)
        z = radius[:, None] * directions
        return Draws(*(torch.from_numpy(x) for x in (z, score, weight)))

    def stacked(self, streams: Sequence[tuple[int, int]], count: int, k: int, like: Tensor) -> Draws:
        """As in `Design`; streams that begin at the same row are orthogonalised in one batch."""
        starts = {first for _, first in streams}
        if len(streams) == 1 or len(starts) > 1 or not SMALL < k <= QR_LIMIT:
            return super().stacked(streams, count, k, like)
        start, pieces = starts.pop(), []
        for index in range(start // k, -(-(start + count) // k)):
            low, high = max(start - index * k, 0), min(start + count - index * k, k)
            keys = [(seed, index) for seed, _ in streams]
            step = _streams_per_chunk(high, k, like.device)
            parts = [_blocks(keys[i : i + step], low, high, k, like) for i in range(0, len(keys), step)]
            pieces.append([torch.cat(found) for found in zip(*parts, strict=True)])
        return Draws(*(torch.cat(found, 1) for found in zip(*pieces, strict=True)))


def _blocks(keys: Sequence[tuple[int, int]], low: int, high: int, k: int, like: Tensor) -> tuple[Tensor, ...]:
    """Points, scores and weights of rows low … high − 1 of several blocks, equal to `Orthogonal.block`."""
    rows = _orthonormal(_normals(keys, high, k, like.device))[:, low:]
    radii = generators(states([(*key, 1) for key in keys]))
    chi2 = np.stack([numbers.chisquare(k + 2, high)[low:] for numbers in radii])
    chi = torch.from_numpy(chi2).to(rows.device).sqrt()[..., None]
    return (chi * rows).to(like), (k / chi * rows).to(like), (k / chi**2)[..., 0].to(like)


SMALL = 4  # dimensions up to which a block holds two bases
QR_LIMIT = 1024  # dimensions up to which directions come from a QR decomposition; fixed for reproducible draws


def _haar_rows(key: tuple[int, ...], low: int, high: int, k: int) -> np.ndarray:
    """Rows of a uniformly random orthogonal matrix: Gram–Schmidt of normal rows, in order."""
    if low == 0 and high < k:  # the first rows of a block do not depend on the others
        return _gram_schmidt(key, high, k)
    return _haar_basis(key, k)[low:high]


@lru_cache(maxsize=2)
def _haar_basis(key: tuple[int, ...], k: int) -> np.ndarray:
    """A complete basis, cached for further rows of the same block."""
    return _gram_schmidt(key, k, k)


def _gram_schmidt(key: tuple[int, ...], rows: int, k: int) -> np.ndarray:
    return _orthonormal(torch.from_numpy(generator(key).standard_normal((rows, k)))).numpy()


def _orthonormal(rows: Tensor) -> Tensor:
    """Gram–Schmidt of normal rows (…, r, k), in order: its signs make the result uniformly distributed."""
    if 2 * rows.shape[-2] <= rows.shape[-1]:  # the condition number of few rows is small
        return cholesky_qr(rows)[0]
    if rows.is_cuda:
        found = cholesky_qr(cholesky_qr(rows)[0])[0]  # the second round removes the error of the first
        if bool(found.isfinite().all()):
            return found
    return gram_schmidt(rows)


def _mixed_rows(key: tuple[int, ...], low: int, high: int, k: int, like: Tensor) -> Tensor:
    """Rows of an orthogonal matrix from three rounds of DCT, random signs and permutation: O(k log k) per row.

    The distribution is not exactly uniform: measurably so in few dimensions, with no bias observed from 64 on.
    """
    place, turn, rounds = _mixer(key, k, like.device)
    vectors = torch.zeros(high - low, k, dtype=like.dtype, device=like.device)
    vectors.scatter_(1, place[low:high, None], 1.0)
    for take, signs in rounds:
        halves = torch.fft.rfft(vectors).mul_(turn.to(like.dtype.to_complex()))
        vectors = torch.view_as_real(halves).flatten(1).index_select(1, take).mul_(signs.to(like))
    return vectors


@lru_cache(maxsize=2)
def _mixer(key: tuple[int, ...], k: int, device: torch.device) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Index tensors and factors for the rounds of one block, cached for its further rows and for other inputs.

    The orthonormal DCT-II of a row is the Fourier transform of its even entries followed by its odd entries in reverse,
    times a complex factor per frequency. The transform of real numbers is determined by its first half: entry k − j is
    the conjugate of entry j. Real and imaginary parts are adjacent in memory, so selecting the entries of the
    transform, permuting them and reordering them for the next round is one index selection.

    Returns the position of the 1 in the unit vector that row i starts from, the complex factors, and for each round the
    indices and signs.
    """
    fold = torch.cat([torch.arange(0, k, 2), torch.arange(1, k, 2).flip(0)])
    n_real = k // 2 + 1
    angle = -torch.pi * torch.arange(n_real, dtype=torch.float64) / (2 * k)
    turn = torch.polar(torch.full_like(angle, (2 / k) ** 0.5), angle)
    turn[0] /= 2**0.5
    rng, rounds = generator(key), []
    for last in (False, False, True):
        signs, order = torch.from_numpy(rng.choice([-1.0, 1.0], k)), torch.from_numpy(rng.permutation(k))
        entry = order if last else order[fold]
        real = entry < n_real
        take = torch.where(real, 2 * entry, 2 * (k - entry) + 1)
        rounds.append((take.to(device), torch.where(real, signs[entry], -signs[entry]).to(device)))
    return fold.argsort().to(device), turn.to(device), rounds


def mixing(k: int, device: Device = "cpu") -> Tensor:
    """A fixed random orthogonal matrix, (k, k) float64, independent of all draws.

    >>> torch.allclose(mixing(6) @ mixing(6).mT, torch.eye(6).double())
    True
    """
    return _mixed_rows((0, MIXING), 0, k, k, EXACT.to(device))


class Sobol(Design):
    """Scrambled Sobol points mapped by the normal quantile function, at ±; each scrambling of 64 points is a unit.

    >>> Sobol().rows(seed=0, start=0, stop=64, k=2).z.mean(0).abs().max() < 0.05
    tensor(True)
    """

    name = "sobol"
    mirrored = True

    def block_rows(self, k: int) -> int:
        """64 points of one scrambling."""
        return 64

    def replicate_rows(self, k: int) -> int:
        """64: all points of one scrambling."""
        return 64

    def block(self, key: tuple[int, int], low: int, high: int, k: int, like: Tensor = EXACT) -> Draws:
        """Points of the scrambling of this block."""
        if k > torch.quasirandom.SobolEngine.MAXDIM:
            raise ValueError(
                f"design='sobol' supports up to {torch.quasirandom.SobolEngine.MAXDIM} dimensions, got {k}. "
                "Use design='orthogonal'."
            )
        scrambling = int(generator(key).integers(2**62))
        points = torch.quasirandom.SobolEngine(k, scramble=True, seed=scrambling).draw(64, dtype=torch.float64)
        # A point is the corner of a cell of width 2⁻³⁰; the centre keeps the quantile finite and the mean at zero.
        z = torch.special.ndtri(points[low:high] + 2.0**-31)
        return Draws(z, z, torch.ones(high - low, dtype=torch.float64))


DESIGNS: dict[str, Design] = {design.name: design for design in (Independent(), Antithetic(), Orthogonal(), Sobol())}


def find_design(name: str) -> Design:
    """The design called `name`.

    >>> find_design("antithetic").mirrored
    True
    """
    if name not in DESIGNS:
        raise ValueError(f"design must be one of {sorted(DESIGNS)}, got {name!r}.")
    return DESIGNS[name]
