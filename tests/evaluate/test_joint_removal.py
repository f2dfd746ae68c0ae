"""Joint effects of removing pairs of segments: closed forms, counts of forward passes, errors."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from smoothhess import SmoothHess, segments
from smoothhess.evaluate import joint_removal
from smoothhess.evaluate.rank_correlation import spearman
from tests.truths import quadratic

A, BIAS = quadratic(6)
X = torch.linspace(-1, 1, 18).reshape(3, 6).double()
MASK = torch.tensor([0, 0, 1, 2, 2, 2])
BASELINE = torch.linspace(0.5, -0.2, 6).double()


def square(x):
    return x.flatten(1) @ BIAS + (x.flatten(1) @ A * x.flatten(1)).sum(1) / 2


def naive(f, x, mask, baseline, i, j):
    """D(I, J) of one example, with four calls of the model."""

    def without(*gone):
        absent = torch.tensor([int(m) in gone for m in mask.flatten()]).reshape(x.shape)
        return f(torch.where(absent, baseline, x)[None]).item()

    return without() - without(i) - without(j) + without(i, j)


def test_joint_effects_of_a_quadratic_are_the_group_sums_of_its_hessian():
    """uᵀHv with the removals u and v, which is what `groups` sums with direction = baseline − inputs."""
    found = joint_removal(square, X, MASK, BASELINE)
    result = SmoothHess(square).attribute(X, sigma=1.0, n_calls=36)
    sums = result.groups(MASK, direction=BASELINE - X)
    i, j = found.pairs[0].unbind(1)
    torch.testing.assert_close(found.effects, sums.hessian[:, i, j])
    assert found.n_forward == 1 + 3 + 3
    torch.testing.assert_close(found.rank_correlation(sums), torch.ones(3).double())
    torch.testing.assert_close(found.output, square(X))


def test_joint_effects_of_a_network_are_those_of_four_calls():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    x = torch.randn(2, 1, 4, 4).double()
    parts = segments.grid((1, 4, 4), 2)
    target = torch.tensor([2, 0])
    found = joint_removal(net, x, parts, 0.3, None, target)
    for b, p in itertools.product(range(2), range(6)):
        i, j = found.pairs[b, p].tolist()
        expected = naive(lambda v, b=b: net(v)[:, target[b]], x[b], parts.mask, torch.full_like(x[b], 0.3), i, j)
        assert float(found.effects[b, p]) == pytest.approx(expected, abs=1e-12)
    assert found.names == parts.names
    assert found.matrix.diagonal(dim1=1, dim2=2).isnan().all()
    torch.testing.assert_close(found.matrix, found.matrix.mT, equal_nan=True)


def test_each_removal_is_evaluated_once():
    rows = []

    def counted(x):
        rows.extend(map(tuple, x.tolist()))
        return square(x)

    found = joint_removal(counted, X[:1], torch.arange(6), 0.0, [(0, 1), (0, 2), (1, 2)])
    distinct = set(rows)
    assert found.n_forward == 1 + 3 + 3
    assert len(distinct) == found.n_forward
    assert found.single.isnan().tolist() == [[False] * 3 + [True] * 3]
    again = joint_removal(square, X[:1], torch.arange(6), 0.0, [(0, 1), (0, 2), (1, 2)], internal_batch_size=2)
    torch.testing.assert_close(found.effects, again.effects)


def test_an_additive_model_has_no_joint_effects_above_rounding():
    found = joint_removal(lambda x: x.float().exp().sum(1), X.float(), MASK, BASELINE)
    assert (found.effects.abs() <= found.rounding[:, None]).all()
    assert found.rank_correlation(torch.rand(3, 3, 3)).isnan().all()


def test_pairs_of_each_example_and_of_top_pairs():
    result = SmoothHess(square).attribute(X, sigma=1.0, n_calls=36).groups(MASK)
    found = joint_removal(square, X, MASK, BASELINE, result.top_pairs(2))
    every = joint_removal(square, X, MASK, BASELINE).matrix
    for b, row in enumerate(result.top_pairs(2)):
        assert found.pairs[b].tolist() == [[p.i, p.j] for p in row]
        torch.testing.assert_close(found.effects[b], torch.stack([every[b, p.i, p.j] for p in row]))
    same = joint_removal(square, X, MASK, BASELINE, found.pairs)
    torch.testing.assert_close(same.effects, found.effects)


def test_masks_and_baselines_of_each_example():
    masks = torch.stack([MASK, MASK.flip(0), MASK])
    found = joint_removal(square, X, masks, BASELINE + X * 0.1)
    for b in range(3):
        alone = joint_removal(square, X[b : b + 1], masks[b], BASELINE + X[b] * 0.1)
        torch.testing.assert_close(found.effects[b : b + 1], alone.effects)


def test_arrays_and_tables_are_inputs():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X.numpy(), columns=list("abcdef"))
    expected = joint_removal(square, X, MASK, BASELINE)
    for inputs, baseline in ((table, table.mean() * 0 + BASELINE.numpy()), (X.numpy(), BASELINE.numpy())):
        found = joint_removal(square, inputs, MASK.numpy(), baseline, np.array([(0, 1), (0, 2), (1, 2)]))
        torch.testing.assert_close(found.effects, expected.effects)
    rows = found.to_frame()
    assert list(rows.columns)[:6] == ["example", "i", "j", "first", "second", "joint_effect"]
    assert len(rows) == 9


def test_rank_correlation_of_signed_and_absolute_values():
    found = joint_removal(square, X, torch.arange(6), BASELINE)
    scores = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    i, j = found.pairs[0].unbind(1)
    torch.testing.assert_close(found.rank_correlation(scores), spearman(found.effects, scores[:, i, j]))
    expected = spearman(found.effects.abs(), scores[:, i, j].abs())
    torch.testing.assert_close(found.rank_correlation(scores.numpy(), absolute=True), expected)


def test_the_table_names_the_strongest_pair():
    found = joint_removal(square, X, MASK, BASELINE, names=["left", "mid", "right"])
    strongest = found.pairs[0, int(found.effects[0].abs().argmax())].tolist()
    row = repr(found).splitlines()[2]
    assert " × ".join(found.names[k] for k in strongest) in row
    assert len(found) == 3


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"segments": torch.zeros(6).long()}, ValueError, "at least two segments"),
        ({"segments": torch.rand(6)}, TypeError, "segments must hold integer"),
        ({"segments": torch.zeros(5).long()}, ValueError, "segments must have"),
        ({"baseline": torch.zeros(4)}, ValueError, "baseline must be a number"),
        ({"baseline": float("nan")}, ValueError, "baseline must hold finite"),
        ({"pairs": [(0, 3)]}, ValueError, "from 0 to 2"),
        ({"pairs": [(1, 1)]}, ValueError, "two different segment ids"),
        ({"pairs": []}, ValueError, "at least one"),
        ({"pairs": 3}, TypeError, "pairs must be a list"),
        ({"pairs": [(0, 1, 2)]}, ValueError, r"a pair must be \(i, j\)"),
        ({"pairs": [[(0, 1)], [(0, 2)]]}, ValueError, "each of 3 examples"),
        ({"names": ["a"]}, ValueError, "one name per segment"),
    ],
)
def test_errors_say_what_was_expected(change, error, words):
    given = {"segments": MASK, "baseline": 0.0, "pairs": None, **change}
    with pytest.raises(error, match=words):
        joint_removal(square, X, **given)


def test_scores_of_single_features_are_refused():
    found = joint_removal(square, X, MASK)
    with pytest.raises(ValueError, match="groups"):
        found.rank_correlation(SmoothHess(square).attribute(X, sigma=1.0, n_calls=36))
