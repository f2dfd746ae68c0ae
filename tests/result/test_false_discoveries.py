"""q-values from buckets are those of all p-values."""

import pytest
import torch

from smoothhess import Dense, Diagonal, Isotropic, SmoothHess
from smoothhess.estimate.student_t import Tails, two_sided_p
from smoothhess.result import false_discoveries
from smoothhess.result.false_discoveries import benjamini_hochberg, q_values

DF = torch.tensor([1.5, 12.0, 40.0, torch.inf], dtype=torch.float64)


def statistics(kind, n, seed=0):
    rng = torch.Generator().manual_seed(seed)
    t = torch.randn(len(DF), n, generator=rng, dtype=torch.float64).abs()
    if kind == "signal":
        t[:, : n // 5] *= torch.linspace(1, 40, n // 5)
    elif kind == "conservative":
        t = t * 0.6
    elif kind == "ties":
        t = (4 * t).round() / 4
    elif kind == "extremes":
        t[:, :3], t[:, 3:9], t[:, 9], t[:, 10] = torch.inf, 0.0, 1e200, 1e-200
    return t


@pytest.mark.parametrize("kind", ["noise", "signal", "conservative", "ties", "extremes"])
@pytest.mark.parametrize("n", [600, 5000, 50_000])
def test_the_smallest_rates_are_those_of_all_tests(kind, n):
    t = statistics(kind, n)
    largest = t.topk(n // 600).indices
    others = torch.arange(0, n, n // 2 + 1).expand(len(t), -1)
    expected = torch.stack([benjamini_hochberg(p) for p in Tails.of(DF)(t)])
    for chosen in (largest[:, :1], others[:, :1], largest[:, : len(largest[0]) // 2 + 1]):
        found = q_values(t, t.gather(1, chosen), Tails.of(DF))
        torch.testing.assert_close(found, expected.gather(1, chosen), rtol=1e-9, atol=0)


def test_many_and_few_requested_rates_agree(monkeypatch):
    t = statistics("signal", 2000)
    few = q_values(t, t[:, :3], Tails.of(DF))
    monkeypatch.setattr(false_discoveries, "MANY", 10**9)
    torch.testing.assert_close(q_values(t, t[:, :3], Tails.of(DF)), few, rtol=1e-12, atol=0)
    assert q_values(t, t[:, :0], Tails.of(DF)).shape == (4, 0)


D = 24
SPREAD = torch.linspace(0.1, 0.6, D, dtype=torch.float64)
ROOT = torch.randn(D, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
GAUSSIANS = {
    "isotropic": Isotropic(0.4),
    "diagonal": Diagonal(SPREAD),
    "frozen": Diagonal(SPREAD * (torch.arange(D) != 3)),
    "correlated": Dense(ROOT @ ROOT.mT / D / 9 + 0.01 * torch.eye(D)),
}


@pytest.mark.parametrize("design", ["orthogonal", "antithetic"])
@pytest.mark.parametrize("n_calls", [16, 2 * D + 14, 8 * D])  # an incomplete block, blocks with a rest, whole blocks
@pytest.mark.parametrize("gaussian", GAUSSIANS)
def test_pairs_are_those_of_rows_and_of_all_p_values(gaussian, n_calls, design):
    """The variances of rows are computed without those of the other entries, and q-values from all p-values."""
    torch.manual_seed(n_calls)
    layers = [torch.nn.Linear(D, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)]
    net = torch.nn.Sequential(*layers).double()
    x = torch.randn(3, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shared = SmoothHess(net).attribute(x, 0, gaussian=GAUSSIANS[gaussian], n_calls=n_calls, design=design)
    parts = [
        SmoothHess(net).attribute(one[None], 0, gaussian=GAUSSIANS[gaussian], n_calls=n, design=design, seed=n)
        for one, n in zip(x, (n_calls, 18, n_calls), strict=True)
    ]
    for result in (shared, type(shared).cat(parts)):
        of_rows = torch.stack([result.noise.of_row(i).value for i in range(D)], 1)
        entries = result.noise.of_entries()
        torch.testing.assert_close(entries.value, of_rows, rtol=1e-6, atol=1e-12 * float(of_rows.nan_to_num().max()))
        i, j = torch.triu_indices(D, D, 1)
        scales = GAUSSIANS[gaussian].scales(D)
        kept = scales[i] * scales[j] > 0
        i, j = i[kept], j[kept]
        value, stderr = result.source.unbiased.dense()[:, i, j], of_rows[:, i, j].sqrt()
        p = two_sided_p((value / stderr).nan_to_num(0.0), entries.df[:, None])
        for b, pairs in enumerate(result.top_pairs(D * D)):
            q = torch.zeros(D, D, dtype=torch.float64)
            q[i, j] = benjamini_hochberg(p[b])
            found = torch.tensor([pair.q_value for pair in pairs])
            torch.testing.assert_close(found, torch.stack([q[c.i, c.j] for c in pairs]).float(), rtol=1e-4, atol=1e-6)
        # the matrix decides which pairs are listed
        largest = (result.hessian[:, i, j].double() * scales[i] * scales[j]).abs().argmax(1)
        assert [(c.i, c.j) for (c,) in result.top_pairs(1)] == [(int(i[b]), int(j[b])) for b in largest]
