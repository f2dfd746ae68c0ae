"""Results that were not sampled: every reading against dense linear algebra, in all three forms of the Hessian."""

import copy

import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import nn

from smoothhess import Diagonal, Interactions, SmoothHess, attack, baselines
from smoothhess.estimate.statistics import DENSE_LIMIT
from smoothhess.linalg import krylov
from smoothhess.linalg.krylov import leading_eigenpairs
from smoothhess.result.exact import Attribution, Exact

pytestmark = pytest.mark.rounding

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
FORMS = ["dense", "operator", "zero"]
SHAPE, D = (3, 4), 12


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def matrices(b=2, d=D, seed=1):
    h = draw(b, d, d, seed=seed)
    return h + h.mT


def make(form="dense", b=2, cls=Exact, hessian=None, **options):
    """An exact result and its Hessian, (B, d, d)."""
    h = matrices(b) if hessian is None else hessian
    curvature = {"dense": {"hessian": h}, "operator": {"operator": lambda rows: rows @ h}, "zero": {}}[form]
    x, f, g = draw(b, *SHAPE, seed=2), draw(b, seed=3), draw(b, *SHAPE, seed=4)
    return cls.make(x, f, g, **curvature, **options), h if form != "zero" else torch.zeros_like(h)


@pytest.mark.parametrize("form", FORMS)
class TestReadings:
    def test_products_and_the_dense_matrix(self, form):
        result, h = make(form)
        v = draw(2, *SHAPE, seed=5)
        expected = torch.einsum("bij,bj->bi", h, v.flatten(1))
        torch.testing.assert_close(result @ v, expected.reshape(2, *SHAPE), **TIGHT)
        torch.testing.assert_close(result @ v[0], (h @ v[0].flatten()).reshape(2, *SHAPE), **TIGHT)
        torch.testing.assert_close(result @ torch.eye(D).double(), h, **TIGHT)
        torch.testing.assert_close(result.hessian, h, **TIGHT)
        torch.testing.assert_close(result @ v, expected.reshape(2, *SHAPE), **TIGHT)  # now by the matrix

    def test_nothing_is_uncertain(self, form):
        result, _ = make(form, n_passes=3.0)
        assert not result.stderr().any()
        assert not result.gradient_stderr.any()
        assert not result.value_stderr.any()
        for estimate, known in ((result.value_estimate(), result.value), (result.gradient_estimate(), result.gradient)):
            assert all(torch.equal(end, known) for end in estimate.interval())
        assert result.gradient_stderr.shape == (2, *SHAPE)
        assert torch.equal(result.relative_error, torch.zeros(2).double())
        assert result.r2.isnan().all()
        assert result.stein_z.shape == (2, 2)
        assert torch.equal(result.n_calls, torch.zeros(2).long())
        assert torch.equal(result.n_passes, torch.full((2,), 3.0).double())
        assert result.converged.all()
        assert (result.design, result.seed, result.shape) == ("exact", 0, (2, D, D))
        assert torch.equal(result.value, result.output)

    def test_rows_diagonal_bilinear(self, form):
        result, h = make(form)
        for index, flat in [(5, 5), ((1, 2), 6), (-1, 11)]:
            row = result.row(index)
            torch.testing.assert_close(row.value.flatten(1), h[:, flat], **TIGHT)
            assert all(torch.equal(end, row.value) for end in row.interval())
        torch.testing.assert_close(result.diagonal().value.flatten(1), h.diagonal(dim1=1, dim2=2), **TIGHT)
        u, v = draw(D, seed=6), draw(2, *SHAPE, seed=7)
        expected = torch.einsum("i,bij,bj->b", u, h, v.flatten(1))
        torch.testing.assert_close(result.bilinear(u, v).value, expected, **TIGHT)
        assert not result.bilinear(u, v).stderr.any()

    def test_groups_are_sums(self, form):
        result, h = make(form)
        mask = torch.arange(D).reshape(SHAPE) % 5
        p = nn.functional.one_hot(mask.flatten()).double()
        v = torch.linspace(-1, 2, D).double()
        for direction, weight in ((None, torch.ones(D).double()), (v.reshape(SHAPE), v)):
            groups, w = result.groups(mask, direction), weight[:, None] * p
            torch.testing.assert_close(groups.hessian, w.mT @ h @ w, **TIGHT)
            torch.testing.assert_close(groups.gradient, result.gradient.flatten(1) @ w, **TIGHT)
            assert isinstance(groups, Exact)
            assert groups.shape == (2, 5, 5)
            assert not groups.stderr().any()
            again = groups.groups(torch.tensor([0, 0, 1, 1, 1]))
            q = w @ nn.functional.one_hot(torch.tensor([0, 0, 1, 1, 1])).double()
            torch.testing.assert_close(again.hessian, q.mT @ h @ q, **TIGHT)
            assert torch.equal(again.grouping.mask[0], (mask.flatten() >= 2).long())
            with pytest.raises(ValueError, match="group sums have no Taylor"):
                groups.taylor()
        own = torch.stack([mask, mask.flip(1)])
        torch.testing.assert_close(result.groups(own)[1].hessian, result[1].groups(mask.flip(1)).hessian, **TIGHT)

    def test_eigenpairs(self, form):
        result, h = make(form)
        values, vectors = result.eigh(3)
        assert vectors.shape == (2, 3, *SHAPE)
        expected = torch.linalg.eigvalsh(h)
        expected = expected.gather(1, expected.abs().argsort(dim=1, descending=True)[:, :3])
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-10)
        flat = vectors.flatten(2)
        torch.testing.assert_close(flat @ h, values[..., None] * flat, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(flat @ flat.mT, torch.eye(3).double().expand(2, 3, 3), rtol=1e-9, atol=1e-9)
        assert result.eigh().values.shape == (2, 8)
        with pytest.raises(ValueError, match="between 1 and 12"):
            result.eigh(13)

    def test_surrogate(self, form):
        result, h = make(form)
        points = result.inputs[:, None] + draw(2, 7, *SHAPE, seed=8)
        delta = (points - result.inputs[:, None]).flatten(2)
        first = result.output[:, None] + torch.einsum("bnd,bd->bn", delta, result.gradient.flatten(1))
        second = first + torch.einsum("bnd,bde,bne->bn", delta, h, delta) / 2
        torch.testing.assert_close(result.taylor()(points), second, **TIGHT)
        torch.testing.assert_close(result.taylor(1)(points), first, **TIGHT)

    def test_pairs(self, form):
        scales = torch.linspace(0, 2, D).reshape(SHAPE)
        result, h = make(form, scales=scales)
        s = scales.flatten().double()
        effect = (h * s[:, None] * s).triu(1).abs().flatten(1)
        for pairs, strength in zip(result.top_pairs(5), effect, strict=True):
            assert all(p.i and p.j for p in pairs)  # a feature that does not move is no candidate
            if form != "zero":
                best = strength.sort(descending=True).values[:5]
                torch.testing.assert_close(
                    torch.tensor([abs(p.effect) for p in pairs], dtype=torch.float64), best, **TIGHT
                )
            for p in pairs:
                assert p.stderr == 0
                assert p.low == p.value == p.high
                assert p.significant == (form != "zero")
                assert p.q_value == (1 if form == "zero" else 0)

    def test_examples_taken_apart_and_put_together(self, form):
        result, h = make(form, b=4, target=torch.arange(4)[:, None], seed=[3, 1, 4, 1], method="m", note="n")
        torch.testing.assert_close(result[[2, 0, 2]] @ draw(D), h[[2, 0, 2]] @ draw(D), **TIGHT)
        again = Interactions.cat([*result[:2], result[2:]])
        assert isinstance(again, Exact)
        torch.testing.assert_close(again @ draw(D), h @ draw(D), **TIGHT)
        torch.testing.assert_close(again[[3, 1]] @ draw(D), h[[3, 1]] @ draw(D), **TIGHT)
        torch.testing.assert_close(again.hessian, h, **TIGHT)
        for name in ("inputs", "output", "value", "gradient", "n_passes", "n_calls", "target"):
            assert torch.equal(getattr(again, name), getattr(result, name))
        assert (again.seed, again.method, again.note) == ((3, 1, 4, 1), "m", "n")
        assert result[-1].seed == 1
        assert len(copy.copy(result)) == 4
        with pytest.raises(IndexError):
            result[4]

    def test_scipy(self, form):
        result, h = make(form)
        if form != "zero":
            values = eigsh(result[1].to_scipy(), k=2, which="LM", v0=torch.ones(D).double().numpy())[0]
            expected = torch.linalg.eigvalsh(h[1])
            expected = expected[expected.abs().argsort(descending=True)[:2]].sort().values
            torch.testing.assert_close(torch.from_numpy(values).sort().values, expected, rtol=1e-9, atol=1e-10)

    def test_to_another_device(self, form):
        result, h = make(form)
        torch.testing.assert_close(result.to("cpu").hessian, h, **TIGHT)
        if form != "operator":
            assert result.to("meta").inputs.is_meta
        else:
            with pytest.raises(ValueError, match="stays on 'cpu'"):
                result.to("meta")

    def test_words(self, form):
        words = {"dense": "dense Hessian", "operator": "matrix-free Hessian", "zero": "zero Hessian"}
        assert words[form] in repr(make(form, method="mine", note="mind")[0])
        assert "mine" in repr(make(form, method="mine")[0])

    @pytest.mark.parametrize("kind", ["heatmap", "pairs", "gradient", "image"])
    def test_figures(self, form, kind):
        pytest.importorskip("matplotlib")
        assert make(form)[0].plot(kind).figure is not None


class TestFiles:
    @pytest.mark.parametrize("cls", [Exact, Attribution])
    @pytest.mark.parametrize("form", ["dense", "zero"])
    def test_round_trip(self, tmp_path, form, cls):
        options = {"target": torch.tensor([[1], [2]]), "scales": torch.rand(SHAPE), "value": torch.ones(2)}
        options |= {"gradient_stderr": torch.rand(2, *SHAPE), "n_passes": torch.tensor([2.0, 3.0]), "seed": [5, 6]}
        result, _ = make(form, cls=cls, method="m", note="n", **options)
        for kept in (result, result.groups(torch.arange(D).reshape(SHAPE) % 5, torch.rand(SHAPE))):
            kept.save(tmp_path / "r.safetensors")
            again = Interactions.load(tmp_path / "r.safetensors")
            assert type(again) is cls
            for name in ("inputs", "output", "value", "gradient", "gradient_stderr", "hessian", "n_passes", "target"):
                assert torch.equal(getattr(again, name), getattr(kept, name)), name
            assert (again.method, again.note, again.seed, again.status) == ("m", "n", (5, 6), ("exact", "exact"))
            assert again.top_pairs(3) == kept.top_pairs(3)
            assert again.derivatives.curvature is None or form == "dense"

    def test_tensors_that_share_memory(self, tmp_path):
        x = draw(1, 3)
        Exact.make(x, x[:, 0], x, value=x[:, 0]).save(tmp_path / "r.safetensors")
        assert torch.equal(Interactions.load(tmp_path / "r.safetensors").gradient, x)

    def test_an_operator_is_saved_once_it_is_a_matrix(self, tmp_path):
        result, h = make("operator")
        with pytest.raises(ValueError, match=r"cannot be saved. Save groups\(mask\), or read .hessian first"):
            result.save(tmp_path / "r.safetensors")
        assert not [*tmp_path.iterdir()]
        result.groups(torch.arange(D).reshape(SHAPE)).save(tmp_path / "groups.safetensors")
        torch.testing.assert_close(Interactions.load(tmp_path / "groups.safetensors").hessian, h, **TIGHT)
        _ = result.hessian
        result.save(tmp_path / "r.safetensors")
        torch.testing.assert_close(Interactions.load(tmp_path / "r.safetensors").hessian, h, **TIGHT)

    def test_the_record_is_not_the_makers_tensor(self):
        x, g, h = draw(2, 3), draw(2, 3, seed=1), matrices(d=3)
        result = Exact.make(x, x[:, 0], g, h)
        before = result.gradient.clone(), result.hessian.clone()
        g.zero_(), h.zero_()
        assert torch.equal(result.gradient, before[0])
        assert torch.equal(result.hessian, before[1])


class TestLargeInputs:
    d = DENSE_LIMIT + 1

    def make(self, rank=3):
        u = torch.linalg.qr(draw(self.d, rank, seed=9))[0].mT  # (rank, d), orthonormal
        weights = torch.tensor([-5.0, 4.0, 3.0]).double()
        x = draw(1, self.d)
        operator = lambda rows: (rows @ u.mT * weights) @ u
        return Exact.make(x, x[:, 0], x, operator=operator), u, weights

    def test_everything_that_needs_no_matrix(self):
        result, u, weights = self.make()
        values, vectors = result.eigh(3)
        torch.testing.assert_close(values[0], weights, **TIGHT)
        torch.testing.assert_close((vectors[0] @ u.mT).abs(), torch.eye(3).double(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result @ u[1], 4 * u[None, 1], **TIGHT)
        torch.testing.assert_close(result.row(7).value[0], (u[:, 7] * weights) @ u, **TIGHT)
        torch.testing.assert_close(result.bilinear(u[0], u[0]).value, torch.tensor([-5.0]).double(), **TIGHT)
        mask = torch.arange(self.d) % 4
        sums = torch.zeros(3, 4).double().index_add(1, mask, u)
        torch.testing.assert_close(result.groups(mask).hessian[0], sums.mT @ (weights[:, None] * sums), **TIGHT)
        point = result.inputs[:, None] + u[None, :1]
        torch.testing.assert_close(
            result.taylor()(point), result.output[:, None] + u[:1] @ result.inputs[0] - 2.5, **TIGHT
        )

    @pytest.mark.parametrize(
        "read", [lambda r: r.hessian, lambda r: r.stderr(), lambda r: r.diagonal(), lambda r: r.top_pairs()]
    )
    def test_what_needs_one_is_refused(self, read):
        result = self.make()[0]
        with pytest.raises(ValueError, match="too many for a dense matrix"):
            read(result)

    def test_a_zero_hessian_of_any_size(self):
        x = draw(2, self.d)
        result = Exact.make(x, x[:, 0], x)
        assert not result.diagonal().value.any()
        assert not result.eigh(2).values.any()
        assert not (result @ x).any()


class TestAttribution:
    def test_has_pairs_but_no_surrogate(self):
        result, h = make(cls=Attribution, method="integrated hessians")
        assert isinstance(result, Attribution)
        assert isinstance(result[0], Attribution)
        assert isinstance(result.groups(torch.arange(D).reshape(SHAPE)), Attribution)
        torch.testing.assert_close(result.hessian, h, **TIGHT)
        assert not hasattr(result, "taylor")
        with pytest.raises(ValueError, match="integrated hessians is an attribution, not a Hessian"):
            attack(result, 0.1)

    def test_is_not_put_beside_a_hessian(self):
        with pytest.raises(ValueError, match="they differ in kind"):
            Interactions.cat([make()[0], make(cls=Attribution)[0]])


def sampled():
    return SmoothHess(lambda x: x.prod(1)).attribute(torch.ones(2, 3), sigma=0.1, n_calls=20)


class TestRefusals:
    def test_there_are_no_draws(self):
        result = make(method="softplus")[0]
        assert not isinstance(result, Interactions)
        assert not any(hasattr(result, name) for name in ("statistics", "merge", "calls_for"))
        with pytest.raises(ValueError, match="can be merged"):
            sampled().merge(Exact.make(torch.ones(2, 3), torch.ones(2), torch.ones(2, 3)))
        with pytest.raises(ValueError, match="only an Interactions can be extended, got Exact"):
            SmoothHess(lambda x: x.sum((1, 2))).more(result, 10)
        with pytest.raises(AttributeError, match="no attribute 'colour'"):
            _ = result.colour

    def test_not_put_beside_other_kinds(self):
        x = torch.ones(2, 3)
        with pytest.raises(ValueError, match="they differ in kind"):
            Interactions.cat([sampled(), Exact.make(x, x[:, 0], x)])
        with pytest.raises(ValueError, match="only results of one method can be concatenated, got a, b"):
            Interactions.cat([make(method="a")[0], make(method="b")[0]])

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"output": torch.ones(3)}, r"output must have shape \(2,\), got \(3,\)"),
            ({"gradient": torch.ones(2, 3)}, r"gradient must have shape \(2, 12\) or \(2, 3, 4\), got \(2, 3\)"),
            ({"hessian": torch.ones(2, 3, 3)}, r"hessian must have shape \(2, 12, 12\) or \(2, 3, 4, 3, 4\)"),
            ({"hessian": torch.ones(2, 12, 12).triu()}, "hessian must be symmetric, that of example 0"),
            ({"hessian": torch.full((2, 12, 12), torch.inf)}, "hessian must be finite"),
            ({"gradient": torch.full((2, 3, 4), torch.nan)}, "gradient must be finite"),
            ({"hessian": torch.ones(2, 12, 12), "operator": lambda rows: rows}, "pass one of hessian and operator"),
            ({"scales": torch.ones(5)}, "made for 5 features but an input has 12"),
            ({"inputs": torch.full((2, 3, 4), torch.nan)}, "inputs contain NaN"),
        ],
    )
    def test_numbers_that_do_not_fit(self, changed, message):
        given = {"inputs": torch.ones(2, 3, 4), "output": torch.ones(2), "gradient": torch.ones(2, 3, 4)}
        with pytest.raises(ValueError, match=message):
            Exact.make(**(given | changed))

    def test_an_operator_that_is_none(self):
        x = torch.ones(2, 3)
        with pytest.raises(TypeError, match="operator must be callable"):
            Exact.make(x, x[:, 0], x, operator=x)
        with pytest.raises(ValueError, match=r"to rows of that shape"):
            Exact.make(x, x[:, 0], x, operator=lambda rows: rows[:1]) @ x[0]


def test_the_hessian_of_torch_func_is_taken_as_it_comes():
    f, x = lambda x: (x**3).sum() + x[0, 0] * x[1, 2], draw(*SHAPE)
    hessian = torch.func.hessian(f)(x)[None]  # (1, 3, 4, 3, 4)
    result = Exact.make(x[None], f(x)[None], torch.func.grad(f)(x)[None], hessian)
    assert result.bilinear(torch.eye(D)[0], torch.eye(D)[6]).value == 1
    assert type(result.gaussian).__name__ == "Isotropic"


def test_standard_errors_of_a_sampled_gradient():
    stderr = torch.arange(2 * D).reshape(2, *SHAPE)
    result, _ = make("zero", gradient_stderr=stderr)
    assert torch.equal(result.gradient_stderr, stderr.double())
    mask, direction = torch.arange(D).reshape(SHAPE) % 2, torch.full(SHAPE, -2.0)
    bound = result.groups(mask, direction).gradient_stderr  # never too small, whatever the correlations are
    assert torch.equal(bound, 2 * torch.stack([stderr.flatten(1)[:, i::2].sum(1) for i in range(2)], 1).double())
    both = Interactions.cat([result, make("zero")[0]])
    assert torch.equal(both.gradient_stderr, torch.cat([stderr.double(), torch.zeros(2, *SHAPE).double()]))


def test_scales_rank_pairs_and_survive_groups():
    result, _ = make(scales=torch.linspace(0.5, 2, D))
    assert isinstance(result.gaussian, Diagonal)
    groups = result.groups(torch.zeros(SHAPE).long())
    torch.testing.assert_close(
        groups.grouping.scales, torch.linspace(0.5, 2, D).double().square().mean().sqrt()[None, None]
    )


def _reflected(found, rows):
    return torch.linalg.qr(rows.mT)[0].mT if found is None else found


class TestKrylov:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_gram_schmidt_by_products(self, dtype):
        """As a GPU does it; rows that depend on each other are left to another way."""
        rows = (draw(2, 5, 300, seed=3) * torch.logspace(-8, 3, 5).double()[:, None]).to(dtype)
        found, tiny = krylov._by_products(rows), 20 * torch.finfo(dtype).eps
        torch.testing.assert_close(found @ found.mT, torch.eye(5, dtype=dtype).expand(2, 5, 5), rtol=0, atol=tiny)
        expected = torch.linalg.qr(rows.mT)[0].mT
        torch.testing.assert_close((found * expected).sum(-1).abs(), torch.ones(2, 5, dtype=dtype), rtol=0, atol=tiny)
        for row in (0.0, rows[1, 0] - 2 * rows[1, 1]):
            rows[1, 4] = row
            assert krylov._by_products(rows) is None

    @pytest.mark.parametrize("by_products", [False, True])
    @pytest.mark.parametrize("cheap", [False, True])
    def test_all_of_them_beside_a_zero(self, by_products, cheap, monkeypatch):
        """A start block as large as the space, ways that need other directions, and restarts."""
        if by_products:
            monkeypatch.setattr(krylov, "_orthonormal", lambda rows: _reflected(krylov._by_products(rows), rows))
        h = torch.stack([torch.diag(torch.linspace(1, 2, 350)), torch.zeros(350, 350)]).double()
        for k in (2, 350):
            values, vectors = leading_eigenpairs(lambda r: r @ h, torch.zeros(2, 350).double(), k, 1e-10, cheap)
            expected = torch.stack([torch.linspace(2, 1, 350)[:k], torch.zeros(k)]).double()
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-8 if k == 2 else 1e-12)
            eye = torch.eye(k).double().expand(2, k, k)
            torch.testing.assert_close(vectors @ vectors.mT, eye, rtol=0, atol=1e-11)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("k", [1, 4, 20])
    def test_against_eigh(self, dtype, k):
        q = torch.linalg.qr(draw(3, 60, 60, seed=10))[0]
        spectrum = torch.cat([torch.tensor([9.0, 9.0, -9.0, 5.0]), torch.linspace(-3, 3, 56)]).double()
        h = ((q * spectrum) @ q.mT).to(dtype)
        values, vectors = leading_eigenpairs(lambda rows: rows @ h, torch.zeros(3, 60, dtype=dtype), k)
        expected = spectrum[spectrum.abs().argsort(descending=True)[:k]].abs().to(dtype)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(values.abs(), expected.expand(3, k), rtol=1e3 * eps, atol=1e3 * eps)
        torch.testing.assert_close(vectors @ h, values[..., None] * vectors, rtol=0, atol=2e4 * eps)
        torch.testing.assert_close(
            vectors @ vectors.mT, torch.eye(k, dtype=dtype).expand(3, k, k), rtol=0, atol=1e3 * eps
        )

    def test_examples_of_different_rank(self):
        """One is exhausted long before the other converges."""
        u = torch.linalg.qr(draw(200, 2, seed=11))[0]
        q = torch.linalg.qr(draw(200, 200, seed=12))[0]
        low, full = u @ u.mT, (q * 2 * 0.95 ** torch.arange(200)) @ q.mT
        h = torch.stack([low, full])
        calls = []
        product = lambda rows: (calls.append(rows.shape[1]), rows @ h)[1]
        values, vectors = leading_eigenpairs(product, torch.zeros(2, 200).double(), 2)
        torch.testing.assert_close(values, torch.tensor([[1.0, 1.0], [2.0, 1.9]]).double(), **TIGHT)
        torch.testing.assert_close(vectors @ h, values[..., None] * vectors, rtol=0, atol=1e-10)
        assert sum(calls) < 200

    def test_a_full_space_goes_on_with_its_best_directions(self):
        spectrum = torch.cat([torch.tensor([1.2, -1.1]), torch.linspace(-1, 1, 998)]).double()
        calls = []
        product = lambda rows: (calls.append(rows.shape[1]), rows * spectrum)[1]
        values, vectors = leading_eigenpairs(product, torch.zeros(1, 1000).double(), 2)
        torch.testing.assert_close(values, spectrum[None, :2], **TIGHT)
        torch.testing.assert_close(vectors[0].abs(), torch.eye(1000).double()[:2], rtol=0, atol=1e-10)
        assert len(calls) > krylov.FULL_BLOCKS  # it was cut down on the way

    def test_what_is_not_reached_is_said(self, monkeypatch):
        monkeypatch.setattr(krylov, "MOST_BLOCKS", 3)
        spectrum = torch.linspace(-1, 1, 1000).double()
        with pytest.warns(UserWarning, match="the 2 leading eigenpairs have a relative residual of"):
            leading_eigenpairs(lambda rows: rows * spectrum, torch.zeros(1, 1000).double(), 2)


def test_what_was_made_of_samples_is_not_called_significant():
    """Nothing is known of the errors of its entries, so nothing stands out."""
    f = lambda x: (x[:, 0] + x[:, 1]).abs()
    x = torch.full((1, 2), 0.1).double()
    squares = baselines.squared(SmoothHess(f).attribute(x, sigma=0.5, n_calls=40, control=None))
    assert bool((squares.relative_error > 0).all())
    assert not squares.top_pairs(1)[0][0].significant
    assert bool(squares.stderr().isinf().all())
    own = baselines.squared(baselines.hessian(lambda x: x.prod(1), x))
    assert own.top_pairs(1)[0][0].significant
    again = Interactions.cat([squares, squares])
    assert bool((again.relative_error == squares.relative_error).all())


def test_an_operator_that_is_not_symmetric_is_refused():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="this operator is not"):
        Exact.make(x, x.sum(1), x, operator=lambda rows: rows @ torch.triu(torch.ones(3, 3)))
    with pytest.raises(ValueError, match="rows of that shape"):
        Exact.make(x, x.sum(1), x, operator=lambda rows: rows[..., :2])
