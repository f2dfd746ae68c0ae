"""The problems of the calibration benchmark: a function, an input, a Gaussian and the truth.

The truth is a closed form wherever there is one: quadratics, radial functions by quadrature, one hidden layer of ReLUs
(convolutions included), a ReLU behind two others and the softmax of an affine map by quadrature, step functions.
Elsewhere it is the mean of eight long runs, or of exact Hessians at many points, and its standard error, taken
between the eight, is kept with it. Networks are trained when they are first used, a few seconds each, and kept
under build/calibration with the references.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import roots_genlaguerre, roots_hermitenorm, roots_legendre
from small_transformers import Shape, Transformer, gated, written_out
from torch import Generator, Tensor, nn
from torch.nn import functional

import smoothhess as sh

FOLDER = Path(__file__).resolve().parent.parent / "build" / "calibration"
F64 = torch.float64
REFERENCE_SEEDS = 8


@dataclass(frozen=True, eq=False)
class Truth:
    """∇²h, ∇h and h at one input, with the standard errors of a sampled reference."""

    hessian: Tensor  # (d, d)
    gradient: Tensor  # (d,)
    value: float
    hessian_error: Tensor | None = None  # (d, d); None: exact
    gradient_error: Tensor | None = None
    value_error: float = 0.0
    samples: Tensor | None = None  # (r, d, d) the runs of the reference, for errors of sums


@dataclass(frozen=True, eq=False)
class Problem:
    """A function, an input, a Gaussian and the truth."""

    model: Callable[..., Any]
    x: Tensor  # (*shape)
    gaussian: sh.Gaussian
    truth: Truth
    target: int | None = None
    mask: Tensor | None = None  # group ids, (*shape)
    zeros: Tensor | None = None  # (d, d) bool, pairs that are exactly zero
    inside: Tensor | None = None  # (n, d) further directions for bilinear forms
    pair_sd: Tensor | None = None  # (d, d) exact standard deviation of the estimate from one ± pair, where known
    layer: str = ""  # the embedding of tokens, for TokenSmoothHess; then x are token ids

    @property
    def d(self) -> int:
        return self.x.numel()


# --- draws and Gaussians ----------------------------------------------------------------------------------------------


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=F64)


def rand(seed: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=Generator().manual_seed(seed), dtype=F64)


def covariance(gaussian: sh.Gaussian, d: int) -> Tensor:
    if isinstance(gaussian, sh.Isotropic):
        return gaussian.sigma**2 * torch.eye(d, dtype=F64)
    assert isinstance(gaussian, sh.Dense)
    return gaussian.covariance.double()


# --- closed forms -----------------------------------------------------------------------------------------------------


def quadratic(
    A: Tensor, x: Tensor, sigma: float, inside: Tensor | None = None, linear: Tensor | None = None
) -> Problem:
    """½ xᵀAx + bᵀx."""
    b = torch.zeros_like(x) if linear is None else linear
    value = float(x @ A @ x / 2 + b @ x + sigma**2 * A.trace() / 2)
    truth = Truth(A, A @ x + b, value)
    zeros = A.abs() < 1e-12
    return Problem(
        lambda z: ((z @ A) * z).sum(1) / 2 + z @ b,
        x,
        sh.Isotropic(sigma),
        truth,
        inside=inside,
        zeros=zeros if bool(zeros.any()) else None,
    )


def hidden_layer(
    W: Tensor, b: Tensor, a: Tensor, c: float, x: Tensor, gaussian: sh.Gaussian, slope: float = 0.0
) -> Truth:
    """Σ aₖ σ(wₖ·x + bₖ) + c with σ a ReLU of negative slope `slope`: ∇²h = Σ aₖ(1−slope) φ(sₖ)/τₖ wₖwₖᵀ."""
    W, b, a, x = (t.detach().double() for t in (W, b, a, x.flatten()))
    pre = W @ x + b
    tau = ((W @ covariance(gaussian, len(x))) * W).sum(1).sqrt()
    s = pre / tau
    phi, cdf = torch.exp(-s.square() / 2) / math.sqrt(2 * math.pi), torch.special.ndtr(s)
    H = (W.T * (a * (1 - slope) * phi / tau)) @ W
    G = W.T @ (a * (slope + (1 - slope) * cdf))
    value = (a * (slope * pre + (1 - slope) * (pre * cdf + tau * phi))).sum() + c
    return Truth(H, G, float(value))


def affine_part(layer: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The matrix and the offset of an affine layer on inputs of `shape`."""
    with torch.no_grad():
        d = math.prod(shape)
        offset = layer(torch.zeros(1, *shape, dtype=F64)).flatten()
        W = (layer(torch.eye(d, dtype=F64).reshape(d, *shape)).flatten(1) - offset).T
    return W, offset


@cache
def radial(kind: str, d: int, sigma: float, size: float) -> Problem:
    """‖x‖⁴ or √(1 + ‖x‖²) at a point with |x| = `size`, by quadrature over the axis of x and across it."""
    x = randn(71, d)
    x = x / x.norm() * size
    t, wt = (torch.from_numpy(v) for v in roots_hermitenorm(80))
    r, wr = (torch.from_numpy(v) for v in roots_genlaguerre(80, (d - 1) / 2 - 1))
    weight = (wt / wt.sum())[:, None] * (wr / wr.sum())[None]
    along = (size + sigma * t)[:, None]
    across2 = (2 * sigma**2 * r)[None]  # |δ⊥|², σ² χ²_{d−1}
    s = along.square() + across2
    if kind == "quartic":
        f, f1, f2 = s.square(), 2 * s, torch.full_like(s, 2.0)
        model = lambda z: z.square().sum(1).square()  # noqa: E731
    else:
        f, f1, f2 = (1 + s).sqrt(), (1 + s).pow(-0.5) / 2, -(1 + s).pow(-1.5) / 4
        model = lambda z: (1 + z.square().sum(1)).sqrt()  # noqa: E731
    mean = lambda v: float((weight * v).sum())  # noqa: E731
    e = x / size
    outer = torch.outer(e, e)
    H = mean(2 * f1 + 4 * f2 * along.square()) * outer
    H = H + mean(2 * f1 + 4 * f2 * across2 / (d - 1)) * (torch.eye(d, dtype=F64) - outer)
    return Problem(model, x, sh.Isotropic(sigma), Truth(H, mean(2 * f1 * along) * e, mean(f)))


def windows(shape: tuple[int, ...], *counts: int) -> Tensor:
    """Ids of equal windows of a curve, or patches of an image."""
    ids = torch.zeros(shape, dtype=torch.long)
    for axis, count in enumerate(counts):
        place = torch.arange(shape[axis]) * count // shape[axis]
        ids = ids * count + place.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return ids


# --- kept on disk: networks and references ----------------------------------------------------------------------------


def kept(key: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors in a file, or else made and written there atomically."""
    path = FOLDER / f"{key}.pt"
    if path.is_file():
        return torch.load(path, weights_only=True)
    made = make()
    FOLDER.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    torch.save(made, temporary)
    temporary.replace(path)
    return made


def trained(
    key: str,
    build: Callable[[], nn.Module],
    data: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: int = 400,
    lr: float = 3e-3,
    noise: float = 0.1,
    weight_decay: float = 1e-4,
) -> nn.Module:
    """A network in float64, trained or read back; the global random state is restored."""

    def fit() -> dict[str, Tensor]:
        X, y = data()
        X = X.float()
        y = y.float() if y.is_floating_point() else y
        torch.manual_seed(0)
        net = build()
        optimiser = torch.optim.AdamW(net.parameters(), lr, weight_decay=weight_decay)
        for _ in range(steps):
            i = torch.randint(len(X), (128,))
            optimiser.zero_grad()
            loss(net(X[i] + noise * torch.randn_like(X[i])), y[i]).backward()
            optimiser.step()
        return {k: v.detach().double() for k, v in net.state_dict().items()}

    with torch.random.fork_rng():
        state = kept(f"net-{key}", fit)
        net = build().double()
    net.load_state_dict(state)
    return net.eval().requires_grad_(False)


def reference(
    key: str, model: Callable[..., Any], x: Tensor, target: int | None, gaussian: sh.Gaussian, calls: int
) -> Truth:
    """The mean of eight runs of `calls` gradient calls each, unbiased, whole orthogonal blocks."""
    d = x.numel()
    calls = max(1, round(calls / 2 / d)) * 2 * d

    def make() -> dict[str, Tensor]:
        runs = []
        for seed in range(REFERENCE_SEEDS):
            options = {"gaussian": gaussian, "n_calls": calls, "shrink": False, "seed": 900_000 + seed}
            runs.append(sh.SmoothHess(model).attribute(x[None], target, control="auto", **options))
        return {
            "hessian": torch.stack([r.hessian[0].double() for r in runs]),
            "gradient": torch.stack([r.gradient[0].flatten().double() for r in runs]),
            "value": torch.stack([r.value[0].double() for r in runs]),
        }

    return mean_of_runs(kept(f"reference-{key}-{calls}", make))


def mean_of_runs(runs: dict[str, Tensor]) -> Truth:
    """The mean of independent runs of the hessian, gradient and value, and its standard errors."""
    mean = {k: v.mean(0) for k, v in runs.items()}
    error = {k: v.std(0) / math.sqrt(len(v)) for k, v in runs.items()}
    return Truth(
        mean["hessian"],
        mean["gradient"],
        float(mean["value"]),
        error["hessian"],
        error["gradient"],
        float(error["value"]),
        runs["hessian"],
    )


# --- quadratics and convex functions: curvature that commutes with the projector --------------------------------------


@cache
def identity(d: int) -> Problem:
    return quadratic(torch.eye(d, dtype=F64), randn(1, d), 0.5)


@cache
def projector(d: int, r: int) -> Problem:
    U = torch.linalg.qr(randn(2, d, r))[0]
    inside = torch.cat([U.T[:3], randn(3, 2, r) @ U.T])
    return quadratic(2 * U @ U.T, randn(1, d), 0.5, inside)


@cache
def multiple(d: int, kind: str) -> Problem:
    """Traceless, with a five-fold eigenvalue or with ± two-fold ones."""
    U = torch.linalg.qr(randn(4, d, d))[0]
    if kind == "five-fold":
        values = torch.cat([torch.full((5,), 3.0, dtype=F64), randn(5, d - 5)])
        values[5:] -= values.sum() / (d - 5)
    else:
        few = 0.5 + rand(6, d // 4)
        values = torch.cat([few, few, -few, -few])
    span = U[:, :5] if kind == "five-fold" else U[:, [0, d // 4]]
    inside = torch.cat([span.T[:2], randn(7, 3, span.shape[1]) @ span.T])
    return quadratic((U * values) @ U.T, randn(1, d), 0.5, inside)


@cache
def pca_score(d: int) -> Problem:
    U = torch.linalg.qr(randn(8, d, 5))[0]
    P = torch.eye(d, dtype=F64) - U @ U.T
    return quadratic(2 * P, randn(9, d), 0.5)


@cache
def general_quadratic(d: int) -> Problem:
    A = randn(10, d, d)
    return quadratic((A + A.T) / 2, randn(1, d), 0.5, linear=randn(11, d))


@cache
def convex_net(d: int = 64, units: int = 128) -> Problem:
    """One hidden layer with positive output weights: convex, with a large trace."""
    W, b, a, x = randn(12, units, d) / d**0.5, randn(13, units) * 0.3, rand(14, units), randn(15, d)
    gaussian = sh.Isotropic(0.5)
    return Problem(lambda z: torch.relu(z @ W.T + b) @ a, x, gaussian, hidden_layer(W, b, a, 0, x, gaussian))


@cache
def log_sum_exp(d: int = 20) -> Problem:
    """log Σ exp; the mean of exact Hessians over many pairs."""
    x, sigma = randn(16, d), 0.7

    def make() -> dict[str, Tensor]:
        runs = []
        for seed in range(REFERENCE_SEEDS):
            delta = sigma * randn(17_000 + seed, 50_000, d)
            y = torch.cat([x + delta, x - delta])
            p = y.softmax(1)
            runs.append((p.mean(0).diag() - p.T @ p / len(p), p.mean(0), y.logsumexp(1).mean()))
        names = ("hessian", "gradient", "value")
        return {name: torch.stack(v) for name, v in zip(names, zip(*runs, strict=True), strict=True)}

    truth = mean_of_runs(kept(f"reference-log-sum-exp-{d}", make))
    return Problem(lambda z: z.logsumexp(1), x, sh.Isotropic(sigma), truth)


def _digits(size: int) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, y = load_digits(return_X_y=True)
    X = torch.from_numpy(np.asarray(pixels, dtype=np.float64)) / 16
    if size != 8:
        X = functional.interpolate(X.reshape(-1, 1, 8, 8), size=(size, size), mode="bilinear")
        return X, torch.from_numpy(y)
    return X, torch.from_numpy(y)


class ReconstructionError(nn.Module):
    """‖x − decoder(relu(encoder(x)))‖²."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.decoder(torch.relu(self.encoder(x)))).square().sum(1)


@cache
def autoencoder() -> Problem:
    net = trained(
        "autoencoder", lambda: ReconstructionError(64, 24), lambda: _digits(8), lambda f, _: f.mean(), 600, noise=0.05
    )
    x, gaussian = _digits(8)[0][0], sh.Isotropic(0.15)
    return Problem(net, x, gaussian, reference("autoencoder", net, x, None, gaussian, 64 * 2 * 150))


# --- no kink met, affine, discontinuous -------------------------------------------------------------------------------


@cache
def one_unit(margin: float, kind: str = "plain", d: int = 12) -> Problem:
    """One unit whose kink is `margin` standard deviations away."""
    w, sigma, x = randn(20, d), 0.5, torch.zeros(d, dtype=F64)
    w = w / w.norm()
    gaussian, offset, slope = sh.Isotropic(sigma), -margin * sigma, 0.1 if kind == "leaky" else 0.0
    one = torch.ones(1, dtype=F64)
    truth = hidden_layer(w[None], one * offset, one, 0.0, x, gaussian, slope)
    if kind == "plain":
        model = lambda z: torch.relu(z @ w + offset)  # noqa: E731
    elif kind == "leaky":
        model = lambda z: functional.leaky_relu(z @ w + offset, 0.1)  # noqa: E731
    else:  # deep: the first layer is active at 10 standard deviations, so that the closed form stays that of one unit
        model = _deep_unit(w, offset, sigma, d)
    # variance of one ± pair of the estimate: half-difference ½ sign(t) 1[|t| > margin] (1 − slope) w/σ, t = w·z
    p = 2 * float(torch.special.ndtr(torch.tensor(-margin, dtype=F64)))
    density = math.exp(-(margin**2) / 2) / math.sqrt(2 * math.pi)
    second = torch.eye(d, dtype=F64) * p + 2 * margin * density * torch.outer(w, w)  # E[zzᵀ; |t| > margin]
    diagonal = second.diagonal()
    moment = (
        diagonal[:, None] * w.square()[None] + diagonal[None] * w.square()[:, None] + 2 * second * torch.outer(w, w)
    )
    variance = (1 - slope) ** 2 / 16 / sigma**2 * moment - truth.hessian.square()
    return Problem(model, x, gaussian, truth, pair_sd=variance.clamp_min(0).sqrt())


def _deep_unit(w: Tensor, offset: float, sigma: float, d: int) -> nn.Module:
    first, second, third = (
        nn.Linear(d, d, dtype=F64),
        nn.Linear(d, 1, dtype=F64),
        nn.Linear(1, 1, dtype=F64),
    )
    U = torch.linalg.qr(randn(21, d, d))[0]
    with torch.no_grad():
        first.weight.copy_(U)
        first.bias.fill_(10 * sigma)
        second.weight.copy_((U @ w)[None])
        second.bias.fill_(offset - 10 * sigma * float((U @ w).sum()))
        third.weight.fill_(1.0)
        third.bias.fill_(0.0)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third, nn.Flatten(0)).requires_grad_(False)


@cache
def affine(kind: str, d: int = 20) -> Problem:
    w, x = randn(22, d), randn(23, d)
    truth = Truth(torch.zeros(d, d, dtype=F64), w, float(x @ w))
    if kind == "module":
        layer = nn.Linear(d, 1, bias=False, dtype=F64)
        with torch.no_grad():
            layer.weight.copy_(w[None])
        model: Callable[..., Any] = nn.Sequential(layer, nn.Flatten(0)).requires_grad_(False)
    elif kind == "function":
        model = lambda z: z @ w  # noqa: E731
    else:  # a kink at 20 standard deviations
        model = lambda z: torch.relu(z @ w - float(x @ w) + 20 * 0.5 * float(w.norm()))  # noqa: E731
        truth = Truth(truth.hessian, w, 10 * float(w.norm()))
    return Problem(model, x, sh.Isotropic(0.5), truth, zeros=torch.ones(d, d, dtype=torch.bool))


@cache
def steps(linear: bool, d: int = 12) -> Problem:
    """A sum of steps in single features, with or without a linear part; gradients do not see the steps."""
    n, sigma = 60, 0.5
    x, w = randn(24, d), randn(25, d) * linear
    place = torch.randint(d, (n,), generator=Generator().manual_seed(26))
    threshold, height = 0.7 * randn(27, n), 0.3 * randn(28, n)
    t = threshold / sigma
    phi = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    H = torch.zeros(d, dtype=F64).index_add(0, place, height * t * phi / sigma**2).diag()
    G = w + torch.zeros(d, dtype=F64).index_add(0, place, height * phi / sigma)
    value = float(x @ w + (height * torch.special.ndtr(-t)).sum())

    def model(z: Tensor) -> Tensor:
        return z @ w + (height * (z[:, place] > threshold + x[place]).to(z)).sum(1)

    return Problem(model, x, sh.Isotropic(sigma), Truth(H, G, value))


# --- dense covariances ------------------------------------------------------------------------------------------------


@cache
def correlated(ridge: float) -> Problem:
    from sklearn.datasets import load_breast_cancer

    X = torch.tensor(np.asarray(load_breast_cancer(return_X_y=True)[0]), dtype=F64)
    X = (X - X.mean(0)) / X.std(0)
    W, b, a, x = randn(30, 60, 30) / 30**0.5, randn(31, 60) * 0.3, randn(32, 60), X[0] * 0.3
    gaussian = sh.Dense.from_data(X, scale=0.5, ridge=ridge)
    return Problem(lambda z: torch.relu(z @ W.T + b) @ a, x, gaussian, hidden_layer(W, b, a, 0, x, gaussian))


def _curves(n: int = 2000, length: int = 60) -> tuple[Tensor, Tensor]:
    """Smooth random curves, (n, 1, length), and a product of two local means."""
    t = torch.linspace(0, 1, length, dtype=F64)
    frequency = torch.arange(1, 7, dtype=F64)
    size = randn(33, n, 2, 6) / frequency
    angle = 2 * math.pi * frequency[:, None] * t
    X = (size[:, 0, :, None] * angle.sin() + size[:, 1, :, None] * angle.cos()).sum(1)
    y = X[:, 10:20].mean(1) * X[:, 35:45].mean(1) + X[:, 50:].mean(1).abs()
    return X[:, None], y


def _curve_net(depth: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv1d(1, 8, 9, stride=3), nn.ReLU()]
    width = 8 * 18
    if depth == 2:
        layers += [nn.Conv1d(8, 8, 5, stride=2), nn.ReLU()]
        width = 8 * 7
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 1), nn.Flatten(0))


@cache
def curve(depth: int) -> Problem:
    X, _ = _curves()
    net = trained(f"curve-{depth}", partial(_curve_net, depth), _curves, functional.mse_loss, 800)
    gaussian, x = sh.Dense.from_data(X[:, 0], scale=0.5, ridge=1e-3), X[3]
    if depth == 1:
        layers = list(net.children())
        W, b = affine_part(layers[0], (1, 60))
        final = layers[-2]
        assert isinstance(final, nn.Linear)
        truth = hidden_layer(W, b, final.weight[0], float(final.bias[0]), x, gaussian)
    else:
        truth = reference(f"curve-{depth}", net, x, None, gaussian, 40_000)
    return Problem(net, x, gaussian, truth, mask=windows((60,), 6)[None])


# --- few dimensions, and functions with known products ----------------------------------------------------------------


@cache
def product(d: int) -> Problem:
    """x₁x₂ in two dimensions (and x₁² in one), or with further features."""
    A = torch.zeros(d, d, dtype=F64)
    if d == 1:
        A[0, 0] = 1
    else:
        A[0, 1] = A[1, 0] = 1
    return quadratic(A, torch.ones(d, dtype=F64), 1.0)


@cache
def triple_product() -> Problem:
    """x₁x₂x₃, whose smoothed version is itself."""
    x = torch.tensor([1.0, -0.5, 2.0], dtype=F64)
    H = torch.tensor([[0, x[2], x[1]], [x[2], 0, x[0]], [x[1], x[0], 0]], dtype=F64)
    G = torch.stack([x[1] * x[2], x[0] * x[2], x[0] * x[1]])
    return Problem(lambda z: z.prod(1), x, sh.Isotropic(1.0), Truth(H, G, float(x.prod())))


@cache
def random_net(d: int, units: int = 40, sigma: float = 0.5) -> Problem:
    W, b, a, x = randn(40, units, d) / d**0.5, randn(41, units) * 0.3, randn(42, units), randn(43, d)
    gaussian = sh.Isotropic(sigma)
    return Problem(lambda z: torch.relu(z @ W.T + b) @ a, x, gaussian, hidden_layer(W, b, a, 0, x, gaussian))


@cache
def additive_net(groups: int = 6, size: int = 4, units: int = 10) -> Problem:
    """A hidden layer whose units see one group of features each: pairs across groups are exactly zero."""
    d = groups * size
    W = torch.block_diag(*(randn(50 + g, units, size) / size**0.5 for g in range(groups)))
    b, a, x = randn(44, groups * units) * 0.3, randn(45, groups * units), randn(46, d)
    gaussian = sh.Isotropic(0.5)
    member = torch.arange(d) // size
    return Problem(
        lambda z: torch.relu(z @ W.T + b) @ a,
        x,
        gaussian,
        hidden_layer(W, b, a, 0, x, gaussian),
        zeros=member[:, None] != member[None],
        mask=member,
    )


# --- sums over groups -------------------------------------------------------------------------------------------------


@cache
def edges(d: int = 256) -> Problem:
    """Σ aᵢ log cosh(3(xᵢ₊₁ − xᵢ))/3: the entries cancel inside a window."""
    a, x, sigma = 0.5 + rand(60, d - 1), 0.3 * randn(61, d), 0.5
    t, weight = (torch.from_numpy(v) for v in roots_hermitenorm(200))
    u = (x[1:] - x[:-1])[:, None] + math.sqrt(2) * sigma * t
    weight = weight / weight.sum()
    second = a * ((3 / (3 * u).cosh().square()) @ weight)
    first = a * ((3 * u).tanh() @ weight)
    log_cosh = lambda v: v.abs() + torch.log1p(torch.exp(-2 * v.abs())) - math.log(2)  # noqa: E731
    D = torch.diff(torch.eye(d, dtype=F64), dim=0)  # (d − 1, d)
    truth = Truth(D.T @ (second[:, None] * D), D.T @ first, float(a @ (log_cosh(3 * u) / 3 @ weight)))
    return Problem(
        lambda z: (log_cosh(3 * (z[:, 1:] - z[:, :-1])) / 3) @ a,
        x,
        sh.Isotropic(sigma),
        truth,
        mask=windows((d,), 16),
    )


def _image_net(kind: str) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 10))
    if kind == "cnn":
        return nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10))
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(576, 10),
    )


@cache
def image(kind: str) -> Problem:
    net = trained(f"image-{kind}", partial(_image_net, kind), lambda: _digits(24), functional.cross_entropy, 300)
    x = _digits(24)[0][0]
    gaussian, target = sh.Isotropic(1 / 24), int(net(x[None]).argmax())
    layers = list(net.children())
    final = layers[-1]
    assert isinstance(final, nn.Linear)
    if kind == "pooled cnn":
        truth = reference("image-pooled-cnn", net, x, target, gaussian, 576 * 2 * 8)
    else:
        W, b = affine_part(nn.Sequential(*layers[: 2 if kind == "mlp" else 1]), (1, 24, 24))
        truth = hidden_layer(W, b, final.weight[target], float(final.bias[target]), x, gaussian)
    return Problem(net, x, gaussian, truth, target, mask=windows((24, 24), 4, 4)[None])


# --- ordinary networks ------------------------------------------------------------------------------------------------


def _table(name: str) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    data: Any = datasets.load_wine() if name == "wine" else datasets.load_breast_cancer()
    X = torch.tensor(data.data, dtype=F64)
    return (X - X.mean(0)) / X.std(0), torch.tensor(data.target)


def _mlp(sizes: tuple[int, ...], activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers: list[nn.Module] = []
    for i, (wide, narrow) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(wide, narrow)] + ([activation()] if i < len(sizes) - 2 else [])
    return nn.Sequential(*layers)


@cache
def breast() -> Problem:
    net = trained(
        "breast", partial(_mlp, (30, 48, 2)), partial(_table, "breast"), functional.cross_entropy, weight_decay=0.05
    )
    x, gaussian = _table("breast")[0][0], sh.Isotropic(0.3)
    first, _, last = net.children()
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    truth = hidden_layer(first.weight, first.bias, last.weight[0], float(last.bias[0]), x, gaussian)
    return Problem(net, x, gaussian, truth, 0)


@cache
def wine(output: str = "logit", sigma: float = 0.8) -> Problem:
    """At σ = .3 only pairs of flips that few draws meet are left open by the closed form; at .8 many do."""
    decay = 0.5 if output == "softmax" else 0.01
    net = trained(
        f"wine-{output}",
        partial(_mlp, (13, 32, 32, 3)),
        partial(_table, "wine"),
        functional.cross_entropy,
        steps=60 if output == "softmax" else 400,
        weight_decay=decay,
        noise=0.3,
    )
    X, _ = _table("wine")
    x, gaussian = X[0], sh.Isotropic(sigma)
    model: Callable[..., Any] = net
    if output == "softmax":  # the input that the classifier is least sure of
        x = X[net(X).softmax(1).max(1).values.argmin()]
        model = lambda z: net(z).softmax(1)  # noqa: E731
    return Problem(model, x, gaussian, reference(f"wine-{output}-{sigma:g}", model, x, 0, gaussian, 40_000), 0)


@cache
def digits() -> Problem:
    net = trained("digits", partial(_mlp, (64, 64, 32, 10)), lambda: _digits(8), functional.cross_entropy)
    x, gaussian = _digits(8)[0][0], sh.Isotropic(0.1)
    target = int(net(x[None]).argmax())
    return Problem(net, x, gaussian, reference("digits", net, x, target, gaussian, 40_000), target)


@cache
def smooth_net(kind: str) -> Problem:
    activation = nn.Tanh if kind == "tanh" else nn.GELU
    net = trained(f"wine-{kind}", partial(_mlp, (13, 32, 32, 3), activation), partial(_table, "wine"),
                  functional.cross_entropy, weight_decay=0.01)  # fmt: skip
    x, gaussian = _table("wine")[0][0], sh.Isotropic(0.3)
    return Problem(net, x, gaussian, reference(f"wine-{kind}", net, x, 0, gaussian, 40_000), 0)


@cache
def deep_small(d: int) -> Problem:
    """Two hidden layers in a few dimensions, random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(d)
        net = _mlp((d, 24, 24, 1)).double().requires_grad_(False)
    x, gaussian = 0.5 * randn(70, d), sh.Isotropic(0.5)
    return Problem(net, x, gaussian, reference(f"deep-small-{d}", net, x, 0, gaussian, 40_000), 0)


@cache
def tau_net() -> Problem:
    return random_net(40, 80)


# --- rare flips -------------------------------------------------------------------------------------------------------


def black_box(problem: Problem) -> Problem:
    """The same function through `from_gradient`, which hides its operations."""

    def value_and_gradient(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.clone().requires_grad_()
        value = problem.model(z)
        return value.detach(), torch.autograd.grad(value.sum(), z)[0]

    return replace(problem, model=sh.from_gradient(value_and_gradient, numpy=False))


@cache
def far_kink(margin: float, seen: bool, d: int = 8) -> Problem:
    """One strong kink at `margin` standard deviations, and others at the input; its part of H is the same at each."""
    W, sigma, x = torch.linalg.qr(randn(80, d, d))[0], 0.5, torch.zeros(d, dtype=F64)
    b = torch.zeros(d, dtype=F64)
    b[0] = -margin * sigma
    a = torch.cat(
        [torch.tensor([2 / math.exp(-(margin**2) / 2)], dtype=F64), torch.linspace(0.2, 0.6, d - 1, dtype=F64)]
    )
    gaussian = sh.Isotropic(sigma)
    truth = hidden_layer(W, b, a, 0, x, gaussian)
    problem = Problem(lambda z: torch.relu(z @ W.T + b) @ a, x, gaussian, truth, inside=W[:1])
    return problem if seen else black_box(problem)


def _gauss_legendre(*edges: float) -> tuple[Tensor, Tensor]:
    """Nodes and weights of integrals over consecutive intervals."""
    t, w = (torch.from_numpy(v) for v in roots_legendre(200))
    nodes = [(a + b) / 2 + (b - a) / 2 * t for a, b in pairwise(edges)]
    return torch.cat(nodes), torch.cat([(b - a) / 2 * w for a, b in pairwise(edges)])


def _density(t: Tensor) -> Tensor:
    return torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)


@cache
def deep_pair(margin: float, seen: bool, d: int = 8) -> Problem:
    """jump · relu(relu(w₁·z + .2) + relu(w₂·z − .1) − c) and single kinks; `margin` is that of both flips together.

    Given the first inner unit, all expectations over the second are closed forms.
    """
    W, sigma, x = torch.linalg.qr(randn(81, d, d))[0], 0.5, torch.zeros(d, dtype=F64)
    offset = torch.tensor([0.2, -0.1], dtype=F64)
    c = 0.1 + margin * sigma * math.sqrt(2)
    jump = 4 / math.exp(-(margin**2) / 2)

    def model(z: Tensor) -> Tensor:
        inner = torch.relu(z @ W[:2].T + offset).sum(1)
        return torch.relu(z @ W[2:].T).sum(1) + jump * torch.relu(inner - c)

    def moments(own: float, other: float) -> tuple[float, float, float, float]:
        """E[∂], E[z ∂] and E[z′ ∂] of the derivative ∂ for one inner unit, and E[relu(…)]."""
        t, weight = _gauss_legendre(-own / sigma, (c - own) / sigma, 12.0)
        u = own + sigma * t
        weight = weight * _density(t)
        s = torch.where(u < c, (c - u - other) / sigma, -math.inf)  # the outer unit is active where z′ > s
        on, tilted = torch.special.ndtr(-s), torch.where(u < c, _density(s), 0.0)

        def above(r: Tensor) -> Tensor:
            """E[relu(r + relu(v) − c)] over the other unit v."""
            start = ((c - r).clamp_min(0) - other) / sigma
            return (r - c).clamp_min(0) + sigma * (_density(start) - start * torch.special.ndtr(-start))

        inactive = float(torch.special.ndtr(torch.tensor(-own / sigma, dtype=F64)) * above(torch.zeros(1, dtype=F64)))
        value = float((weight * above(u)).sum()) + inactive
        return float((weight * on).sum()), float((weight * t * on).sum()), float((weight * tilted).sum()), value

    first, second = moments(0.2, -0.1), moments(-0.1, 0.2)
    inner = jump / sigma * torch.tensor([[first[1], first[2]], [second[2], second[1]]], dtype=F64)
    H = W[:2].T @ inner @ W[:2] + (W[2:].T @ W[2:]) / math.sqrt(2 * math.pi) / sigma
    G = jump * (first[0] * W[0] + second[0] * W[1]) + W[2:].sum(0) / 2
    value = jump * first[3] + (d - 2) * sigma / math.sqrt(2 * math.pi)
    problem = Problem(model, x, sh.Isotropic(sigma), Truth(H, G, value), inside=W[:2])
    return problem if seen else black_box(problem)


# --- ill-conditioned covariances, outputs of classifiers, tokens ------------------------------------------------------


@cache
def ill_conditioned(condition: float, d: int = 8, units: int = 16) -> Problem:
    """A random hidden layer; the eigenvalues of Σ fall from .25 to .25/condition."""
    W, b, a, x = randn(82, units, d) / d**0.5, randn(83, units) * 0.2, randn(84, units), 0.3 * randn(85, d)
    U = torch.linalg.qr(randn(86, d, d))[0]
    gaussian = sh.Dense((U * (0.25 * condition ** -torch.linspace(0, 1, d, dtype=F64))) @ U.T)
    return Problem(lambda z: torch.relu(z @ W.T + b) @ a, x, gaussian, hidden_layer(W, b, a, 0, x, gaussian))


@cache
def affine_classifier(output: str, saturated: bool, d: int = 10) -> Problem:
    """p₀ or −log p₀ of the softmax of (0, y₁, y₂) with y = Ax + b, by quadrature over y."""
    A, x, sigma = randn(87, 2, d) / d**0.5, torch.zeros(d, dtype=F64), 1.0
    b = torch.tensor([-6.0, -7.0] if saturated else [0.3, -0.5], dtype=F64)
    t = torch.linspace(-11, 11, 441, dtype=F64)
    w = _density(t) / _density(t).sum()
    weight = (w[:, None] * w[None]).flatten()
    y = b + torch.cartesian_prod(t, t) @ torch.linalg.cholesky(sigma**2 * A @ A.T).T
    logits = torch.cat([torch.zeros_like(y[:, :1]), y], 1)
    p = logits.softmax(1)
    own, rest = p[:, 0], p[:, 1:]
    outer, single = rest[:, :, None] * rest[:, None], torch.diag_embed(rest)
    if output == "softmax":
        value, slope, second = own, -own[:, None] * rest, own[:, None, None] * (2 * outer - single)
    else:
        value, slope, second = logits.logsumexp(1), rest, single - outer
    truth = Truth(
        A.T @ torch.einsum("n,nij->ij", weight, second) @ A, (weight @ slope) @ A, float((weight * value).sum())
    )

    def model(z: Tensor) -> Tensor:
        y = z @ A.T + b
        log_p = torch.log_softmax(torch.cat([torch.zeros_like(y[:, :1]), y], 1), 1)[:, 0]
        return log_p.exp() if output == "softmax" else -log_p

    return Problem(model, x, sh.Isotropic(sigma), truth)


@cache
def wine_output(output: str) -> Problem:
    """The softmax of a class, which is almost 1, or the loss of the wine network."""
    net, x, gaussian = wine().model, wine().x, sh.Isotropic(0.3)
    label = int(net(x[None]).argmax())

    def model(z: Tensor) -> Tensor:
        log_p = torch.log_softmax(net(z), 1)[:, label]
        return log_p.exp() if output == "softmax" else -log_p

    return Problem(model, x, gaussian, reference(f"wine-net-{output}", model, x, None, gaussian, 40_000))


@cache
def tokens() -> Problem:
    """A small transformer with one gate per token; the truth is the mean of exact Hessians."""
    with torch.random.fork_rng():
        torch.manual_seed(88)
        shape = Shape(causal=False, norm_first=True, classes=3, vocabulary=20, length=8, width=16, heads=2, layers=1)
        net = Transformer(shape).double().eval().requires_grad_(False)
    ids, sigma, target = torch.tensor([3, 14, 1, 5, 9, 2, 6, 18]), 0.3, 0
    gates = gated(written_out(net).requires_grad_(False), ids, (target,))

    def make() -> dict[str, Tensor]:
        derivatives = [torch.func.vmap(f) for f in (torch.func.hessian(gates), torch.func.grad(gates), gates)]
        runs: list[list[Tensor]] = []
        for seed in range(REFERENCE_SEEDS):
            delta = sigma * randn(89_000 + seed, 1000, len(ids))
            s = 1 + torch.cat([delta, -delta])
            runs.append([f(s).mean(0).detach() for f in derivatives])
        names = ("hessian", "gradient", "value")
        return {name: torch.stack(v) for name, v in zip(names, zip(*runs, strict=True), strict=True)}

    truth = mean_of_runs(kept("reference-tokens", make))
    return Problem(net, ids, sh.Isotropic(sigma), truth, target, layer="tokens")
