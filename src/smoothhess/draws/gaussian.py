"""Gaussians N(0, Σ): the neighbourhood of an input over which f is averaged.

Every Gaussian is represented by a root: Σ = L Lᵀ with L of shape (d, k), k the rank of Σ. Draws are z ~ N(0, I_k), and
perturbations δ = L z. Vectors (perturbations) are mapped by L and L⁺, covectors (gradients, rows of a Hessian) by
their transposes:

    colour    z (k) → δ (d)    L z          whiten   δ (d) → z (k)    L⁺ δ
    pull      g (d) → γ (k)    Lᵀ g         push     γ (k) → g (d)    L⁺ᵀ γ

The whitened Hessian is W = Lᵀ H L, so H = L⁺ᵀ W L⁺ on the range of Σ. The draws z come from `designs`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from smoothhess.linalg.orthonormal import gram_schmidt

LARGEST_SIGMA = 1e150  # in files: its square is finite


def _real(value: Any, name: str) -> Tensor:
    """`value` as a finite, detached float64 tensor on the CPU."""
    try:
        given = value.to_numpy().copy() if hasattr(value, "to_numpy") else value  # a column of pandas is read-only
        tensor = torch.as_tensor(given, dtype=torch.float64).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be real numbers (float, list, numpy array or tensor), got {type(value).__name__}."
        ) from error
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} must be finite, got NaN or infinity. Check how it was computed.")
    return tensor


@dataclass(frozen=True, eq=False)
class Gaussian(ABC):
    """A centred Gaussian N(0, Σ) over the flattened features of one input."""

    @property
    @abstractmethod
    def dimension(self) -> int | None:
        """Number of features that it was created for; None if it fits any."""

    @abstractmethod
    def rank(self, d: int) -> int:
        """Rank k of Σ for d features: the dimension of the draws z."""

    @abstractmethod
    def colour(self, z: Tensor) -> Tensor:
        """L z: white noise (…, k) to perturbations (…, d)."""

    @abstractmethod
    def pull(self, g: Tensor) -> Tensor:
        """Lᵀ g: gradients (…, d) to whitened gradients (…, k)."""

    @abstractmethod
    def whiten(self, delta: Tensor) -> Tensor:
        """L⁺ δ: perturbations (…, d) to white noise (…, k)."""

    @abstractmethod
    def push(self, g: Tensor) -> Tensor:
        """L⁺ᵀ γ: whitened gradients (…, k) to gradients (…, d), zero outside the range of Σ."""

    @abstractmethod
    def scales(self, d: int) -> Tensor:
        """Standard deviation of each feature, √Σ_ii, (d,)."""

    @abstractmethod
    def precisions(self, d: int) -> Tensor:
        """The nonzero eigenvalues of Σ⁺, (k,)."""

    @abstractmethod
    def precision_diagonal(self, d: int) -> Tensor:
        """(Σ⁺)_ii of each feature, (d,)."""

    @property
    def is_diagonal(self) -> bool:
        """Whether Σ is diagonal: features are perturbed independently."""
        return False

    @property
    def has_mean_curvature(self) -> bool:
        """Whether a multiple of Σ⁻¹ is a plausible Hessian; not so for strongly correlated features.

        Their Σ⁻¹ is largest along directions of small variance, in which functions have little curvature.
        """
        return self.is_diagonal

    def check(self, d: int) -> Self:
        """Return itself if it fits inputs of d features, otherwise raise ValueError."""
        if self.dimension is not None and self.dimension != d:
            raise ValueError(
                f"{type(self).__name__} is made for {self.dimension} features but an input has {d}. "
                "Create it with one entry per flattened feature; several values of one sigma are for smoothhess.sweep."
            )
        return self

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Gaussian:
        """The same Gaussian with its tensors on `device` in `dtype`; index tensors stay integers."""
        state = {
            name: v.to(device, dtype if v.is_floating_point() else v.dtype) if isinstance(v, Tensor) else v
            for name, v in self.state().items()
        }
        return Gaussian.from_state(type(self).__name__, state)

    def state(self) -> dict[str, Any]:
        """Its fields by name, tensors and floats; the inverse is `Gaussian.from_state`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def same_as(self, other: Gaussian) -> bool:
        """Whether both have the same class and exactly equal fields."""
        mine, theirs = self.state(), other.state()
        return type(self) is type(other) and all(
            torch.equal(v, theirs[name]) if isinstance(v, Tensor) else v == theirs[name] for name, v in mine.items()
        )

    @staticmethod
    def from_state(kind: str, state: dict[str, Any]) -> Gaussian:
        """The Gaussian whose class is named `kind` and whose fields are `state`; raises ValueError for other types."""
        classes = {c.__name__: c for c in (Isotropic, Diagonal, Dense, Eigenbasis, SegmentShift)}
        if kind not in classes:
            raise ValueError(f"expected a Gaussian of kind {sorted(classes)}, got {kind!r}.")
        made = object.__new__(classes[kind])
        for f in fields(made):
            value = state[f.name]
            if f.type == "Tensor":
                fits = isinstance(value, Tensor)
            else:
                fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST_SIGMA
            if not fits or (f.name == "sigma" and f.type == "float" and not value):
                raise ValueError(f"expected {f.name!r} of {kind} as a {f.type}, got {type(value).__name__}.")
            object.__setattr__(made, f.name, value)
        return made

    @staticmethod
    def ensure(*, sigma: Any = None, radius: Any = None, gaussian: Gaussian | None = None, d: int) -> Gaussian:
        """The Gaussian given by exactly one of three arguments.

        Args:
            sigma: standard deviation, one number or one per feature.
            radius: radius r, for σ = r/√d.
            gaussian: a Gaussian.
            d: number of features of an input.

        Raises:
            TypeError: `gaussian` is not a Gaussian.
            ValueError: none or several of the arguments are given, or they do not fit d features.

        >>> Gaussian.ensure(radius=2.0, d=16)
        Isotropic(sigma=0.5)
        """
        given = [name for name, v in (("sigma", sigma), ("radius", radius), ("gaussian", gaussian)) if v is not None]
        if len(given) != 1:
            got = " and ".join(given) if given else "none of them"
            raise ValueError(
                f"pass exactly one of sigma (standard deviation), radius or gaussian, got {got}. "
                "radius=r sets sigma = r/√d; smoothhess.diagnose(model, inputs) recommends a sigma."
            )
        if radius is not None:
            return Isotropic.from_radius(radius, d)
        if sigma is not None:
            scalar = isinstance(sigma, int | float) or getattr(sigma, "ndim", None) == 0
            return (Isotropic(float(sigma)) if scalar else Diagonal(sigma)).check(d)
        if not isinstance(gaussian, Gaussian):
            raise TypeError(
                "gaussian must be Isotropic, Diagonal, Dense, Eigenbasis or segments.noise(…), "
                f"got {type(gaussian).__name__}. "
                "For a number pass sigma=."
            )
        return gaussian.check(d)


@dataclass(frozen=True, eq=False)
class Isotropic(Gaussian):
    """Σ = σ² I: the same standard deviation for every feature.

    Args:
        sigma: standard deviation, positive.

    Raises:
        ValueError: sigma is not a positive finite number.

    >>> Isotropic(0.1).colour(torch.ones(3))
    tensor([0.1000, 0.1000, 0.1000])
    """

    sigma: float

    def __post_init__(self) -> None:
        sigma = float(_real(self.sigma, "sigma"))
        if sigma <= 0:
            raise ValueError(f"sigma must be positive, a standard deviation, got {sigma:g}.")
        object.__setattr__(self, "sigma", sigma)

    @classmethod
    def from_radius(cls, radius: float, d: int) -> Isotropic:
        """σ = radius/√d: in d dimensions, the length of the noise is then close to `radius`.

        Args:
            radius: typical length of a perturbation, positive.
            d: number of features.

        Raises:
            ValueError: radius is not one positive number.
        """
        r = _real(radius, "radius")
        if r.ndim != 0 or r <= 0:
            raise ValueError(f"radius must be one positive number, got {radius!r}.")
        return cls(float(r) / math.sqrt(d))

    @property
    def dimension(self) -> int | None:
        """None: it fits any number of features."""
        return None

    @property
    def is_diagonal(self) -> bool:
        """True."""
        return True

    def rank(self, d: int) -> int:
        """All d dimensions."""
        return d

    def colour(self, z: Tensor) -> Tensor:
        """σ z."""
        return z * self.sigma

    def pull(self, g: Tensor) -> Tensor:
        """σ g."""
        return g * self.sigma

    def whiten(self, delta: Tensor) -> Tensor:
        """δ / σ."""
        return delta / self.sigma

    def push(self, g: Tensor) -> Tensor:
        """γ / σ."""
        return g / self.sigma

    def scales(self, d: int) -> Tensor:
        """σ for each feature."""
        return torch.full((d,), self.sigma, dtype=torch.float64)

    def precisions(self, d: int) -> Tensor:
        """1/σ²."""
        return torch.full((d,), self.sigma**-2, dtype=torch.float64)

    precision_diagonal = precisions


@dataclass(frozen=True, eq=False)
class Diagonal(Gaussian):
    """Independent features with one standard deviation each.

    A feature with standard deviation 0 (one-hot, category, identifier) is frozen: it is never perturbed, and its
    gradient and its rows and columns of the Hessian are 0 with standard error 0.

    Args:
        sigma: standard deviations, with the shape of one input or flat.

    Raises:
        ValueError: a standard deviation is negative or not finite, or all are zero.

    >>> Diagonal([0.5, 0.0, 2.0]).rank(3)
    2
    """

    sigma: Tensor
    moving: Tensor  # (k,) indices of the features with sigma > 0

    def __init__(self, sigma: Any) -> None:
        sigmas = _real(sigma, "sigma").reshape(-1)
        if (sigmas < 0).any():
            raise ValueError(f"sigma must not be negative, a standard deviation, got {float(sigmas.min()):g}.")
        if not (sigmas > 0).any():
            raise ValueError(
                "sigma is zero for every feature: nothing would be perturbed. At least one feature needs sigma > 0."
            )
        object.__setattr__(self, "sigma", sigmas)
        object.__setattr__(self, "moving", torch.nonzero(sigmas).reshape(-1))

    @property
    def dimension(self) -> int:
        """Number of features."""
        return self.sigma.numel()

    @property
    def is_diagonal(self) -> bool:
        """True."""
        return True

    def rank(self, d: int) -> int:
        """Number of features that are not frozen."""
        return self.moving.numel()

    def _spread(self, values: Tensor) -> Tensor:
        if self.moving.numel() == self.sigma.numel():
            return values
        return values.new_zeros(*values.shape[:-1], self.sigma.numel()).index_copy(-1, self.moving, values)

    def _gather(self, values: Tensor) -> Tensor:
        if self.moving.numel() == self.sigma.numel():
            return values
        return values.index_select(-1, self.moving)

    def colour(self, z: Tensor) -> Tensor:
        """σ_i z_i, zero where frozen."""
        return self._spread(z * self._gather(self.sigma))

    def pull(self, g: Tensor) -> Tensor:
        """σ_i g_i of the features that are not frozen."""
        return self._gather(g) * self._gather(self.sigma)

    def whiten(self, delta: Tensor) -> Tensor:
        """δ_i / σ_i of the features that are not frozen."""
        return self._gather(delta) / self._gather(self.sigma)

    def push(self, g: Tensor) -> Tensor:
        """γ_i / σ_i, zero where frozen."""
        return self._spread(g / self._gather(self.sigma))

    def scales(self, d: int) -> Tensor:
        """σ_i."""
        return self.sigma

    def precisions(self, d: int) -> Tensor:
        """1/σ_i² of the features that are not frozen."""
        return self._gather(self.sigma).double() ** -2

    def precision_diagonal(self, d: int) -> Tensor:
        """1/σ_i², zero where frozen."""
        return self._spread(self.precisions(d))


@dataclass(frozen=True, eq=False)
class Dense(Gaussian):
    """A Gaussian with a dense covariance matrix.

    Args:
        covariance: symmetric positive definite matrix, (d, d).

    Raises:
        ValueError: the matrix is not square, not symmetric, not finite or not positive definite.

    >>> Dense([[1.0, 0.5], [0.5, 1.0]]).rank(2)
    2
    """

    covariance: Tensor
    root: Tensor  # (d, d) lower Cholesky factor L

    def __init__(self, covariance: Any) -> None:
        matrix = _real(covariance, "covariance")
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"covariance must be a square matrix (d, d), got shape {tuple(matrix.shape)}.")
        if not torch.allclose(matrix, matrix.mT, rtol=1e-6, atol=1e-12 * float(matrix.abs().max())):
            raise ValueError("covariance must be symmetric, got one that differs from its transpose.")
        matrix = (matrix + matrix.mT) / 2
        root, failed = torch.linalg.cholesky_ex(matrix)
        floor = 1e-13 * float(matrix.diagonal().abs().max())
        if failed or float(root.diagonal().min()) ** 2 <= floor:
            lowest = float(torch.linalg.eigvalsh(matrix)[0])
            raise ValueError(
                f"covariance must be positive definite, its lowest eigenvalue is {lowest:.3g}. "
                "To freeze directions use Eigenbasis(rest=0), or Diagonal with zeros."
            )
        object.__setattr__(self, "covariance", matrix)
        object.__setattr__(self, "root", root)

    @classmethod
    def from_data(cls, samples: Any, scale: float = 1.0, ridge: float = 0.0) -> Dense:
        """Σ = scale² (S + ridge · mean variance · I), with S the covariance of the samples.

        The noise then has the correlations of the data.

        Args:
            samples: data, (n, *input shape).
            scale: standard deviation of the noise relative to the data.
            ridge: regularisation, needed if columns are constant or collinear, or with fewer samples than features.

        Raises:
            ValueError: there are fewer than two samples, scale or ridge is out of range, or Σ is not positive definite.

        >>> Dense.from_data(torch.randn(100, 3), scale=0.1).dimension
        3
        """
        data = _real(samples, "samples")
        if data.ndim < 2 or data.shape[0] < 2:
            raise ValueError(f"samples must be (n, features) with n ≥ 2, got shape {tuple(data.shape)}.")
        if scale <= 0 or ridge < 0:
            raise ValueError(f"scale must be positive and ridge not negative, got scale={scale}, ridge={ridge}.")
        covariance = torch.cov(data.reshape(len(data), -1).T).reshape(data[0].numel(), -1)
        covariance = covariance + ridge * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=data.dtype)
        try:
            return cls(scale**2 * covariance)
        except ValueError as error:
            raise ValueError(
                f"the covariance of these {len(data)} samples of {len(covariance)} features is not positive definite "
                "(constant or collinear columns, or too few samples). Pass ridge=0.01, or drop those columns."
            ) from error

    @property
    def dimension(self) -> int:
        """Number of features."""
        return len(self.covariance)

    def rank(self, d: int) -> int:
        """All d dimensions."""
        return d

    def colour(self, z: Tensor) -> Tensor:
        """L z."""
        return z @ self.root.mT

    def pull(self, g: Tensor) -> Tensor:
        """Lᵀ g."""
        return g @ self.root

    def whiten(self, delta: Tensor) -> Tensor:
        """L⁻¹ δ."""
        return torch.linalg.solve_triangular(self.root.mT, _rows(delta), upper=True, left=False).reshape(delta.shape)

    def push(self, g: Tensor) -> Tensor:
        """L⁻ᵀ γ."""
        return torch.linalg.solve_triangular(self.root, _rows(g), upper=False, left=False).reshape(g.shape)

    def scales(self, d: int) -> Tensor:
        """√Σ_ii."""
        return self.covariance.diagonal().sqrt()

    def precisions(self, d: int) -> Tensor:
        """1/eigenvalues of Σ."""
        return 1 / torch.linalg.eigvalsh(self.covariance.double())

    def precision_diagonal(self, d: int) -> Tensor:
        """(Σ⁻¹)_ii."""
        return torch.cholesky_inverse(self.root.double()).diagonal()


@dataclass(frozen=True, eq=False)
class Eigenbasis(Gaussian):
    """A few directions with one standard deviation each, and `rest` for all directions orthogonal to them.

    With rest=0 the noise stays in the span of the directions: then hessian = P∇²hP with P the projector on the span. No
    d × d matrix is formed.

    Args:
        directions: linearly independent directions, (k, *input shape); orthonormalised in this order (Gram–Schmidt).
        sigmas: standard deviation along each direction, (k,), positive.
        rest: standard deviation along all orthogonal directions, 0 or more.

    Raises:
        ValueError: the shapes do not match, a standard deviation is out of range, or directions are dependent.

    >>> Eigenbasis(torch.eye(1000)[:2], [0.3, 0.1], rest=0.0).rank(1000)
    2
    """

    basis: Tensor  # (k, d), orthonormal rows
    sigmas: Tensor  # (k,)
    rest: float

    def __init__(self, directions: Any, sigmas: Any, rest: float) -> None:
        vectors = _real(directions, "directions")
        sigmas = _real(sigmas, "sigmas").reshape(-1)
        rest = float(_real(rest, "rest"))
        if vectors.ndim < 2:
            raise ValueError(f"directions must be (k, *input shape), got shape {tuple(vectors.shape)}.")
        vectors = vectors.reshape(len(vectors), -1)
        if len(sigmas) != len(vectors):
            raise ValueError(
                f"expected one sigma per direction, got {len(vectors)} directions and {len(sigmas)} sigmas."
            )
        if (sigmas <= 0).any() or rest < 0:
            raise ValueError(
                "sigmas must be positive and rest not negative. To freeze a direction, leave it out and use rest=0."
            )
        basis = gram_schmidt(vectors)
        if len(vectors) > vectors.shape[1] or ((basis * vectors).sum(1) <= 1e-10 * vectors.norm(dim=1)).any():
            raise ValueError("directions must be linearly independent and not zero. Drop the dependent ones.")
        object.__setattr__(self, "basis", basis.contiguous())
        object.__setattr__(self, "sigmas", sigmas)
        object.__setattr__(self, "rest", rest)

    @property
    def dimension(self) -> int:
        """Number of features."""
        return self.basis.shape[1]

    @property
    def has_mean_curvature(self) -> bool:
        """True if rest = 0."""
        return not self.rest

    def rank(self, d: int) -> int:
        """d, or the number of directions when rest = 0."""
        return d if self.rest > 0 else len(self.basis)

    def _stretch(self, vectors: Tensor, sigmas: Tensor, rest: float) -> Tensor:
        """(rest·I + Qᵀ diag(sigmas − rest) Q) v: the symmetric square root of Σ if rest > 0."""
        return rest * vectors + ((vectors @ self.basis.mT) * (sigmas - rest)) @ self.basis

    def colour(self, z: Tensor) -> Tensor:
        """L z."""
        return self._stretch(z, self.sigmas, self.rest) if self.rest else (z * self.sigmas) @ self.basis

    def pull(self, g: Tensor) -> Tensor:
        """Lᵀ g."""
        return self._stretch(g, self.sigmas, self.rest) if self.rest else (g @ self.basis.mT) * self.sigmas

    def whiten(self, delta: Tensor) -> Tensor:
        """L⁺ δ."""
        if self.rest:
            return self._stretch(delta, 1 / self.sigmas, 1 / self.rest)
        return (delta @ self.basis.mT) / self.sigmas

    def push(self, g: Tensor) -> Tensor:
        """L⁺ᵀ γ."""
        return self._stretch(g, 1 / self.sigmas, 1 / self.rest) if self.rest else (g / self.sigmas) @ self.basis

    def scales(self, d: int) -> Tensor:
        """√Σ_ii."""
        return self._diagonal(self.sigmas**2, self.rest**2).sqrt()

    def precisions(self, d: int) -> Tensor:
        """1/σ² of the directions and of the rest."""
        given = self.sigmas.double() ** -2
        others = d - len(given) if self.rest else 0
        return torch.cat([given, given.new_full((others,), self.rest**-2 if self.rest else 0.0)])

    def precision_diagonal(self, d: int) -> Tensor:
        """(Σ⁺)_ii."""
        return self._diagonal(self.sigmas**-2, self.rest**-2 if self.rest else 0.0)

    def _diagonal(self, along: Tensor, rest: float) -> Tensor:
        """Diagonal of rest·I + Qᵀ diag(along − rest) Q."""
        return (rest + ((along - rest)[:, None] * self.basis**2).sum(0)).clamp_min(0)


@dataclass(frozen=True, eq=False)
class SegmentShift(Gaussian):
    """All features of a segment are shifted by the same N(0, σ_I²), segments independently: Σ = Σ_I σ_I² 1_I 1_Iᵀ.

    Created and validated by `smoothhess.segments.noise`. L has the columns σ_I 1_I, so whitened coordinates are the
    shifts of the segments divided by σ_I, and products with L are sums over segments and gathers by segment id. A
    segment with σ_I = 0 is frozen.
    """

    mask: Tensor  # (d,) segment ids 0 … K−1, each of them used
    sigmas: Tensor  # (K,)
    sizes: Tensor  # (K,) features in each segment
    moving: Tensor  # (k,) ids of the segments with sigma > 0

    def __init__(self, mask: Tensor, sigmas: Tensor) -> None:
        object.__setattr__(self, "mask", mask)
        object.__setattr__(self, "sigmas", sigmas)
        object.__setattr__(self, "sizes", torch.bincount(mask, minlength=len(sigmas)))
        object.__setattr__(self, "moving", torch.nonzero(sigmas).reshape(-1))

    @property
    def dimension(self) -> int:
        """Number of features."""
        return len(self.mask)

    def check(self, d: int) -> Self:
        """Return itself if its mask has the shape of one input, otherwise raise ValueError."""
        if self.dimension == d:
            return self
        remedy = "Pass a mask with the shape of one input; segments.from_mask(mask, shape) repeats it for all channels."
        if self.dimension % d == 0:
            remedy = (
                "One Gaussian is used for all examples, so it has one mask. If examples have different segments, "
                "explain them one by one: attribute(inputs[i : i + 1], gaussian=segments.noise(masks[i], sigma), "
                "feature_mask=masks[i])."
            )
        raise ValueError(f"the mask of segments.noise has {self.dimension} features but an input has {d}. {remedy}")

    @property
    def has_mean_curvature(self) -> bool:
        """True."""
        return True

    def rank(self, d: int) -> int:
        """Number of segments that are not frozen."""
        return len(self.moving)

    def _spread(self, values: Tensor) -> Tensor:
        """Copy values of the segments, (…, k), to their features, (…, d); zero in frozen segments."""
        if len(self.moving) < len(self.sigmas):
            every = values.new_zeros(*values.shape[:-1], len(self.sigmas))
            values = every.index_copy(-1, self.moving, values)
        return values.index_select(-1, self.mask)

    def _sum(self, values: Tensor) -> Tensor:
        """Sums (…, k) over the features (…, d) of each segment that is not frozen."""
        sums = values.new_zeros(*values.shape[:-1], len(self.sigmas)).index_add(-1, self.mask, values)
        return sums if len(self.moving) == len(self.sigmas) else sums.index_select(-1, self.moving)

    def colour(self, z: Tensor) -> Tensor:
        """σ_I z_I for each feature of segment I."""
        return self._spread(z * self.sigmas[self.moving])

    def pull(self, g: Tensor) -> Tensor:
        """σ_I times the sum of g over segment I."""
        return self._sum(g) * self.sigmas[self.moving]

    def whiten(self, delta: Tensor) -> Tensor:
        """The mean of δ over segment I, divided by σ_I."""
        return self._sum(delta) / (self.sigmas * self.sizes)[self.moving]

    def push(self, g: Tensor) -> Tensor:
        """γ_I / (σ_I n_I) for each feature of segment I, n_I its number of features."""
        return self._spread(g / (self.sigmas * self.sizes)[self.moving])

    def scales(self, d: int) -> Tensor:
        """σ_I for each feature of segment I."""
        return self.sigmas[self.mask]

    def precisions(self, d: int) -> Tensor:
        """1/(σ_I² n_I) of the segments that are not frozen."""
        return (self.sigmas.double().square() * self.sizes)[self.moving].reciprocal()

    def precision_diagonal(self, d: int) -> Tensor:
        """1/(σ_I n_I)² for each feature of segment I."""
        return self._spread((self.sigmas.double() * self.sizes)[self.moving] ** -2)


def _rows(vectors: Tensor) -> Tensor:
    return vectors.reshape(-1, vectors.shape[-1])
