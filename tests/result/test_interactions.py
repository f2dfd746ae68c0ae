"""The result: one operator in many forms, and the files it is kept in."""

import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import nn

from smoothhess import Interactions, SmoothHess
from smoothhess.linalg.memory import ByteLimit
from smoothhess.result import eigenpairs
from smoothhess.result.false_discoveries import benjamini_hochberg
from tests.truths import OneHidden, Plain, gaussians

pytestmark = pytest.mark.rounding


def make(n_calls=60, kind="isotropic", b=2, d=12, shape=(3, 4), **options):
    x = torch.randn(b, d, generator=torch.Generator().manual_seed(0)).double().reshape(b, *shape)
    return Plain(OneHidden(d)).attribute(x, gaussian=gaussians(d)[kind], n_calls=n_calls, **options)


TIGHT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.mark.parametrize("kind", sorted(gaussians(4)))
@pytest.mark.parametrize("n_calls", [8, 60, 3000])  # fewer rows than features, more, and the dense form
class TestOperator:
    def test_product_equals_dense(self, kind, n_calls):
        dense = make(n_calls, kind).hessian
        result = make(n_calls, kind)
        eye = torch.eye(12).double()
        torch.testing.assert_close(result @ eye.expand(2, 12, 12), dense, **TIGHT)
        v = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).double()
        expected = torch.einsum("bij,bj->bi", dense, v.flatten(1))
        torch.testing.assert_close(result @ v, expected.reshape(2, 3, 4), **TIGHT)
        torch.testing.assert_close(result @ v.flatten(1), expected, **TIGHT)
        torch.testing.assert_close(result @ v[0], (dense @ v[0].flatten()).reshape(2, 3, 4), **TIGHT)
        torch.testing.assert_close(result @ v[0].flatten(), dense @ v[0].flatten(), **TIGHT)

    def test_rows_diagonal_bilinear(self, kind, n_calls):
        result = make(n_calls, kind)
        dense, stderr = result.hessian, result.stderr()
        for index, flat in [(5, 5), ((1, 2), 6), (-1, 11)]:
            row = result.row(index)
            torch.testing.assert_close(row.value.flatten(1), dense[:, flat], **TIGHT)
            torch.testing.assert_close(row.stderr.flatten(1), stderr[:, flat], rtol=1e-6, atol=1e-9)
        diagonal = result.diagonal()
        torch.testing.assert_close(diagonal.value.flatten(1), dense.diagonal(dim1=1, dim2=2), **TIGHT)
        torch.testing.assert_close(diagonal.stderr.flatten(1), stderr.diagonal(dim1=1, dim2=2), rtol=1e-6, atol=1e-9)
        e = torch.eye(12).double()
        pair = result.bilinear(e[2], e[7])
        torch.testing.assert_close(pair.value, dense[:, 2, 7], **TIGHT)
        torch.testing.assert_close(pair.stderr, stderr[:, 2, 7], rtol=1e-6, atol=1e-9)

    def test_groups_equal_the_dense_sums(self, kind, n_calls):
        result = make(n_calls, kind)
        mask = torch.arange(12).reshape(3, 4) % 5
        p = nn.functional.one_hot(mask.flatten()).double()
        v = torch.linspace(-1, 2, 12).double()
        for direction, weight in ((None, torch.ones(12).double()), (v.reshape(3, 4), v)):
            groups = result.groups(mask, direction)
            w = weight[:, None] * p
            torch.testing.assert_close(groups.hessian, w.mT @ result.hessian @ w, **TIGHT)
            torch.testing.assert_close(groups.gradient, result.gradient.flatten(1) @ w, **TIGHT)
            assert groups.shape == (2, 5, 5)
            torch.testing.assert_close(groups.r2, result.r2, equal_nan=True)
        again = groups.groups(torch.tensor([0, 0, 1, 1, 1]))
        assert again.hessian.shape == (2, 2, 2)
        own = torch.stack([mask, mask.flip(1)])
        torch.testing.assert_close(result.groups(own)[1].hessian, result[1].groups(mask.flip(1)).hessian, **TIGHT)

    def test_eigenpairs(self, kind, n_calls):
        dense = make(n_calls, kind).hessian
        values, vectors = make(n_calls, kind).eigh(3)
        expected = torch.linalg.eigvalsh(dense)
        order = expected.abs().argsort(dim=1, descending=True)[:, :3]
        torch.testing.assert_close(values, expected.gather(1, order), **TIGHT)
        assert vectors.shape == (2, 3, 3, 4)
        flat = vectors.flatten(2)
        torch.testing.assert_close(flat @ dense, values[..., None] * flat, rtol=1e-7, atol=1e-9)

    def test_eigenpairs_by_products_alone(self, kind, n_calls, monkeypatch):
        expected = make(n_calls, kind).eigh(3)
        monkeypatch.setattr(eigenpairs, "ROW_SPAN", ByteLimit(0))
        monkeypatch.setattr(eigenpairs, "ROW_SPAN_FOR_FEW", ByteLimit(0))
        result = make(n_calls, kind)
        found = result.eigh(3)
        torch.testing.assert_close(found.values, expected.values, rtol=1e-3, atol=1e-6)
        assert float(result.eigh_residuals(found).max()) <= 1.1 * eigenpairs.TOLERANCE
        assert float(make(n_calls, kind).eigh_residuals(expected).max()) < 1e-9
        turned = eigenpairs.Eigenpairs(expected.values, expected.vectors.roll(1, -1))
        assert float(result.eigh_residuals(turned).min()) > 1e-3

    def test_scipy(self, kind, n_calls):
        one = make(n_calls, kind)[1]
        values = eigsh(one.to_scipy(), k=2, which="LM", v0=torch.ones(12).double().numpy())[0]
        expected = one.eigh(2).values[0].sort().values
        torch.testing.assert_close(torch.from_numpy(values).sort().values, expected, rtol=1e-6, atol=1e-9)

    def test_save_and_load_are_exact(self, kind, n_calls, tmp_path):
        result = (
            make(n_calls, kind).groups(torch.arange(12).reshape(3, 4) // 2) if n_calls == 60 else make(n_calls, kind)
        )
        path = tmp_path / "r.safetensors"
        result.save(path)
        again = Interactions.load(path)
        kept = again.statistics.tensors()
        assert all(torch.equal(t, kept[name]) for name, t in result.statistics.tensors().items())
        assert again.gaussian.same_as(result.gaussian)
        assert torch.equal(again.inputs, result.inputs)
        torch.testing.assert_close(again.hessian, result.hessian, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(again.stderr(), result.stderr(), rtol=1e-9, atol=1e-12)
        assert (again.status, again.seed, again.design) == (result.status, result.seed, result.design)
        assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]


def test_scipy_wants_one_example():
    with pytest.raises(ValueError, match=r"Use result\[i\].to_scipy"):
        make().to_scipy()


def test_a_loaded_result_can_be_continued(tmp_path):
    explainer = Plain(nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)).double())
    x = torch.ones(2, 3, 4).double()
    first = explainer.attribute(x, [2, 0], sigma=0.3, n_calls=40)
    first.save(tmp_path / "r")
    grown = explainer.more(Interactions.load(tmp_path / "r"), 60)
    torch.testing.assert_close(grown.hessian, explainer.attribute(x, [2, 0], sigma=0.3, n_calls=100).hessian, **TIGHT)


def test_damaged_and_foreign_files(tmp_path):
    make().save(tmp_path / "r")
    whole = (tmp_path / "r").read_bytes()
    for name, content in (("short", whole[:-100]), ("text", b"hello"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="not a safetensors file, or it is truncated"):
            Interactions.load(tmp_path / name)
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="holds tensors but no smoothhess result"):
        Interactions.load(tmp_path / "foreign")
    save_file({"a": torch.ones(2)}, tmp_path / "v", {"format": "smoothhess.interactions", "version": "99"})
    with pytest.raises(ValueError, match="format version 99, this smoothhess reads versions 1 and 2"):
        Interactions.load(tmp_path / "v")
    save_file(
        {"a": torch.ones(2)},
        tmp_path / "d",
        {"format": "smoothhess.interactions", "version": "1", "about": "{}"},
    )
    with pytest.raises(ValueError, match="is damaged"):
        Interactions.load(tmp_path / "d")
    with pytest.raises(FileNotFoundError, match="no file"):
        Interactions.load(tmp_path / "none")
    with pytest.raises(ValueError, match="does not exist. Create it first"):
        make().save(tmp_path / "no" / "r")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "r"
    make().save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("smoothhess.result.files.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        make(100).save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_examples_can_be_taken_apart_and_put_together():
    result = make(b=4, seed=[3, 1, 4, 1])
    again = Interactions.cat(list(result))
    torch.testing.assert_close(again.hessian, result.hessian, **TIGHT)
    torch.testing.assert_close(again.stderr(), result.stderr(), **TIGHT)
    assert again.seed == (3, 1, 4, 1)
    assert len(result[1:3]) == 2
    torch.testing.assert_close(result[-1].hessian[0], result.hessian[3], **TIGHT)
    assert torch.equal(result[[2, 0]].inputs, result.inputs[[2, 0]])
    with pytest.raises(IndexError):
        result[4]
    with pytest.raises(ValueError, match="they differ in Gaussian"):
        Interactions.cat([result, make(kind="dense")])


def test_repr_is_worth_reading():
    text = repr(make(b=10))
    assert text.startswith("Interactions of 10 example(s) × 12 features (3, 4), Isotropic σ = 0.5, orthogonal design")
    assert "R²" in text
    assert "… and 2 more" in text
    assert "5 groups" in repr(make().groups(torch.arange(12).reshape(3, 4) % 5))


def test_what_was_applied_is_recorded():
    result = make(control="auto", shrink=True)
    assert (result.control, result.shrink, result.unbiased, result.design) == ("kink", True, True, "orthogonal")
    result = make(control=None, shrink=False)
    assert (result.control, result.control_note, result.shrink) == (None, "control=None was passed", False)


class TestPairs:
    def test_ranked_by_effect_in_units_of_the_output(self):
        result = make(4000, "diagonal", shape=(12,))
        pairs = result.top_pairs(66)[0]
        scales = gaussians(12)["diagonal"].scales(12)
        effects = [abs(p.effect) for p in pairs]
        assert effects == sorted(effects, reverse=True)
        top = pairs[0]
        assert top.i < top.j
        assert top.value == pytest.approx(float(result.hessian[0, top.i, top.j]))
        assert top.stderr == pytest.approx(float(result.stderr()[0, top.i, top.j]))
        assert top.effect == pytest.approx(top.value * float(scales[top.i] * scales[top.j]))
        assert top.low < top.value < top.high
        assert top.q_value < 1e-6
        assert top.significant
        by_scale = result.top_pairs(1, scales=torch.arange(12).double())[0][0]
        assert by_scale.effect == pytest.approx(by_scale.value * by_scale.i * by_scale.j)

    def test_names(self):
        result = make(shape=(12,))
        names = [f"column {i}" for i in range(12)]
        pair = result.top_pairs(1, names)[0][0]
        assert pair.names == (f"column {pair.i}", f"column {pair.j}")
        pixel = make().top_pairs(1)[0][0]
        assert pixel.names[0] == f"({pixel.i // 4}, {pixel.i % 4})"
        with pytest.raises(ValueError, match="one name per feature, 12, got 2"):
            result.top_pairs(1, ["a", "b"])
        with pytest.raises(ValueError, match="0 < q < 1"):
            result.top_pairs(1, q=2)

    def test_frozen_features_are_never_discovered(self):
        pairs = make(4000, "frozen", shape=(12,)).top_pairs(66)[0]
        assert len(pairs) == 28
        assert all(p.i % 3 != 2 and p.j % 3 != 2 for p in pairs)

    def test_benjamini_hochberg_agrees_with_scipy(self):
        from scipy.stats import false_discovery_control

        p = torch.rand(200, generator=torch.Generator().manual_seed(0)).double() ** 3
        torch.testing.assert_close(benjamini_hochberg(p), torch.from_numpy(false_discovery_control(p.numpy())))

    def test_one_feature_has_no_pairs(self):
        one = Plain(OneHidden(1)).attribute(torch.zeros(1, 1).double(), sigma=0.5, n_calls=10)
        assert one.top_pairs() == [[]]


class TestTaylor:
    def test_values(self):
        result = make()
        points = result.inputs[:, None] + torch.randn(2, 7, 3, 4, generator=torch.Generator().manual_seed(0)).double()
        delta = (points - result.inputs[:, None]).flatten(2)
        first = result.output[:, None] + torch.einsum("bnd,bd->bn", delta, result.gradient.flatten(1))
        torch.testing.assert_close(result.taylor(1)(points), first)
        second = first + torch.einsum("bnd,bde,bne->bn", delta, result.hessian, delta) / 2
        torch.testing.assert_close(result.taylor()(points), second)

    def test_refused(self):
        result = make()
        with pytest.raises(ValueError, match=r"have shape \(2, n, 3, 4\), got \(2, 3, 4\). For one point"):
            result.taylor()(torch.zeros(2, 3, 4))
        with pytest.raises(ValueError, match="order must be 1 or 2"):
            result.taylor(3)
        with pytest.raises(ValueError, match="group sums have no Taylor surrogate"):
            result.groups(torch.zeros(3, 4, dtype=torch.long)).taylor()


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda r: r @ torch.ones(5), r"v must be a vector of 12 features, \(3, 4\)"),
        (lambda r: r.row(12), "feature 12 is not among the 12 features"),
        (lambda r: r.row((0, 4)), r"feature \(0, 4\) is not among"),
        (lambda r: r.bilinear(torch.ones(12), torch.ones(3)), r"a direction must have shape \(3, 4\)"),
        (lambda r: r.eigh(13), "between 1 and 12 eigenpairs"),
        (lambda r: r.calls_for(0.0), "error must be positive"),
        (lambda r: r.calls_for(0.1, "max"), 'norm must be "fro" or "op"'),
        (lambda r: r.groups(torch.zeros(5, dtype=torch.long)), "feature_mask must have the shape"),
        (lambda r: r.groups(torch.zeros(3, 4, dtype=torch.long), torch.ones(5)), "direction must have the shape"),
    ],
)
def test_bad_questions(ask, text):
    with pytest.raises(ValueError, match=text):
        ask(make())


class TestGroupings:
    def test_each_example_has_its_own_scales(self):
        """A group that is empty in the first example is not without effect in the others."""
        result = make(400, shape=(12,))
        masks = torch.stack([torch.zeros(12, dtype=torch.long), torch.arange(12) % 3])
        together, alone = result.groups(masks).top_pairs(3)[1], result[1].groups(masks[1]).top_pairs(3)[0]
        assert [(p.i, p.j) for p in together] == [(p.i, p.j) for p in alone]
        assert [p.effect for p in together] == pytest.approx([p.effect for p in alone])
        joined = Interactions.cat([result[0].groups(masks[0] + torch.arange(12) // 11 * 2), result[1].groups(masks[1])])
        assert joined.top_pairs(3)[1][0].effect == pytest.approx(alone[0].effect)

    def test_plain_and_weighted_groups_do_not_mix(self):
        result = make()
        mask = torch.arange(12).reshape(3, 4) % 3
        with pytest.raises(ValueError, match="cannot be concatenated"):
            Interactions.cat([result[0].groups(mask, torch.ones(3, 4)), result[1].groups(mask)])

    def test_groups_of_groups_can_be_continued(self):
        x = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).double()
        explainer = Plain(OneHidden(12))
        first = explainer.attribute(x, sigma=0.3, n_calls=100)
        inner, v = torch.arange(12).flip(0), torch.linspace(1, 2, 12).double()
        outer = torch.arange(12) // 4
        nested = explainer.more(first.groups(inner, v).groups(outer), 60)
        expected = explainer.more(first, 60).groups(inner, v).groups(outer)
        torch.testing.assert_close(nested.hessian, expected.hessian, **TIGHT)
        torch.testing.assert_close(nested.stderr(), expected.stderr(), rtol=1e-6, atol=1e-9)
        assert nested.r2.isnan().all()

    def test_masks_are_repeated_over_channels(self):
        x = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0)).double()
        result = Plain(OneHidden(12)).attribute(x, sigma=0.3, n_calls=50)
        pixels = torch.arange(4).reshape(2, 2)
        expected = result.groups(pixels.expand(3, 2, 2)).hessian
        for mask in (pixels, pixels[None], pixels[None, None]):
            torch.testing.assert_close(result.groups(mask).hessian, expected, **TIGHT)


def test_a_budget_that_ran_out_stays_said():
    explainer, x = Plain(OneHidden(12)), torch.zeros(1, 12).double()
    with pytest.warns(UserWarning, match="stopped at max_calls"):
        short = explainer.attribute(x, sigma=0.3, tol=1e-3, max_calls=64)
    assert explainer.more(short, 2).converged.tolist() == [False]


def test_frozen_features_are_known_to_be_zero():
    for n_calls in (2, 60):
        result = make(n_calls, "frozen", shape=(12,))
        assert (result.stderr()[:, 2] == 0).all()
        assert (result.diagonal().stderr[:, 2] == 0).all()
        assert (result.row(5).stderr == 0).all()
        assert (result.row(0).stderr[:, 2] == 0).all()


def test_significant_pairs_have_intervals_without_zero():
    x = torch.zeros(200, 3).double()
    result = Plain(OneHidden(3)).attribute(x, sigma=0.5, n_calls=14, seed=range(200))
    found = [p for pairs in result.top_pairs(3, q=0.05) for p in pairs if p.significant]
    assert all(p.low > 0 or p.high < 0 for p in found)


def test_indices_and_points_of_other_types():
    import numpy as np

    result = make()
    torch.testing.assert_close(result.row(np.int64(5)).value, result.row(5).value)
    torch.testing.assert_close(result.row(torch.tensor(5)).value, result.row(5).value)
    single = Plain(OneHidden(12).float()).attribute(torch.zeros(1, 12), sigma=0.3, n_calls=20)
    assert single.taylor()(torch.zeros(1, 2, 12).double()).dtype == torch.float32


def test_names_that_a_result_does_not_have():
    with pytest.raises(ValueError, match="this result has no names, so there is no feature 'alcohol'"):
        make().row("alcohol")
    with pytest.raises(TypeError, match="integer group ids, got .*Replace names"):
        make().groups(["a"] * 12)  # type: ignore[arg-type]


def test_few_features_have_few_eigenpairs():
    assert Plain(OneHidden(3)).attribute(torch.ones(1, 3).double(), sigma=0.3, n_calls=40).eigh().values.shape == (
        1,
        3,
    )


def test_masks_must_be_integers():
    with pytest.raises(TypeError, match="integer group ids, got torch.float32"):
        make().groups(torch.zeros(3, 4))


def test_moves_to_a_device():
    result = make().to("cpu")
    assert result.device.type == "cpu"
    assert result.hessian.shape == (2, 12, 12)


def test_what_does_not_fit_together_is_named():
    x = torch.zeros(2, 3).double()
    one, other = (
        SmoothHess(lambda x: x.prod(1)).attribute(x, sigma=s, n_calls=20, seed=i) for i, s in enumerate((1, 2))
    )
    with pytest.raises(ValueError, match=r"differ in Gaussian \(Isotropic σ = 1 and Isotropic σ = 2\)"):
        one.merge(other)
    with pytest.raises(ValueError, match="differ in Gaussian"):
        Interactions.cat([one, other])
    unlike = SmoothHess(lambda x: x.prod(1)).attribute(x, sigma=1, n_calls=20, design="iid")
    with pytest.raises(ValueError, match=r"design \(orthogonal and iid\)"):
        one.merge(unlike)


def test_side_by_side_with_a_mask_for_each_example():
    """The draws are shared and their sums over groups are not; adaptive runs end at different places."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 1)).double()
    x, mask = torch.randn(5, 6).double(), torch.stack([torch.randperm(6) % 3 for _ in range(5)])

    def explained(rows):
        return SmoothHess(net).attribute(x[rows], sigma=0.5, n_calls=120, feature_mask=mask[rows], control=None)

    whole, parts = explained(slice(None)), [explained(slice(2)), explained(slice(2, None))]
    beside = Interactions.cat(parts)
    for name in ("hessian", "gradient", "relative_error"):
        torch.testing.assert_close(getattr(beside, name), getattr(whole, name))
    torch.testing.assert_close(beside.stderr(), whole.stderr())
    adaptive = SmoothHess(net).attribute(x, sigma=0.5, tol=0.1, feature_mask=mask, control=None)
    assert len(adaptive.n_calls.unique()) > 1
    assert torch.isfinite(adaptive[[3]].stderr()).all()


@pytest.mark.parametrize("rows", [4, 10, 30])
def test_noise_that_is_rounding_alone_is_not_less_than_none(rows):
    """‖A‖² of a quadratic is zero up to rounding, of either sign; standard errors stay numbers."""
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(rows)).double()
    result = SmoothHess(lambda x: x.square().sum(1) / 2).attribute(x, sigma=0.3, n_calls=2 * rows, control=None)
    assert torch.isfinite(result.diagonal().stderr).all()
    assert torch.isfinite(result.row(3).stderr).all()


def test_side_by_side_of_results_with_and_without_a_closed_form():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 1)).double()
    x = torch.randn(2, 6).double()
    plain = SmoothHess(net).attribute(x[:1], sigma=0.5, n_calls=40, control=None)
    kink = SmoothHess(net).attribute(x[1:], sigma=0.5, n_calls=40, control="kink", tau_probes=16)
    beside = Interactions.cat([plain, kink])
    assert (beside.control, beside.tau_probes) == ("kink", 16)
