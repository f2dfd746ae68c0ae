"""The formulas of docs/report.md that are marked †, by quadrature, exact moments and simulation; and its quotations."""

import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, stats

DOCS = Path(__file__).parents[2] / "docs"
F64 = torch.float64

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="an installed package has no docs")


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


def mean(function, density, low=0.0, high=60.0):
    return integrate.quad(lambda x: function(x) * density(x), low, high, limit=200)[0]


def directions(count, m, k, rng):
    """Uniformly random orthonormal rows, (count, m, k)."""
    q, r = torch.linalg.qr(torch.randn(count, k, m, generator=rng, dtype=F64))
    return (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT


def symmetric(k, rng):
    matrix = torch.randn(k, k, generator=rng, dtype=F64)
    return matrix + matrix.mT


@pytest.mark.parametrize("function", [np.sin, np.exp, np.square])
@pytest.mark.parametrize("k", [1, 3, 20])
def test_weights_of_both_radial_laws(k, function):
    few, many = (lambda r, df=df: stats.chi.pdf(r, df) for df in (k, k + 2))
    truth = mean(function, few)
    assert mean(lambda r: k / r**2 * function(r), many) == pytest.approx(truth)
    mixed = mean(lambda r: 2 / (1 + r**2 / k) * function(r), lambda r: (few(r) + many(r)) / 2)
    assert mixed == pytest.approx(truth)


def nonlinear(z, jacobian, bias, u):
    """The gradient of Σ u relu(Jz + b)."""
    return ((z @ jacobian.mT + bias > 0).double() * u) @ jacobian


def test_corrected_incomplete_blocks_are_unbiased(rng):
    k, m, blocks = 5, 3, 100_000
    jacobian, bias, u = (torch.randn(6, *shape, generator=rng, dtype=F64) for shape in ((k,), (), ()))
    tau = jacobian.norm(dim=1)
    density = torch.exp(-((bias / tau) ** 2) / 2) / math.sqrt(2 * math.pi)
    truth = jacobian.mT @ ((u * density / tau)[:, None] * jacobian)  # exact for one hidden layer
    q = directions(blocks, m, k, rng)
    radius = torch.from_numpy(np.sqrt(np.random.default_rng(0).chisquare(k + 2, (blocks, m, 1))))
    slope = [nonlinear(sign * radius * q, jacobian, bias, u) for sign in (1, -1)]
    field = (slope[0] - slope[1]) / 2 / radius  # D
    alpha = (q * field).sum(-1)
    middle = alpha.mean(1, keepdim=True)
    others = (m * middle - alpha) / (m - 1)

    def z_scores(subtracted):
        found = k / m * q.mT @ (field - subtracted[..., None] * q) + middle[..., None] * torch.eye(k, dtype=F64)
        found = (found + found.mT) / 2
        return (found.mean(0) - truth).abs() / found.std(0) * math.sqrt(blocks)

    assert z_scores(((k - 1) * others + alpha) / k).max() < 5
    assert z_scores(others).max() > 10  # the mean of the others is not enough


def test_variance_of_an_incomplete_block(rng):
    k, m, blocks = 6, 4, 50_000
    w = symmetric(k, rng)
    u, v = torch.randn(2, k, generator=rng, dtype=F64)
    q = directions(blocks, m, k, rng)
    error = q.mT @ q - m / k * torch.eye(k, dtype=F64)
    found = (k / (2 * m) * (error @ w + w @ error) @ v @ u).square()
    c = m * (k - m) / (k * (k - 1) * (k + 2))
    wu, wv = w @ u, w @ v
    lengths = (u @ u * (wv @ wv) + v @ v * (wu @ wu)) / 2 + (u @ v) * (wu @ wv)
    expected = k**2 * c / (2 * m**2) * (lengths + (1 - 4 / k) * (u @ wv) ** 2 + (u @ wu) * (v @ wv))
    assert abs(found.mean() - expected) < 5 * found.std() / math.sqrt(blocks)


def test_the_one_flip_hessian_is_that_of_the_smoothed_layer(rng):
    jacobian = torch.randn(6, 3, generator=rng, dtype=F64)
    bias, u = torch.randn(2, 6, generator=rng, dtype=F64)
    factor = torch.randn(3, 3, generator=rng, dtype=F64)
    tau = ((jacobian @ factor) ** 2).sum(1).sqrt()

    def density(z):
        return torch.exp(-((z / tau) ** 2) / 2) / math.sqrt(2 * math.pi)

    def smoothed(x):
        z = jacobian @ x + bias
        return (u * (z * torch.special.ndtr(z / tau) + tau * density(z))).sum()

    x = torch.randn(3, generator=rng, dtype=F64)
    hessian = torch.autograd.functional.hessian(smoothed, x)
    closed = jacobian.mT @ ((u * density(jacobian @ x + bias) / tau)[:, None] * jacobian)
    torch.testing.assert_close(hessian, closed)


def test_moments_of_both_halves(rng):
    """Exact: every second moment of E is δ_ik K_jl/n."""
    k, n = 5, 7
    root = torch.randn(k, k, generator=rng, dtype=F64)
    noise = root @ root.mT
    moment = torch.einsum("ik,jl->ijkl", torch.eye(k, dtype=F64), noise) / n

    def of_half(sign):
        turned = moment + sign * (moment.permute(1, 0, 2, 3) + moment.permute(0, 1, 3, 2))
        return (turned + moment.permute(1, 0, 3, 2)) / 4

    skew, half = of_half(-1), of_half(1)
    expected = ((k - 2) * noise + noise.trace() * torch.eye(k, dtype=F64)) / (4 * n)
    torch.testing.assert_close(torch.einsum("ijkj->ik", skew), expected)
    assert float(torch.einsum("ijij->", skew)) == pytest.approx(float((k - 1) * noise.trace() / (2 * n)))
    assert float(torch.einsum("ijij->", half)) == pytest.approx(float((k + 1) * noise.trace() / (2 * n)))
    u, v = torch.randn(2, k, generator=rng, dtype=F64)
    variance = torch.einsum("i,j,k,l,ijkl->", u, v, u, v, half)
    forms = u @ u * (v @ noise @ v) + v @ v * (u @ noise @ u) + 2 * (u @ v) * (u @ noise @ v)
    assert float(variance) == pytest.approx(float(forms / (4 * n)))


@pytest.mark.parametrize("rate", [0.5, 1.0, 1.4])
def test_share_of_effective_rows_of_exponential_growth(rate):
    s = rate**2

    def energy(t):
        return math.cosh(2 * t) - 2 * math.cosh(t) + 1

    found, square = (
        mean(f, lambda t: stats.norm.pdf(t, scale=rate), -40, 40) for f in (energy, lambda t: energy(t) ** 2)
    )
    top = (math.exp(2 * s) - 2 * math.exp(s / 2) + 1) ** 2
    below = math.exp(8 * s) / 2 - 2 * math.exp(4.5 * s) + 4 * math.exp(2 * s) - 6 * math.exp(s / 2) + 7 / 2
    assert top / below == pytest.approx(found**2 / square)
    if rate == 1.4:
        assert top / below == pytest.approx(6.6e-4, rel=0.01)  # as the report says


@pytest.mark.parametrize("t", [0.5, 2.0, 3.5])
def test_moments_of_a_flip(t):
    p, density = stats.norm.sf(t), stats.norm.pdf
    along = mean(np.square, density, t, 40) / p
    assert along == pytest.approx(1 + t * density(t) / p)
    linear = 2 * mean(lambda x: x, density, t, 40)  # slope of sign(ξ) 1{|ξ| > t}, whose energy is 2p
    assert linear**2 / (2 * p) == pytest.approx(2 * density(t) ** 2 / p)


def test_the_bias_of_eigenvalues_is_removed_to_second_order(rng):
    """The mean over both signs and both orders of two noise matrices has no terms of odd order."""
    h, first, second = (symmetric(6, rng) for _ in range(3))
    share = 0.3, 0.7
    top = torch.linalg.eigvalsh(h)[-1]

    def errors(size):
        plain = corrected = 0.0
        for one, other in ((first, second), (second, first)):
            for sign in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                a, b = (h + size * s * n / w**0.5 for s, n, w in zip(sign, (one, other), share, strict=True))
                (of_a, v_a), (of_b, v_b) = ((e[-1], v[:, -1]) for e, v in map(torch.linalg.eigh, (a, b)))
                whole = torch.linalg.eigvalsh(share[0] * a + share[1] * b)[-1]
                bias = share[0] * share[1] / 2 * (of_a - v_b @ a @ v_b + of_b - v_a @ b @ v_a)
                plain += float(whole - top) / 8
                corrected += float(whole - bias - top) / 8
        return plain, corrected

    (plain, corrected), (smaller_plain, smaller_corrected) = errors(0.02), errors(0.01)
    assert plain / smaller_plain == pytest.approx(4, rel=0.05)  # second order
    assert corrected / smaller_corrected == pytest.approx(16, rel=0.2)  # fourth order
    assert abs(smaller_corrected) < 1e-4 * abs(smaller_plain)


# --- quotations ------------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])[−-]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|\.\d+)(?![\w]|\.\d)")


def numbers(text):
    """The numbers of a text, without spaces between thousands and zeros before the point."""
    text = re.sub(r"(?<=\d)[\u00a0\u202f ,](?=\d{3}\b)", "", text)
    return {n.lstrip("−-").removeprefix("0") or "0" for n in NUMBER.findall(text)}


def quotations():
    """The paragraphs, lists and tables of sections 4 to 8 that have numbers, with the pages that they link."""
    text = (DOCS / "report.md").read_text(encoding="utf-8")
    found = []
    for block in text[text.index("## 4.") : text.index("Not known, or not derived")].split("\n\n"):
        pages = {page.split("#")[0] for page in re.findall(r"\]\(([^):]+\.md[^)]*)\)", block)}
        said = re.sub(r"\]\([^)]*\)|`[^`]*`|\$[^$]*\$|\{eq\}|^#.*$|section \d", "", block, flags=re.MULTILINE)
        if numbers(said):
            found.append(pytest.param(said, pages, id=re.sub(r"\W+", " ", said).strip()[:40]))
    return found


@pytest.mark.parametrize(("said", "pages"), quotations() if DOCS.exists() else [])
def test_quoted_numbers_are_on_a_page_that_is_linked(said, pages):
    there = set().union(*(numbers((DOCS / page).read_text(encoding="utf-8")) for page in pages))
    assert not sorted(numbers(said) - there)


# --- the renderer of formulas ----------------------------------------------------------------------------------------


def test_short_fractions_and_subscripts_of_accented_letters():
    spec = importlib.util.spec_from_file_location("mathml", DOCS / "_sphinx" / "mathml.py")
    if spec is None or spec.loader is None or importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    half = re.sub(r"\s", "", module.mathml(r"\frac12 x", as_block=False))
    assert "<mfrac><mn>1</mn><mn>2</mn></mfrac><mi>x</mi>" in half
    assert "munder" not in module.mathml(r"\hat a_{-i} + \tilde{g}_1", as_block=False)
