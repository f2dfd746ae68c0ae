"""Results for pandas and shapiq: the same numbers in other hands."""

import itertools
import sys

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import segments
from smoothhess.result import export
from smoothhess.result.exact import Attribution
from smoothhess.result.pairs import COLUMNS

NAMES = ["age", "dose", "height", "weight", "time"]


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    return sh.SmoothHess(net).attribute(torch.randn(2, 5).double(), sigma=0.5, n_calls=400)


# --- pandas -----------------------------------------------------------------------------------------------------------


def test_a_frame_has_a_row_for_every_pair_of_every_example(result):
    frame = export.to_frame(result, NAMES)
    assert list(frame.columns) == list(COLUMNS)
    assert len(frame) == 2 * 10
    assert frame.groupby("example").size().tolist() == [10, 10]
    for example, pairs in enumerate(result.top_pairs(10, NAMES)):
        part = frame[frame["example"] == example]
        for row, p in zip(part.itertuples(), pairs, strict=True):
            assert (row.i, row.j, (row.first, row.second)) == (p.i, p.j, p.names)
            assert (row.value, row.stderr, row.low, row.high) == (p.value, p.stderr, p.low, p.high)
            assert (row.effect, row.q_value, row.significant) == (p.effect, p.q_value, p.significant)


def test_a_frame_can_be_cut_and_scaled(result):
    assert len(export.to_frame(result, k=3)) == 6
    doubled = export.to_frame(result, scales=torch.full((5,), 2.0))
    assert (doubled["effect"] - 4 * doubled["value"]).abs().max() < 1e-12


def test_a_frame_of_groups_and_of_a_single_group(result):
    pairs = segments.columns(NAMES, {"body": ["height", "weight"]})
    frame = export.to_frame(result.groups(pairs), pairs.names)
    assert set(frame["first"]) | set(frame["second"]) == {"age", "dose", "body", "time"}
    assert len(export.to_frame(result.groups(torch.zeros(5, dtype=torch.long)))) == 0


def test_without_pandas_it_is_named(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        export.to_frame(result)


# --- shapiq -----------------------------------------------------------------------------------------------------------


def value_of(game, coalition):
    return sum(game[s] for r in range(3) for s in itertools.combinations(sorted(coalition), r))


@pytest.mark.parametrize("move", [None, 0.7, [0.3, -1.0, 2.0, 0.0, 0.1]])
def test_entries_add_up_to_the_surrogate_of_every_coalition(result, move):
    pytest.importorskip("shapiq", reason="shapiq is not installed")
    moves = torch.full((5,), 0.5) if move is None else torch.as_tensor(move, dtype=torch.float64).expand(5)
    for example in (0, 1):
        game, one = export.to_shapiq(result, example, move=move), result[example]
        for size in range(6):
            for coalition in itertools.combinations(range(5), size):
                present = torch.zeros(5).double()
                present[list(coalition)] = 1
                point = one.inputs[0] + present * moves
                assert value_of(game, coalition) == pytest.approx(float(one.taylor()(point[None, None])), abs=1e-12)


def test_a_group_moves_as_one(result):
    pytest.importorskip("shapiq", reason="shapiq is not installed")
    mask = torch.tensor([0, 1, 1, 2, 0])
    result = result.unshrunk()  # the same estimate of sums and of the surrogate
    game = export.to_shapiq(result.groups(mask), move=0.4)
    for coalition in ((0,), (1, 2), (0, 1, 2)):
        moved = torch.isin(mask, torch.tensor(coalition)).double() * 0.4
        surrogate = float(result[0].taylor()((result.inputs[0] + moved)[None, None]))
        assert value_of(game, coalition) == pytest.approx(surrogate, abs=1e-12)


def test_shapiq_is_told_what_the_numbers_are(result):
    shapiq = pytest.importorskip("shapiq", reason="shapiq is not installed")
    game = export.to_shapiq(result, 1)
    assert isinstance(game, shapiq.InteractionValues)
    assert (game.index, game.min_order, game.max_order, game.n_players) == ("Moebius", 0, 2, 5)
    assert game.baseline_value == float(result.output[1])
    assert game.estimated
    assert game.estimation_budget == 400
    strongest = result.top_pairs(1)[1][0]
    assert game[(strongest.i, strongest.j)] == pytest.approx(
        float(result.hessian[1, strongest.i, strongest.j]) * 0.25, abs=1e-12
    )


@pytest.mark.parametrize("plot", ["network", "waterfall", "force", "stacked_bar", "upset", "si_graph"])
def test_the_plots_of_shapiq_work(result, plot):
    pytest.importorskip("shapiq", reason="shapiq is not installed")
    import matplotlib as mpl

    before = mpl.get_backend()
    mpl.use("agg")
    from matplotlib import pyplot as plt

    try:
        drawn = getattr(export.to_shapiq(result), f"plot_{plot}")(show=False, feature_names=NAMES)
        assert drawn is not None
    finally:
        plt.close("all")
        mpl.use(before)


def test_the_data_frame_of_an_exact_result_works_too():
    pytest.importorskip("shapiq", reason="shapiq is not installed")
    exact = sh.baselines.hessian(lambda x: x[:, 0] * x[:, 1] * 3 + x[:, 2] ** 2, torch.ones(1, 3).double())
    game = export.to_shapiq(exact, move=1.0)
    assert not game.estimated
    assert [game[s] for s in ((0, 1), (2,), (0, 2))] == pytest.approx([3, 3, 0])


def test_wrong_moves_and_too_many_players_are_refused(result):
    pytest.importorskip("shapiq", reason="shapiq is not installed")
    with pytest.raises(ValueError, match="one per feature, 5, got 3"):
        export.to_shapiq(result, move=torch.ones(3))
    many = sh.SmoothHess(lambda x: x.sum(1) ** 2).attribute(torch.zeros(1, 1001), sigma=0.1, n_calls=4)
    with pytest.raises(ValueError, match="too many players"):
        export.to_shapiq(many)


def test_an_example_that_is_not_there_is_refused_as_by_plot(result):
    pytest.importorskip("shapiq", reason="shapiq is not installed")
    with pytest.raises(IndexError, match="there is no example 5 of 2"):
        export.to_shapiq(result, 5)


def test_an_attribution_is_no_game():
    x = torch.ones(1, 4)
    found = Attribution.make(x, x.sum(1), x, torch.ones(1, 4, 4), method="some index")
    for one in (found, found.groups(torch.tensor([0, 0, 1, 1]))):
        with pytest.raises(ValueError, match="some index is an attribution, not a Hessian"):
            export.to_shapiq(one)


def test_without_shapiq_it_is_named(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "shapiq", None)
    with pytest.raises(ImportError, match="pip install shapiq"):
        export.to_shapiq(result)
