"""Regions that few draws reach: the search finds them, and the estimate stays unbiased with right errors."""

import itertools
import math
import warnings

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess.draws.tail_strata import NEVER
from smoothhess.estimate.tail_variance import TailVariance

D = torch.float64
SIGMA, DIM = 0.5, 8
W = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1), dtype=D))[0]


def far_kink(margin, jump=50.0):
    """jump · relu(w·z − margin σ) + Σ aᵢ relu(wᵢ·z), its Hessian at 0, gradient and value."""
    a = torch.linspace(0.2, 0.6, DIM - 1, dtype=D)

    def f(z):
        return jump * torch.relu(z @ W[0] - margin * SIGMA) + torch.relu(z @ W[1:].T) @ a

    density = math.exp(-(margin**2) / 2) / math.sqrt(2 * math.pi)
    tail = math.erfc(margin / 2**0.5) / 2
    near = 1 / math.sqrt(2 * math.pi)
    hessian = jump * density / SIGMA * torch.outer(W[0], W[0]) + near / SIGMA * (W[1:].T * a) @ W[1:]
    gradient = jump * tail * W[0] + (a[:, None] * W[1:]).sum(0) / 2
    value = jump * SIGMA * (density - margin * tail) + float(a.sum()) * SIGMA * near
    return f, hessian, gradient, value


def black_box(f):
    def value_and_gradient(z):
        z = z.clone().requires_grad_()
        value = f(z)
        return value.detach(), torch.autograd.grad(value.sum(), z)[0]

    return sh.from_gradient(value_and_gradient, numpy=False)


def explained(f, n=1, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"n_calls": 800, **options}
        return sh.SmoothHess(f).attribute(torch.zeros(n, DIM, dtype=D), sigma=SIGMA, seed=[*range(n)], **options)


@pytest.mark.parametrize("margin", [2.5, 3.5])
@pytest.mark.parametrize("design", ["orthogonal", "antithetic"])
def test_a_far_kink_is_found_and_measured(margin, design):
    f, hessian, gradient, value = far_kink(margin, 2 / math.exp(-(margin**2) / 2))
    result = explained(black_box(f), 40, design=design).unshrunk()
    tails = result.statistics.tails
    assert tails is not None
    assert int(tails.strata.exist.sum()) >= 38
    found = tails.strata.exist
    cosine = (tails.strata.direction[found] @ W[0]).abs().amax(1)
    assert float((cosine > 0.98).double().mean()) > 0.9
    nearest = tails.strata.margin[found].amin(1)
    assert bool(((nearest > margin - 0.6) & (nearest <= margin + 0.01))[cosine > 0.98].all())
    z = ((result.hessian - hessian) / result.stderr())[found]
    assert float(z.square().mean().sqrt()) < 1.3
    own = torch.einsum("i,bij,j->b", W[0], result.hessian - hessian, W[0])[found]
    assert abs(float(own.mean())) < 4 * float(own.std()) / len(own) ** 0.5
    noise = result.noise.of_gradient().value.sqrt()
    assert float((((result.gradient - gradient) / noise)[found]).square().mean().sqrt()) < 1.4
    off = ((result.value - value) / result.noise.of_value().value.sqrt())[found]
    assert float(off.square().mean().sqrt()) < 1.5


def test_errors_are_much_smaller_than_without():
    f, hessian, _, _ = far_kink(3.0, 400.0)
    errors = {}
    for tails in ("auto", None):
        result = explained(black_box(f), 20, tails=tails, n_calls=600)
        errors[tails] = float((result.unshrunk().hessian - hessian).square().mean().sqrt())
    assert errors["auto"] < errors[None] / 5


def deep_pair():
    """A neuron behind two others: the frozen network does not see it coming."""
    w = W[:2]

    class Net(nn.Module):
        def forward(self, z):
            inner = torch.relu(z @ w.T + torch.tensor([0.2, -0.1], dtype=D)).sum(1)
            return torch.relu(z @ W[2:].T).sum(1) + 300 * torch.relu(inner - 2.2)

    return Net(), w


def test_kinks_behind_kinks():
    """Truth from a fine grid over the two inner directions."""
    net, w = deep_pair()
    z = torch.linspace(-8, 8, 2001, dtype=D)
    p = torch.exp(-z.square() / 2)
    p = p / p.sum()
    first, second = SIGMA * z[:, None] + 0.2, SIGMA * z[None] - 0.1
    on = (torch.relu(first) + torch.relu(second) > 2.2) * p[:, None] * p[None]
    slopes = torch.stack([on * (first > 0), on * (second > 0)])
    moments = torch.stack([(slopes * z[:, None]).sum((1, 2)), (slopes * z[None]).sum((1, 2))])
    inner = 300 * (moments + moments.T) / 2 / SIGMA
    result = explained(net, 40, n_calls=1000).unshrunk()
    own = torch.einsum("ai,bij,cj->bac", w, result.hessian, w)
    assert result.statistics.tails is not None
    error = (own - inner).flatten(1).norm(dim=1) / inner.norm()
    assert float(error.median()) < 0.1
    stderr = torch.stack(
        [result.noise.of_bilinear(w[0].expand(40, -1), w[i].expand(40, -1)).value.sqrt() for i in (0, 1)], 1
    )
    z = (own[:, 0] - inner[0]) / stderr
    assert float((z.abs() < 2).double().mean()) > 0.85


def test_more_merge_and_files_keep_the_strata(tmp_path):
    f, hessian, gradient, _ = far_kink(3.0, 400.0)
    explainer = sh.SmoothHess(f)
    zero = torch.zeros(1, DIM, dtype=D)
    first = explainer.attribute(zero, sigma=SIGMA, n_calls=600, control=None)
    longer = explainer.more(first, 600)
    assert int(longer.statistics.tails.n) > int(first.statistics.tails.n)
    torch.testing.assert_close(longer.statistics.tails.strata.margin, first.statistics.tails.strata.margin)
    other = explainer.attribute(zero, sigma=SIGMA, n_calls=600, control=None, seed=1)
    without = explainer.attribute(zero, sigma=SIGMA, n_calls=600, control=None, seed=2, tails=None)
    for result in (longer, first.merge(other), first.merge(without), without.merge(first)):
        own = float(W[0] @ (result.unshrunk().hessian[0] - hessian) @ W[0])
        sd = float(result.noise.of_bilinear(W[0][None], W[0][None]).value.sqrt())
        assert abs(own) < 4 * sd
        slope = (result.gradient[0] - gradient) / result.noise.of_gradient().value[0].sqrt()
        assert float(slope.abs().max()) < 4
    merged = first.merge(other)
    merged.save(tmp_path / "merged.safetensors")
    loaded = sh.Interactions.load(tmp_path / "merged.safetensors")
    torch.testing.assert_close(loaded.stderr(), merged.stderr(), rtol=0, atol=0)
    torch.testing.assert_close(loaded.gradient, merged.gradient, rtol=0, atol=0)
    assert float(merged.noise.of_frobenius) < float(first.noise.of_frobenius)


def test_batches_give_the_numbers_of_single_examples():
    f, _, _, _ = far_kink(3.0, 400.0)
    inputs = torch.stack([torch.zeros(DIM, dtype=D), 0.3 * W[0], -3 * W[0]])
    together = sh.SmoothHess(f).attribute(inputs, sigma=SIGMA, n_calls=600, control=None)
    alone = [sh.SmoothHess(f).attribute(x[None], sigma=SIGMA, n_calls=600, control=None) for x in inputs]
    for b, result in enumerate(alone):
        torch.testing.assert_close(together.hessian[b], result.hessian[0])
        torch.testing.assert_close(together.stderr()[b], result.stderr()[0])
        torch.testing.assert_close(together.n_passes[b], result.n_passes[0])
        torch.testing.assert_close(together[b].stderr(), result.stderr())


@pytest.mark.parametrize("shrink", [True, False])
def test_sums_over_groups(shrink):
    f, hessian, _, _ = far_kink(3.0, 400.0)
    mask = torch.arange(DIM) // 4
    result = explained(black_box(f), 30, feature_mask=mask, shrink=shrink)
    groups = torch.eye(2, dtype=D)[mask]
    true = groups.T @ hessian @ groups
    z = (result.unshrunk().hessian - true) / result.stderr()
    assert float(z.square().mean().sqrt()) < 1.4
    assert result.statistics.tails is not None or shrink


def test_entries_rows_and_forms_have_the_same_variance():
    f, _, _, _ = far_kink(3.0, 400.0)
    result = explained(black_box(f))
    noise, entries = result.noise, result.stderr()[0]
    torch.testing.assert_close(result.row(2).stderr[0], entries[2])
    torch.testing.assert_close(noise.of_diagonal().value[0].sqrt(), entries.diagonal())
    unit = torch.eye(DIM, dtype=D)
    form = noise.of_bilinear(unit[1:2], unit[3:4]).value.sqrt()
    torch.testing.assert_close(form[0], entries[1, 3])
    tails = TailVariance(result.estimate.features.tails)
    total = tails.of_form(lambda w: w[..., None], lambda w: w[:, :, None]).sum((1, 2))
    torch.testing.assert_close(total, tails.of_frobenius)


def network(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def test_usual_functions_have_no_strata():
    x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(0), dtype=D)
    wide = network(DIM, 128, 64, 1)
    smooth = nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    functions = {
        "network": lambda z: wide(z)[:, 0],
        "tanh": lambda z: smooth(z)[:, 0],
        "quadratic": lambda z: (z @ W).square().sum(1),
        "linear": lambda z: z @ W[0],
        "quartic": lambda z: z.pow(4).sum(1),
    }
    for name, f in functions.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = sh.SmoothHess(f).attribute(x, sigma=SIGMA, n_calls=400, control=None)
        assert result.statistics.tails is None, name


def test_the_search_is_counted_and_can_be_switched_off():
    f, _, _, _ = far_kink(3.0, 400.0)
    options = {"sigma": SIGMA, "control": None}
    zero, explainer = torch.zeros(1, DIM, dtype=D), sh.SmoothHess(black_box(f))

    def counted(**more):
        calls = []

        def counting(z):
            calls.append(len(z))
            return f(z)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sh.SmoothHess(black_box(counting)).attribute(zero, n_calls=400, **options, **more), sum(calls)

    (off, calls_off), (on, calls_on) = counted(tails=None), counted()
    assert off.statistics.tails is None
    assert explainer.attribute(zero, n_calls=398, **options).statistics.tails is None  # too small a budget
    assert on.statistics.tails is not None
    assert float(on.n_passes - off.n_passes) == calls_on - calls_off
    with pytest.raises(ValueError, match="tails must be"):
        explainer.attribute(zero, tails="always", **options)


def test_models_that_refuse_far_inputs_are_explained():
    def raises(z):
        if bool((z.abs() > 4).any()):
            raise RuntimeError("inputs must be between −4 and 4")
        return z.square().sum(1)

    def infinite(z):
        return torch.log(4 - z).sum(1)

    zero = torch.zeros(1, DIM, dtype=D)
    with pytest.warns(UserWarning, match="between −4 and 4.*regions that few draws reach were not searched"):
        result = sh.SmoothHess(raises).attribute(zero, sigma=SIGMA, n_calls=400, control=None)
    torch.testing.assert_close(result.hessian[0], 2 * torch.eye(DIM, dtype=D))
    result = sh.SmoothHess(infinite).attribute(zero, sigma=SIGMA, n_calls=400, control=None)
    assert bool(result.hessian.isfinite().all())


def test_independent_kinks_that_are_sampled_separately_are_not_counted_twice():
    """White box with control=None: the variance of rare flips is known, and zero where they are in a stratum."""
    f, hessian, _, _ = far_kink(3.0, 400.0)
    result = explained(f, 40, control=None).unshrunk()
    found = result.statistics.tails.strata.exist
    own = torch.einsum("i,bij,j->b", W[0], result.hessian - hessian, W[0])[found]
    sd = result.noise.of_bilinear(W[0].expand(40, -1), W[0].expand(40, -1)).value.sqrt()[found]
    assert 0.7 < float((own / sd).square().mean().sqrt()) < 1.35


def test_split_pairs_and_eigenvalues_use_separate_couples():
    f, hessian, _, _ = far_kink(3.0, 400.0)
    result = explained(black_box(f), 30, n_calls=1200)
    true = torch.linalg.eigvalsh(hessian).flip(0)[0]
    found = result.eigh(1)
    low, high = found.interval(0.95)
    assert float(((low[:, 0] <= true) & (true <= high[:, 0])).double().mean()) >= 0.85
    for pairs, exists in zip(result.top_pairs(3, selection="split"), result.statistics.tails.strata.exist, strict=True):
        if exists:
            assert all(math.isfinite(p.low) and p.low <= p.value <= p.high for p in pairs)


def test_strata_that_do_not_exist_are_marked():
    f, _, _, _ = far_kink(3.0, 400.0)
    margin = explained(black_box(f)).statistics.tails.strata.margin
    assert bool((margin == NEVER).any())


def test_more_of_a_merge_with_a_run_without_strata_is_unbiased():
    f, hessian, gradient, _ = far_kink(3.0, 400.0)
    explainer, zero = sh.SmoothHess(black_box(f)), torch.zeros(40, DIM, dtype=D)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = explainer.attribute(zero, sigma=SIGMA, n_calls=800, seed=range(40))
        second = explainer.attribute(zero, sigma=SIGMA, n_calls=2000, seed=range(100, 140), tails=None)
        longer = explainer.more(first.merge(second), 800).unshrunk()
    own = torch.einsum("i,bij,j->b", W[0], longer.hessian - hessian, W[0])
    assert abs(float(own.mean())) < 4 * float(own.std()) / len(own) ** 0.5
    slope = (longer.gradient - gradient) @ W[0]
    assert abs(float(slope.mean())) < 4 * float(slope.std()) / len(slope) ** 0.5
    share = longer.statistics.tails.share
    torch.testing.assert_close(share, torch.full_like(share, 1600 / 3600))
