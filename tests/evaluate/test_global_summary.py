"""The result of a pass over a data set: reading, ranking, testing, merging and keeping it."""

import csv
import io
import math
import re

import pytest
import torch
from scipy import stats

from smoothhess import SmoothHess
from smoothhess.evaluate.global_interactions import global_interactions
from smoothhess.evaluate.global_summary import GlobalInteractions, Moments
from smoothhess.result.exact import Exact
from smoothhess.result.false_discoveries import benjamini_hochberg
from smoothhess.result.files import write_atomically

N, D = 50, 4
H = torch.randn(N, D, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
H = (H + H.mT) / 2
H = H + 0.5 * torch.arange(D).double()[:, None] * torch.arange(D).double()  # (2, 3) is strongest in the mean
H[:, 0, :] = H[:, :, 0] = 0.0  # the first feature acts alone


def found(hessians=H, scales=None, **options):
    """Summaries of given Hessians, without noise."""

    def explain(x, target, seeds):
        index = x[:, 0].long()
        return Exact.make(x, x[:, 0], torch.zeros_like(x), hessians[index], scales=scales, method="given")

    x = torch.zeros(len(hessians), hessians.shape[-1]).double()
    x[:, 0] = torch.arange(len(hessians))
    return global_interactions(explain, x, **options)


def test_moments_merge_without_cancellation():
    values = 1e8 + torch.randn(31, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole, parts = Moments.of(values), [Moments.of(v) for v in values.split([1, 10, 20])]
    merged = parts[2].merge(parts[0]).merge(parts[1])
    assert merged.n == 31
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-15, atol=0)
    torch.testing.assert_close(merged.squares, whole.squares, rtol=1e-6, atol=0)
    torch.testing.assert_close(whole.estimate.stderr, values.std(0) / math.sqrt(31))
    assert torch.isinf(Moments.of(values[:1]).estimate.stderr).all()


@pytest.mark.parametrize("by", ["mean", "abs", "square"])
def test_pairs_are_ranked_tested_and_given_intervals(by):
    values = {"mean": H, "abs": H.abs(), "square": H.square()}[by]
    pairs = found().top_pairs(10, by=by)
    assert len(pairs) == 6
    assert (pairs[0].i, pairs[0].j, pairs[0].names) == (2, 3, ("2", "3"))
    effects = [abs(p.effect) for p in pairs]
    assert effects == sorted(effects, reverse=True)
    side = "two-sided" if by == "mean" else "greater"
    p_values = {}
    for pair in pairs:
        column = values[:, pair.i, pair.j]
        assert pair.value == pytest.approx(float(column.mean()))
        assert pair.stderr == pytest.approx(float(column.std() / math.sqrt(N)))
        expected = pair.value if by != "square" else math.sqrt(pair.value)
        assert pair.effect == pytest.approx(expected)  # all moves are 1
        if pair.i == 0:
            assert (pair.value, pair.low, pair.high, pair.q_value, pair.significant) == (0, 0, 0, 1, False)
            p_values[pair.i, pair.j] = 1.0
            continue
        test = stats.ttest_1samp(column.numpy(), 0.0, alternative=side)
        p_values[pair.i, pair.j] = test.pvalue
        interval = stats.ttest_1samp(column.numpy(), 0.0).confidence_interval(0.95)
        assert (pair.low, pair.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
    q_values = benjamini_hochberg(torch.tensor([p_values[p.i, p.j] for p in pairs], dtype=torch.float64))
    for pair, q in zip(pairs, q_values.tolist(), strict=True):
        assert pair.q_value == pytest.approx(q, rel=1e-4)
        assert pair.significant == (pair.q_value <= 0.05)


def test_pairs_are_ranked_in_units_of_the_output():
    scales = torch.tensor([1.0, 10.0, 1.0, 0.1]).double()
    given = found(scales=scales)
    pair = given.top_pairs(1)[0]
    assert (pair.i, pair.j) == (1, 2)
    assert pair.effect == pytest.approx(math.sqrt(float(H[:, 1, 2].square().mean())) * 10)
    assert pair.value == pytest.approx(float(H[:, 1, 2].square().mean()))
    replaced = found().top_pairs(1, scales=scales)[0]
    assert replaced.effect == pytest.approx(pair.effect)
    frozen = found().top_pairs(10, scales=torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert {(p.i, p.j) for p in frozen} == {(0, 1), (0, 3), (1, 3)}
    assert found().top_pairs(10, scales=torch.zeros(D)) == []


def test_sure_things_and_single_records():
    """A matrix that never changes has no error over records; one record says nothing about others."""
    same = found(H[:1].expand(20, -1, -1))
    assert same.mean.stderr.max() < 1e-15
    top = same.top_pairs(6, by="mean")
    assert all(p.q_value < 1e-100 for p in top if p.i)
    assert all(p.q_value == 1 for p in top if not p.i)
    alone = found(H[:1])
    assert torch.isinf(alone.mean.stderr).all()
    assert all(p.q_value == 1 and not p.significant and p.low == -math.inf for p in alone.top_pairs(3))
    assert "1 record(s)" in repr(alone)


def test_names_and_shapes():
    names = ["age", "weight", "height", "dose"]
    assert found().top_pairs(1, names)[0].names == ("height", "dose")

    def image(x, target, seeds):
        return Exact.make(x, x[:, 0, 0], torch.zeros_like(x), H[: len(x)])

    images = global_interactions(image, torch.zeros(20, 2, 2).double())
    assert images.feature_shape == (2, 2)
    assert images.top_pairs(1)[0].names == ("(1, 0)", "(1, 1)")


def test_plain_records():
    rows = found().to_records(["a", "b", "c", "d"])
    assert len(rows) == 10
    row = next(r for r in rows if (r["i"], r["j"]) == (1, 3))
    assert (row["name_i"], row["name_j"]) == ("b", "d")
    assert row["mean_square"] == pytest.approx(float(H[:, 1, 3].square().mean()))
    assert row["mean_abs_stderr"] == pytest.approx(float(H[:, 1, 3].abs().std() / math.sqrt(N)))
    assert row["noise"] == 0
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, rows[0])
    writer.writerows(rows)
    assert len(sheet.getvalue().splitlines()) == 10


def test_saved_and_loaded(tmp_path):
    whole = found(seed=4)
    whole.save(tmp_path / "g.safetensors")
    back = GlobalInteractions.load(tmp_path / "g.safetensors")
    assert back.top_pairs(6) == whole.top_pairs(6)
    assert (len(back), back.segments, back.method, back.n_passes) == (N, ((4, 0, N),), "given", whole.n_passes)
    assert back.feature_shape == (D,)
    merged = back.merge(found(seed=5))
    assert len(merged) == 2 * N
    with pytest.raises(ValueError, match="records 0 to 49 of seed 4 are in both"):
        back.merge(whole)
    with pytest.raises(FileNotFoundError, match="no file"):
        GlobalInteractions.load(tmp_path / "none")
    (tmp_path / "text").write_text("not a result")
    with pytest.raises(ValueError, match="not a safetensors file"):
        GlobalInteractions.load(tmp_path / "text")
    write_atomically(tmp_path / "other", {"a": torch.zeros(1)}, {"format": "smoothhess.result.interactions"})
    with pytest.raises(ValueError, match="expected a file written by GlobalInteractions.save"):
        GlobalInteractions.load(tmp_path / "other")


def test_shown_as_a_table():
    lines = repr(found()).splitlines()
    assert lines[0] == "Global interactions of 4 features over 50 record(s), given, 0 passes per record"
    assert len(lines) == 8
    assert "2 × 3" in lines[2]
    large = found(torch.zeros(3, 6, 6).double())
    assert repr(large).endswith("… and 7 more")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"by": "median"}, "by must be 'square', 'abs', 'mean', got 'median'"),
        ({"k": 0}, "expected k ≥ 1 and 0 < q < 1, got k=0"),
        ({"q": 1.0}, "0 < q < 1"),
        ({"names": ["a"]}, "names must have one name per feature, 4, got 1"),
        ({"scales": torch.ones(3)}, "expected one scale per feature, 4, got 3"),
        ({"level": 1.5}, "level must lie between 0 and 1"),
    ],
)
def test_what_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        found().top_pairs(**options)


def test_other_devices_and_features():
    whole = found()
    assert whole.to("cpu").mean.value.device.type == "cpu"
    with pytest.raises(ValueError, match=r"can be merged, got given of \(4,\) and given of \(3,\)"):
        whole.merge(found(H[:, 1:, 1:], seed=1))
    with pytest.raises(ValueError, match="can be merged"):
        whole.merge(found(scales=torch.full((4,), 2.0).double(), seed=1))


def test_names_are_kept_by_files_and_merging(tmp_path):
    f, x = lambda x: x[:, 0] * x[:, 1], torch.ones(20, 3).double()
    names = ["age", "dose", "height"]
    found = global_interactions(SmoothHess(f), x, sigma=0.5, names=names)
    found.save(tmp_path / "x.safetensors")
    rest = global_interactions(SmoothHess(f), x, sigma=0.5, names=names, first_record=20)
    for other in (GlobalInteractions.load(tmp_path / "x.safetensors"), found.merge(rest), found.to("cpu")):
        assert other.names == tuple(names)
        assert other.top_pairs(1)[0].names == ("age", "dose")
    assert "age × dose" in repr(found)
    assert found.to_records()[1]["name_j"] == "dose"
    with pytest.raises(ValueError, match="different names of features"):
        found.merge(global_interactions(SmoothHess(f), x, sigma=0.5, names=["a", "b", "c"], first_record=20))


def test_a_figure_a_page_and_a_frame(tmp_path):
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)).double()
    found = global_interactions(SmoothHess(lambda x: x[:, 0] * x[:, 1].tanh()), x, sigma=0.5, names=["age", "<b>", "c"])
    page = found.report(tmp_path / "x.html").read_text()
    assert "age × &lt;b&gt;" in page
    assert "Over 30 records, <b>age</b> and <b>&lt;b&gt;</b> act together most" in page
    assert "http" not in re.sub(r'http-equiv="Content-Security-Policy"', "", page)
    assert len(page) < 30_000
    with pytest.raises(ValueError, match="does not exist"):
        found.report(tmp_path / "none" / "x.html")
    pytest.importorskip("pandas")
    frame = found.to_frame()
    assert len(frame) == 6
    assert frame["name_i"].tolist()[:3] == ["age"] * 3
    pytest.importorskip("matplotlib")
    for by in ("square", "abs", "mean"):
        assert found.plot(k=2, by=by).get_yticklabels()[0].get_text() == "age × <b>"
