"""The exact minimum of a quadratic on a ball, in every form of the Hessian, on every kind of problem."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize_scalar

from smoothhess import Dense, Diagonal, Eigenbasis, Isotropic, SmoothHess, segments
from smoothhess.linalg.memory import ByteLimit
from smoothhess.linalg.trust_region import certified, lanczos
from smoothhess.linalg.trust_region.secular import minimize_diagonal
from smoothhess.linalg.trust_region.spectrum import count_kept
from smoothhess.result.exact import Attribution, Exact
from smoothhess.result.hessian_forms import spectrum_of
from smoothhess.result.minimize_in_ball import kkt_residual, minimize_in_ball

pytestmark = pytest.mark.rounding

DIMENSIONS = (1, 2, 3, 7, 30)
TIGHT = 1e-12  # the promise is 1e-8


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, rng):
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def objective(gradient, hessian, step):
    return (gradient * step).sum(-1) + (step * (hessian @ step[..., None])[..., 0]).sum(-1) / 2


def spectra(batch, d, rng):
    """Eigenvalues of every kind, (batch, d)."""
    w = normal(batch, d, rng=rng)
    first = torch.arange(d) == 0
    return {
        "indefinite": w,
        "definite": w.abs() + 0.1,
        "singular": w.abs().masked_fill(first, 0.0),
        "negative": -w.abs(),
        "zero": torch.zeros(batch, d).double(),
        "multiple of the identity": normal(batch, 1, rng=rng).expand(batch, d),
        "repeated": w[:, :2][:, torch.arange(d) % min(d, 2)],
        "repeated lowest": torch.where(torch.arange(d) < (d + 1) // 2, -1.0, w.abs()),
        "nearly repeated": -1 + 1e-15 * w,
        "rank one": w.masked_fill(~first, 0.0),
        "wide": w * 10 ** (6 * normal(batch, d, rng=rng)),
    }


def gradients(w, rng):
    """Coefficients of the gradient of every kind, (batch, d)."""
    c = normal(*w.shape, rng=rng)
    lowest = w == w.amin(1, keepdim=True)
    tiny = 10 ** (-25 * torch.rand(len(w), 1, generator=rng).double())
    return {
        "random": c,
        "zero": torch.zeros_like(c),
        "hard": c.masked_fill(lowest, 0.0),
        "nearly hard": torch.where(lowest, tiny * c, c),
        "lowest alone": c.masked_fill(~lowest, 0.0),
        "small": 1e-9 * c,
        "large": 1e9 * c,
    }


def problems(d, batch=20, seed=0, without=()):
    """Names, gradients (N, d) and Hessians (N, d, d); rotated, and diagonal ones, whose zeros are exact."""
    rng = generator(seed)
    Q = torch.linalg.qr(normal(batch, d, d, rng=rng)).Q
    names, slopes, matrices = [], [], []
    for kind, w in spectra(batch, d, rng).items():
        H = (Q * w[:, None]) @ Q.mT
        for slope, c in gradients(w, rng).items():
            for name, g, matrix in (
                (f"{kind}, {slope}", (Q @ c[..., None])[..., 0], (H + H.mT) / 2),
                (f"diagonal {kind}, {slope}", c, torch.diag_embed(w)),
            ):
                if not any(word in name for word in without):
                    names += [name] * batch
                    slopes.append(g)
                    matrices.append(matrix)
    return names, torch.cat(slopes), torch.cat(matrices)


def assert_solved(names, g, H, radius, step, tolerance=TIGHT):
    residual = kkt_residual(g, H, radius, step)
    worst = int(residual.argmax())
    assert float(residual[worst]) <= tolerance, (names[worst], radius, float(residual[worst]))


# --- the optimality conditions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", DIMENSIONS)
def test_every_problem_is_solved_to_rounding(d):
    names, g, H = problems(d)
    assert len(names) > 3_000
    for radius in (1e-6, 0.3, 3.0, 1e6):
        assert_solved(names, g, H, radius, minimize_in_ball(g, H, radius))


@pytest.mark.parametrize("scales", [(150, 0, 0), (-150, 0, 0), (0, 150, 0), (0, -150, 0), (0, 0, 150), (0, 0, -150)])
@pytest.mark.parametrize("others", [(0, 0, 0), (140, 140, 0), (-140, -140, 0), (0, 140, -140), (0, -140, 140)])
def test_huge_and_tiny_numbers(scales, others):
    of_g, of_h, radius = (10.0 ** (a + b) for a, b in zip(scales, others, strict=True))
    names, g, H = problems(3, batch=4, seed=1, without=["wide"])
    largest = H.abs().amax((1, 2))
    # left out: numbers that float64 does not have, in the problem or in its solution
    fits = (largest * of_h * max(radius, 1) < 1e300) & (
        g.abs().amax(1) * of_g > 1e-290 * (largest * of_h).clamp_min(1e-300)
    )
    g, H = of_g * g[fits], of_h * H[fits]
    assert_solved([n for n, f in zip(names, fits, strict=True) if f], g, H, radius, minimize_in_ball(g, H, radius))
    assert len(g) > 100 or of_h > 1e150


def test_minimum_exactly_on_the_sphere():
    """‖H⁻¹g‖ = r: inside and boundary meet."""
    for d in DIMENSIONS:
        rng = generator(d)
        Q = torch.linalg.qr(normal(50, d, d, rng=rng)).Q
        w, y = normal(50, d, rng=rng).abs() + 0.1, normal(50, d, rng=rng)
        H = (Q * w[:, None]) @ Q.mT
        newton = (Q @ y[..., None])[..., 0]
        g = -(H @ newton[..., None])[..., 0]
        step = minimize_in_ball(g, (H + H.mT) / 2, newton.norm(dim=1))
        torch.testing.assert_close(step, newton, rtol=1e-10, atol=1e-12)


def test_hard_case_by_hand():
    g, H = torch.tensor([[0.0, 2.0]]).double(), torch.diag(torch.tensor([-1.0, 1.0])).double()[None]
    for radius in (1.5, 2.0, 10.0):
        (step,) = minimize_in_ball(g, H, radius)
        assert float(step[1]) == pytest.approx(-1.0, abs=1e-14)
        assert float(step[0].abs()) == pytest.approx((radius**2 - 1) ** 0.5, rel=1e-14)
    (step,) = minimize_in_ball(g, H, 0.5)  # no room for it
    torch.testing.assert_close(step, torch.tensor([0.0, -0.5]).double(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("tiny", [1e-5, 1e-10, 1e-17, 1e-40, 1e-200])
def test_nearly_hard_cases_keep_all_digits(tiny):
    """The multiplier is so close to the pole that λ − |w| is lost in λ; the distance itself is not."""
    w, a = torch.tensor([-1.0, 1.0]).double(), torch.tensor([tiny, 2.0], dtype=torch.float64)
    y, multiplier = minimize_diagonal(w, a, torch.tensor(2.0).double())
    expected = torch.tensor([-(3**0.5), -1.0], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=2 * tiny + 1e-14, atol=0)
    assert float(multiplier) == pytest.approx(1.0, rel=tiny)
    # and where the rest of the step ends exactly on the sphere: μ³ ≈ tiny²
    y, _ = minimize_diagonal(w, a, torch.tensor(1.0).double())
    assert float(y.norm()) == pytest.approx(1.0, rel=1e-14)
    if tiny > 1e-15:  # below, ‖y‖ does not know
        assert float(y[0]) == pytest.approx(-(tiny ** (1 / 3)), rel=tiny ** (1 / 3))


def test_shortest_of_many_minima_inside():
    """A singular H leaves directions open in which nothing changes: no part of the radius is spent on them."""
    rng = generator(3)
    V = normal(40, 6, 2, rng=rng)
    H = V @ V.mT
    g = (H @ normal(40, 6, 1, rng=rng))[..., 0]
    step = minimize_in_ball(g, H, 1e3)
    torch.testing.assert_close(
        step, -(torch.linalg.pinv(H, hermitian=True) @ g[..., None])[..., 0], rtol=1e-6, atol=1e-8
    )
    assert torch.equal(minimize_in_ball(0 * g, 0 * H, 1.0), 0 * g)
    assert torch.equal(minimize_in_ball(0 * g, H, 1.0), 0 * g)


# --- other ways to the same answer ------------------------------------------------------------------------------------


def test_against_all_angles_in_the_plane():
    names, g, H = problems(2, batch=2, seed=4, without=["wide", "large"])
    step = minimize_in_ball(g, H, 1.3)
    assert float(step.norm(dim=1).max()) <= 1.3 * (1 + 1e-14)
    found = objective(g, H, step)
    for b, name in enumerate(names):
        slope, matrix = g[b].numpy(), H[b].numpy()

        def value(angle, slope=slope, matrix=matrix):
            v = 1.3 * np.array([np.cos(angle), np.sin(angle)])
            return slope @ v + np.einsum("i...,ij,j...", v, matrix, v) / 2

        angles = np.linspace(0, 2 * np.pi, 721)
        start = angles[np.argmin(value(angles))]
        options = {"bounds": (start - 0.01, start + 0.01), "method": "bounded", "options": {"xatol": 1e-12}}
        lowest = min(minimize_scalar(value, **options).fun, 0.0)
        if np.linalg.eigvalsh(matrix)[0] > 1e-9:
            newton = -np.linalg.solve(matrix, slope)
            if np.linalg.norm(newton) <= 1.3:
                lowest = min(lowest, slope @ newton / 2)
        assert float(found[b]) <= lowest + 1e-9 * abs(lowest) + 1e-14, name


def test_against_the_semidefinite_program_of_the_paper():
    cp = pytest.importorskip("cvxpy")
    rng = generator(5)
    for d in (2, 5, 8):
        Q = torch.linalg.qr(normal(1, d, d, rng=rng)).Q
        for kind, w in spectra(1, d, rng).items():
            if kind == "wide":
                continue
            c = gradients(w, rng)["hard" if d == 5 else "random"]
            g, H = (Q @ c[..., None])[..., 0], (Q * w[:, None]) @ Q.mT
            H = (H + H.mT) / 2
            X, gamma = cp.Variable((d, d), symmetric=True), cp.Variable((d, 1))
            inside = cp.bmat([[X, gamma], [gamma.T, np.ones((1, 1))]]) >> 0
            problem = cp.Problem(
                cp.Minimize(cp.trace(H[0].numpy() / 2 @ X) + g[0].numpy() @ gamma[:, 0]),
                [cp.trace(X) <= 0.7**2, inside],
            )
            relaxed = problem.solve(solver="CLARABEL")
            found = float(objective(g, H, minimize_in_ball(g, H, 0.7)))
            assert found == pytest.approx(relaxed, rel=1e-6, abs=1e-7), kind


def dense_problem(d=300, batch=5, seed=6, decay=40.0):
    rng = generator(seed)
    Q = torch.linalg.qr(normal(batch, d, d, rng=rng)).Q
    w = normal(batch, d, rng=rng) * torch.exp(-torch.arange(d) / decay)
    H = (Q * w[:, None]) @ Q.mT
    return normal(batch, d, rng=rng), (H + H.mT) / 2, w, Q


@pytest.mark.parametrize("radius", [0.01, 1.0, 50.0])
def test_large_dense_problems_need_no_eigendecomposition(radius):
    g, H, _, _ = dense_problem()
    _, proven = certified.minimize_certified(g, H, torch.full((5,), radius).double())
    assert proven.all()
    step = minimize_in_ball(g, H, radius)
    torch.testing.assert_close(step, spectrum_of(g, H).minimize(radius), rtol=1e-9, atol=1e-10 * radius)
    assert float(kkt_residual(g, H, radius, step).max()) <= TIGHT


def test_a_flat_spectrum_is_proven_by_its_factor():
    """A space of a few vectors holds little of it, so that the norms prove nothing."""
    rng = generator(17)
    A = normal(3, 200, 200, rng=rng)
    g, H = normal(3, 200, rng=rng), (A + A.mT) / 40
    step = minimize_in_ball(g, H, 0.5)
    _, proven = certified.minimize_certified(g, H, torch.full((3,), 0.5).double())
    assert proven.all()
    assert_solved(["flat"] * 3, g, H, 0.5, step)


@pytest.mark.parametrize(("of_g", "of_h", "radius"), [(1e150, 1.0, 1.0), (1.0, 1e150, 1e-100), (1e-150, 1e-150, 1e100)])
def test_large_problems_of_any_size(of_g, of_h, radius):
    g, H, _, _ = dense_problem(d=140, batch=3)
    step = minimize_in_ball(of_g * g, of_h * H, radius)
    assert_solved(["large"] * 3, of_g * g, of_h * H, radius, step)


def test_what_is_not_proven_is_left_to_the_eigendecomposition():
    g, H, w, Q = dense_problem()
    hard = (Q @ (Q.mT @ g[..., None]).masked_fill((w == w.amin(1, keepdim=True))[..., None], 0.0))[..., 0]
    for slope in (torch.zeros_like(g), 1e-3 * hard):
        _, proven = certified.minimize_certified(slope, H, torch.full((5,), 2.0).double())
        assert not proven.any()
        assert float(kkt_residual(slope, H, 2.0, minimize_in_ball(slope, H, 2.0)).max()) <= TIGHT
    mixed = torch.stack([g[0], 0 * g[0], g[2], hard[3] / 1e3, g[4]])
    assert float(kkt_residual(mixed, H, 2.0, minimize_in_ball(mixed, H, 2.0)).max()) <= TIGHT


def test_a_krylov_space_that_misses_a_direction_is_found_out(monkeypatch):
    """Were its random vector without the lowest direction, Lanczos would never see it: the Cholesky factor does."""
    d = 200
    w = torch.linspace(1, 2, d).double()
    w[0] = -3.0
    g = torch.ones(1, d).double()
    g[0, 0] = 0.0
    H = torch.diag(w)[None]
    orthogonal_part = lanczos.orthogonal_part

    def blind(basis, vector):
        blinded = vector if bool(vector.any()) else torch.linspace(-1, 1, d).double()[None]
        return orthogonal_part(basis, blinded.index_fill(1, torch.tensor(0), 0.0))

    monkeypatch.setattr(lanczos, "orthogonal_part", blind)
    radius = torch.full((1,), 100.0).double()
    _, proven = certified.minimize_certified(g, H, radius)
    assert not proven.any()
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: type("Factor", (), {"info": torch.zeros(len(m))}))
    wrong, proven = certified.minimize_certified(g, H, radius)
    assert proven.all()  # without the factor it would have passed
    monkeypatch.undo()
    step = minimize_in_ball(g, H, 100.0)
    assert_solved(["blind"], g, H, 100.0, step)
    assert float(objective(g, H, step)) < float(objective(g, H, wrong)) - 1000


# --- Hessians that are not a matrix -----------------------------------------------------------------------------------


class Counted:
    """Products with a matrix, counted."""

    def __init__(self, H):
        self.H, self.products = H, 0

    def __call__(self, rows):
        self.products += rows.shape[1]
        return rows @ self.H


@pytest.fixture
def matrix_free(monkeypatch):
    for module in ("hessian_forms", "minimize_in_ball"):
        monkeypatch.setattr(f"smoothhess.result.{module}.DENSE_PAYS", 4)


@pytest.mark.parametrize("d", [5, 30, 81])
def test_lanczos_solves_every_problem(matrix_free, d):
    names, g, H = problems(d, batch=1, seed=7, without=["diagonal"])
    for radius in (0.3, 30.0):
        step = minimize_in_ball(g, Counted(H), radius)
        assert_solved(names, g, H, radius, step, 1e-8)
        exact = objective(g, H, spectrum_of(g, H).minimize(radius))
        torch.testing.assert_close(objective(g, H, step), exact, rtol=1e-9, atol=1e-12)


def test_lanczos_stops_early_and_restarts(matrix_free, monkeypatch):
    g, H, _, _ = dense_problem(d=400, batch=2)
    product = Counted(H)
    step = minimize_in_ball(g, product, 1.0)
    assert product.products < 80
    assert float(kkt_residual(g, H, 1.0, step).max()) <= 1e-11
    monkeypatch.setattr(lanczos, "MOST_VECTORS", 40)
    monkeypatch.setattr(lanczos, "LOWEST", 8)
    monkeypatch.setattr(lanczos, "LEAST", 20)
    slow = torch.linspace(-1, 1, 400).double().expand(2, -1)
    c = 1e-3 * normal(2, 400, rng=generator(8))
    for slope in (c, c.masked_fill(torch.arange(400) == 0, 0.0)):
        product = Counted(torch.diag_embed(slow))
        step = minimize_in_ball(slope, product, 1.0)
        assert 60 < product.products < 1500  # more than a space has room for
        assert float(kkt_residual(slope, torch.diag_embed(slow), 1.0, step).max()) <= 1e-8
    monkeypatch.setattr(lanczos, "MOST_PRODUCTS", 10)
    with pytest.warns(UserWarning, match="close to the minimum but not converged"):
        minimize_in_ball(c, Counted(torch.diag_embed(slow)), 1.0)


def test_widened_spaces_are_used_again(matrix_free):
    g, H, _, _ = dense_problem(d=200, batch=2)
    product = Counted(H)
    radii = [0.1, 1.0, 10.0]
    wide = spectrum_of(g, product).widened(radii)
    made = product.products
    paths = [wide.minimize(radii), torch.stack([wide.minimize(r) for r in radii])]
    assert product.products == made
    for path in paths:
        torch.testing.assert_close(path, spectrum_of(g, H).minimize(radii), rtol=1e-8, atol=1e-9)
    (-wide).minimize(1.0)
    assert float(kkt_residual(-g, -H, 1.0, (-wide).minimize(1.0)).max()) <= 1e-8


def net(x):
    x = x.flatten(1)
    k = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
    waves = torch.stack([(0.2 * j + x @ torch.sin(j * k) / x.shape[1] ** 0.5).cos() for j in range(1, 8)])
    return waves.sum(0) + (x @ torch.cos(0.5 * k)) / x.shape[1] ** 0.5


D = 300
DIRECTIONS = torch.eye(D).double()[:3] + 0.1


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize(
    "gaussian",
    [
        Isotropic(0.3),
        Eigenbasis(DIRECTIONS, [0.5, 0.4, 0.3], rest=0.1),
        Eigenbasis(DIRECTIONS, [0.5, 0.4, 0.3], rest=0.0),
        Diagonal(torch.linspace(0.1, 0.5, D)),
        Diagonal(torch.linspace(0.0, 0.5, D)),
        Dense(torch.diag(torch.linspace(0.1, 0.2, D)) + 0.01),
        segments.noise(torch.arange(D) % 7, 0.3),
    ],
    ids=lambda g: f"{type(g).__name__} {getattr(g, 'rest', '')}",
)
def test_results_are_solved_in_their_own_form(gaussian, shrink, monkeypatch):
    """Factored where that is exact, matrix-free where it is not; both as good as the dense matrix."""
    for module in ("hessian_forms", "minimize_in_ball"):
        monkeypatch.setattr(f"smoothhess.result.{module}.DENSE_PAYS", 10)
    x = normal(3, 6, D // 6, rng=generator(9))
    result = SmoothHess(net).attribute(x, gaussian=gaussian, n_calls=60, shrink=shrink, control=None)
    g = result.gradient
    spectrum = spectrum_of(g, result)
    # an incomplete block has a multiple of Σ⁻¹ as well, except under correlated noise
    free = isinstance(gaussian, Diagonal) or (shrink and isinstance(gaussian, Dense))
    assert (spectrum.space is not None) == free
    assert free or spectrum.values.shape[1] <= 66
    H = result.hessian
    result = replace(result, estimate=result.estimate.released())
    radii = torch.tensor([0.1, 2.0, 20.0]).double()
    step = minimize_in_ball(g, result, radii)
    assert result.estimate.cached_matrix.value is None  # it was never made
    assert float(kkt_residual(g, H, radii, step).max()) <= 1e-10
    assert float(kkt_residual(g, result, radii, step).max()) <= 1e-10
    exact = objective(g.flatten(1), H, minimize_in_ball(g, H, radii))
    torch.testing.assert_close(objective(g.flatten(1), H, step), exact, rtol=1e-10, atol=0)


def test_results_in_many_chunks(monkeypatch):
    x = normal(5, D, rng=generator(10))
    result = SmoothHess(net).attribute(x, sigma=0.3, n_calls=60, control=None)
    whole = minimize_in_ball(result.gradient, result, 1.0)
    monkeypatch.setattr("smoothhess.result.minimize_in_ball.TRUST_REGION_MATRICES", ByteLimit(2 * 32 * D * D))
    torch.testing.assert_close(minimize_in_ball(result.gradient, result, 1.0), whole, rtol=1e-9, atol=1e-12)
    H = result.hessian.clone()
    torch.testing.assert_close(minimize_in_ball(result.gradient, H, 1.0), whole, rtol=1e-8, atol=1e-10)
    H[3, 0, 1] += H.abs().max()
    with pytest.raises(ValueError, match="that of example 3 differs"):
        minimize_in_ball(result.gradient, H, 1.0)


def test_exact_results_and_operators():
    rng = generator(11)
    x, A = normal(2, 4, rng=rng), normal(2, 4, 4, rng=rng)
    H, g = A + A.mT, normal(2, 4, rng=rng)
    expected = minimize_in_ball(g, H, 0.8)
    for result in (
        Exact.make(x, x.sum(1), g, H),
        Exact.make(x, x.sum(1), g, operator=lambda rows: rows @ H),
        Exact.make(x, x.sum(1), g, H).taylor().product,
    ):
        torch.testing.assert_close(minimize_in_ball(g, result, 0.8), expected, rtol=1e-12, atol=1e-14)
    flat = minimize_in_ball(g, Exact.make(x, x.sum(1), g), 0.8)
    torch.testing.assert_close(flat, -0.8 * g / g.norm(dim=1, keepdim=True))


def test_group_sums_are_quadratics_too():
    x = normal(2, 12, rng=generator(12))
    result = SmoothHess(net).attribute(x, sigma=0.3, n_calls=100).groups(torch.arange(12) // 3)
    step = minimize_in_ball(result.gradient, result, 1.0)
    assert step.shape == (2, 4)
    assert float(kkt_residual(result.gradient, result.hessian, 1.0, step).max()) <= TIGHT


# --- radii, batches, dtypes -------------------------------------------------------------------------------------------


def test_one_eigendecomposition_serves_all_radii():
    g, H, _, _ = dense_problem(d=20, batch=4)
    spectrum = spectrum_of(g, H)
    radii = [0.1, 1.0, 10.0]
    path = spectrum.minimize(radii)
    assert path.shape == (3, 4, 20)
    for i, radius in enumerate(radii):
        torch.testing.assert_close(path[i], spectrum.minimize(radius), rtol=1e-13, atol=0)
        torch.testing.assert_close(path[i], minimize_in_ball(g, H, radius), rtol=1e-13, atol=0)
    own = torch.tensor([0.1, 0.5, 2.0, 9.0]).double()
    each = spectrum.minimize(own)
    for b in range(4):
        torch.testing.assert_close(each[b], spectrum.minimize(float(own[b]))[b], rtol=1e-13, atol=0)
    table = torch.stack([own, 2 * own])
    torch.testing.assert_close(spectrum.minimize(table)[1], spectrum.minimize(2 * own), rtol=1e-13, atol=0)
    values = objective(g, H, path)
    assert (values[1:] < values[:-1]).all()  # a larger ball reaches lower


def test_the_other_sign_gives_the_maximum():
    g, H, _, _ = dense_problem(d=20, batch=4)
    spectrum = spectrum_of(g, H)
    torch.testing.assert_close((-spectrum).minimize(1.0), minimize_in_ball(-g, -H, 1.0), rtol=1e-12, atol=1e-14)
    back = -spectrum
    torch.testing.assert_close((-back).minimize(1.0), spectrum.minimize(1.0), rtol=1e-12, atol=1e-14)
    cut = minimize_in_ball(-g, -H, 1.0, keep=0.5)
    torch.testing.assert_close((-spectrum.cut(0.5)).minimize(1.0), cut, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("d", [6, 200])
def test_examples_do_not_see_each_other(d):
    g, H, _, _ = dense_problem(d=d, batch=4)
    g[1] = 0
    radii = torch.tensor([0.1, 1.0, 5.0, 100.0]).double()
    whole = minimize_in_ball(g, H, radii)
    for b in range(4):
        alone = minimize_in_ball(g[b : b + 1], H[b : b + 1], float(radii[b]))
        torch.testing.assert_close(alone[0], whole[b], rtol=1e-9, atol=1e-12 * float(radii[b]))


@pytest.mark.parametrize("d", [5, 150])
def test_single_precision_is_solved_in_double(d):
    g, H, _, _ = dense_problem(d=d, batch=3)
    g, H = g.float(), H.float()
    step = minimize_in_ball(g, H, 0.7)
    assert step.dtype == torch.float32
    torch.testing.assert_close(step, minimize_in_ball(g.double(), H.double(), 0.7).float(), rtol=1e-5, atol=1e-7)
    assert float(kkt_residual(g, H, 0.7, step).max()) <= 1e-6
    half = minimize_in_ball(g.bfloat16(), H.bfloat16(), 0.7)
    assert half.dtype == torch.bfloat16


def test_inputs_may_be_images_and_stay_as_they_are():
    g, H, _, _ = dense_problem(d=12, batch=2)
    images, kept, matrix = g.reshape(2, 3, 4).requires_grad_(), g.clone(), H.clone()
    step = minimize_in_ball(images, H.mT, 0.5)
    assert step.shape == (2, 12)
    assert not step.requires_grad
    torch.testing.assert_close(step, minimize_in_ball(g, H, 0.5))
    torch.testing.assert_close(kkt_residual(images, H, 0.5, step.reshape(2, 3, 4)), kkt_residual(g, H, 0.5, step))
    assert torch.equal(g, kept)
    assert torch.equal(H, matrix)


def test_the_global_generator_does_not_move():
    before = torch.random.get_rng_state()
    g, H, _, _ = dense_problem(d=150, batch=2)
    minimize_in_ball(g, H, 0.5)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_what_the_cpu_gives():
    for d in (3, 30):
        names, g, H = problems(d, batch=5)
        for radius in (0.3, 1e6):
            step = minimize_in_ball(g.cuda(), H.cuda(), radius)
            assert step.is_cuda
            assert_solved(names, g, H, radius, step.cpu())
            assert_solved(names, g.cuda(), H.cuda(), radius, step)
    g, H, _, _ = dense_problem(d=1100, batch=2)
    for hessian in (H.cuda(), lambda rows: rows @ H.cuda()):
        assert_solved(["large"] * 2, g, H, 1.0, minimize_in_ball(g.cuda(), hessian, 1.0).cpu(), 1e-10)
    x = normal(3, D, rng=generator(18)).cuda()
    result = SmoothHess(net).attribute(x, sigma=0.3, n_calls=60, control=None)
    step = minimize_in_ball(result.gradient, result, 1.0)
    assert_solved(["result"] * 3, result.gradient.cpu(), result.hessian.cpu(), 1.0, step.cpu(), 1e-10)


# --- the paper's reduction --------------------------------------------------------------------------------------------


def test_keep_is_the_fewest_eigenvectors_that_hold_the_share():
    w = torch.tensor([[4.0, -3.0, 2.0, -1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]).double()
    for keep, expected in [(0.3, [1, 1, 1]), (0.4, [1, 1, 1]), (0.41, [2, 1, 1]), (0.9, [3, 1, 1]), (1.0, [4, 1, 1])]:
        assert count_kept(w, keep).tolist() == expected, keep


@pytest.mark.parametrize("keep", [0.3, 0.8, 0.98, 1.0])
def test_keep_drops_the_rest_of_the_gradient(keep):
    g, H, _, _ = dense_problem(d=25, batch=6)
    g[1] = 0
    step = minimize_in_ball(g, H, 0.9, keep=keep)
    values, vectors = torch.linalg.eigh(H)
    for b in range(6):
        order = values[b].abs().argsort(descending=True)
        held = values[b].abs()[order].cumsum(0)
        k = int((held < keep * held[-1]).sum()) + 1
        V, w = vectors[b][:, order[:k]], values[b][order[:k]]
        small = minimize_in_ball((V.mT @ g[b])[None], torch.diag(w)[None], 0.9)[0]
        expected = objective((V.mT @ g[b])[None], torch.diag(w)[None], small[None])
        torch.testing.assert_close(
            objective(g[b : b + 1], H[b : b + 1], step[b : b + 1]), expected, rtol=1e-10, atol=1e-13
        )
        torch.testing.assert_close(V @ (V.mT @ step[b]), step[b], rtol=1e-10, atol=1e-12)  # nothing outside
    best = objective(g, H, minimize_in_ball(g, H, 0.9))
    assert (objective(g, H, step) >= best - 1e-12).all()


def test_keep_with_one_eigenvector_and_no_gradient():
    """Examples that keep fewer than others get no step in what the others keep."""
    H = torch.stack([torch.diag(torch.tensor([-2.0, 0, 0])), torch.diag(torch.tensor([-1.0, -1, -1]))]).double()
    step = minimize_in_ball(torch.zeros(2, 3).double(), H, 0.5, keep=0.9)
    torch.testing.assert_close(step[0].abs(), torch.tensor([0.5, 0, 0]).double())
    torch.testing.assert_close(step.norm(dim=1), torch.tensor([0.5, 0.5]).double())


def test_keep_of_results_and_callables():
    x = normal(2, 8, rng=generator(13))
    result = SmoothHess(net).attribute(x, sigma=0.3, n_calls=100)
    expected = minimize_in_ball(result.gradient, result.hessian, 0.5, keep=0.9)
    for hessian in (result, result.taylor().product):
        torch.testing.assert_close(minimize_in_ball(result.gradient, hessian, 0.5, keep=0.9), expected)


# --- what the residual sees -------------------------------------------------------------------------------------------


def test_residual_by_hand():
    """The four numbers of its definition, one example at a time, in numpy."""
    rng = generator(14)
    g, H = normal(200, 4, rng=rng), normal(200, 4, 4, rng=rng)
    H = H + H.mT
    steps = 0.9 * minimize_in_ball(g, H, 1.0) + 0.2 * normal(200, 4, rng=rng) * torch.rand(200, 1, generator=rng)
    found = kkt_residual(g, H, 1.0, steps)
    for b in range(200):
        slope, matrix, v = g[b].numpy(), H[b].numpy(), steps[b].numpy()
        w, length, size = np.linalg.eigvalsh(matrix), np.linalg.norm(v), np.linalg.norm(matrix, 2)
        options = []
        for lam in (0.0, max(0.0, -v @ (matrix @ v + slope) / (v @ v))):
            stationarity = np.linalg.norm(matrix @ v + lam * v + slope)
            stationarity /= np.linalg.norm(slope) + (size + lam) * length
            complementarity = lam * max(1 - length, 0) / (size + np.linalg.norm(slope))
            curvature = max(-w[0] - lam, 0) / (size + lam)
            options.append(max(stationarity, complementarity, curvature))
        assert float(found[b]) == pytest.approx(max(min(options), length - 1), rel=1e-9)


def test_residual_sees_what_is_wrong():
    g, H = torch.tensor([[0.3, 0.1]]).double(), torch.diag(torch.tensor([-2.0, 1.0])).double()[None]
    step = minimize_in_ball(g, H, 1.0)
    wrong = {
        "nothing done": 0 * step,
        "the other side, a local minimum or a saddle": -step,
        "too far": 1.01 * step,
        "not far enough": 0.99 * step,
        "against the gradient": -g / g.norm(),
        "slightly turned": torch.nn.functional.normalize(step + torch.tensor([[0.0, 1e-3]]).double()),
    }
    assert float(kkt_residual(g, H, 1.0, step)) <= 1e-15
    for name, other in wrong.items():
        assert float(kkt_residual(g, H, 1.0, other)) > 1e-5, name
    stationary = -(torch.linalg.solve(H, g[..., None]))[..., 0]  # a saddle inside
    assert float(kkt_residual(g, H, 1.0, stationary)) > 0.5
    # (H + λI)δ = −g on the sphere with λ > 0 too small for H + λI ⪰ 0: the lowest point on the wrong side
    far = lambda lam: float((g[0] / (torch.tensor([-2.0, 1.0]) + lam)).norm()) - 1
    lam = brentq(far, 1.0, 1.9, xtol=1e-14)
    local = -g / (torch.tensor([-2.0, 1.0]).double() + lam)
    assert float(local.norm()) == pytest.approx(1.0)
    assert float(kkt_residual(g, H, 1.0, local)) > 0.05


@pytest.mark.parametrize("scale", [1e-120, 1e-3, 1e120])
def test_residual_has_no_scale(scale):
    rng = generator(15)
    g, H, v = normal(30, 4, rng=rng), normal(30, 4, 4, rng=rng), normal(30, 4, rng=rng) / 3
    H = H + H.mT
    expected = kkt_residual(g, H, 1.0, v)
    for changed in (
        kkt_residual(scale * g, scale * H, 1.0, v),
        kkt_residual(scale * g, H, scale, scale * v),
        kkt_residual(g, H / scale, scale, scale * v),
    ):
        torch.testing.assert_close(changed, expected, rtol=1e-9, atol=1e-14)


# --- what is refused --------------------------------------------------------------------------------------------------

G, EYE = torch.ones(2, 3), torch.eye(3).expand(2, 3, 3)
LOPSIDED = EYE + torch.tensor([[0.0, 1e-2, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("gradient", "hessian", "radius", "match"),
    [
        (G, EYE, 0.0, "radius must be positive"),
        (G, EYE, -1.0, "radius must be positive"),
        (G, EYE, float("nan"), "radius must be positive and finite"),
        (G, EYE, float("inf"), "radius must be positive and finite"),
        (G, EYE, torch.tensor([1.0, 0.0]), "radius must be positive"),
        (G, EYE, torch.ones(3), "one per example \\(2,\\)"),
        (G, EYE, torch.ones(3, 1), "spectrum_of"),
        (G, EYE, [1.0, 2.0], "spectrum_of"),
        (G, EYE, "1", "radius must be a number"),
        (G, EYE, None, "radius must be a number"),
        (G * float("nan"), EYE, 1.0, "gradient must be finite"),
        (G, EYE * float("inf"), 1.0, "hessian must be finite"),
        (G, EYE.clone().index_fill(1, torch.tensor(0), float("nan")), 1.0, "hessian must be finite"),
        (G, LOPSIDED, 1.0, "hessian must be symmetric, that of example 0 .* 0.01 "),
        (G, EYE[:1], 1.0, "hessian must be \\(B, d, d\\) = \\(2, 3, 3\\)"),
        (G, torch.eye(4).expand(2, 4, 4), 1.0, "hessian must be"),
        (G, torch.eye(3), 1.0, "hessian must be"),
        (G[0], torch.eye(3), 1.0, "examples in dimension 0"),
        (torch.ones(2, 0), torch.ones(2, 0, 0), 1.0, "gradient must be"),
        (G.long(), EYE, 1.0, "floating point"),
        (G, EYE.long(), 1.0, "floating point"),
        (G, None, 1.0, "hessian must be a tensor"),
        (G, lambda rows: rows[..., :1], 1.0, "must map rows"),
        (G, lambda rows: rows * float("nan"), 1.0, "must be finite"),
        (G, lambda rows: rows @ LOPSIDED, 1.0, "hessian must be symmetric"),
    ],
)
def test_bad_input(gradient, hessian, radius, match):
    with pytest.raises((ValueError, TypeError), match=match):
        minimize_in_ball(gradient, hessian, radius)


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.1, float("nan"), True, "all"])
def test_bad_keep(keep):
    with pytest.raises(ValueError, match="keep must be the share"):
        minimize_in_ball(G, EYE, 1.0, keep=keep)


def test_rounding_is_no_asymmetry():
    rng = generator(16)
    A = torch.randn(2, 50, 50, generator=rng)
    H = A @ A.mT - A.mT @ A  # symmetric but for the order of sums
    H = H + 1e-6 * A * H.abs().max()
    step = minimize_in_ball(torch.randn(2, 50, generator=rng), H, 1.0)
    assert torch.isfinite(step).all()


def test_more_that_is_refused():
    with pytest.raises(ValueError, match="step must have the gradient's shape"):
        kkt_residual(G, EYE, 1.0, torch.ones(2, 2))
    with pytest.raises(ValueError, match="one per example"):
        kkt_residual(G, EYE, torch.ones(4, 1), G)
    with pytest.raises(ValueError, match="an attribution, not a Hessian"):
        minimize_in_ball(G, Attribution.make(G, G.sum(1), G, EYE, method="a game's index"), 1.0)
    x = torch.zeros(1, 1500)
    result = SmoothHess(net).attribute(x, sigma=0.3, n_calls=20, control=None)
    with pytest.raises(ValueError, match="needs all 1500 eigenvalues"):
        spectrum_of(result.gradient, result).cut(0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        minimize_in_ball(result.gradient, result, 1.0)
