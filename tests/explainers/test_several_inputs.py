"""Models of several inputs: the interactions of two inputs are a block of the Hessian of the concatenated features."""

import pytest
import torch
from torch import nn

import smoothhess as sh

A, B = (torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) for size in (3, 4))
W = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def bilinear(a, b):
    """f(a, b) = aᵀWb, whose Hessian between a and b is W."""
    return (a @ W * b).sum(1)


def test_the_interactions_between_the_inputs_of_a_bilinear_function_are_its_matrix():
    result = sh.SmoothHess(bilinear).attribute((A, B), sigma=0.5, n_calls=14)
    found = result.between(0, 1)
    torch.testing.assert_close(found.value, W.expand(2, 3, 4))
    torch.testing.assert_close(result.between(1, 0).value, W.T.expand(2, 4, 3))
    assert float(found.stderr.max()) < 1e-9
    assert float(result.between(0, 0).value.abs().max()) < 1e-9
    assert [part.of(result.inputs).equal(x) for part, x in zip(result.input_parts, (A, B), strict=True)] == [True, True]
    torch.testing.assert_close(result.input_parts[0].of(result.gradient), B @ W.T)
    assert "of inputs 0 (3,), 1 (4,)" in repr(result)
    checked = sh.evaluate.validate_pairs(bilinear, result, steps=[1.0])
    torch.testing.assert_close(checked.plain[0], checked.form)


def test_standard_errors_hold_between_inputs():
    f = lambda a, b: (bilinear(a, b) / 2).sin()
    many = sh.SmoothHess(f).attribute((A, B), sigma=0.7, n_calls=14_000, shrink=False).between(0, 1)
    few = sh.SmoothHess(f).attribute((A, B), sigma=0.7, n_calls=420, seed=1, shrink=False).between(0, 1)
    z = (few.value - many.value) / (few.stderr.square() + many.stderr.square()).sqrt()
    assert 0.4 < float(z.square().mean().sqrt()) < 1.7
    low, high = few.interval(0.999)
    assert float(((low < many.value) & (many.value < high)).double().mean()) > 0.9


def test_names_come_from_a_dictionary_and_pairs_can_be_limited_to_two_inputs():
    f = lambda *, image, text: bilinear(image.flatten(1), text) + 100 * text[:, 0] * text[:, 1]
    inputs = {"text": B, "image": A[:, None]}
    result = sh.SmoothHess(f).attribute(inputs, sigma=0.5, n_calls=14)
    assert result.top_pairs(1)[0][0].names == ("text[0]", "text[1]")
    pairs = result.top_pairs(100, between=("image", "text"))[0]
    i, j = divmod(int(W.abs().argmax()), 4)
    assert len(pairs) == 12
    assert pairs[0].names == (f"text[{j}]", f"image[0, {i}]")
    assert pairs[0].value == pytest.approx(float(W[i, j]))
    assert result.between("image", "text").value.shape == (2, 1, 3, 4)
    for wrong in ("sound", 0):
        with pytest.raises(ValueError, match="no input .* The inputs are 'text', 'image'"):
            result.between("image", wrong)
    with pytest.raises(ValueError, match="has one input"):
        sh.SmoothHess(lambda x: x.prod(1)).attribute(A, sigma=0.5, n_calls=6).between(0, 1)


def test_sigma_masks_and_directions_for_each_input():
    explainer = sh.SmoothHess(lambda a, b: bilinear(a.flatten(1), b))
    inputs = (A[..., None], B)
    scales = (torch.tensor([[0.1], [0.2], [0.3]]).double(), 2.0)
    result = explainer.attribute(inputs, sigma=scales, n_calls=14)
    torch.testing.assert_close(result.gaussian.scales(7), torch.tensor([0.1, 0.2, 0.3, 2, 2, 2, 2]).double())
    masks = (torch.tensor([[0], [0], [1]]), torch.tensor([2, 2, 3, 3]))
    summed = torch.stack([W[:2].sum(0), W[2]]).reshape(2, 2, 2).sum(2)
    for groups in (result.groups(masks), explainer.attribute(inputs, sigma=0.5, n_calls=14, feature_mask=masks)):
        torch.testing.assert_close(groups.between(0, 1).value, summed.expand(2, 2, 2))
        assert groups.top_pairs(1, between=(0, 1))[0][0].names[1].startswith("1[")
    weighted = result.groups(masks, (inputs[0], B))
    whole = torch.einsum("bi,ij,bj->b", A, W, B)
    torch.testing.assert_close(weighted.between(0, 1).value.sum((1, 2)), whole)
    with pytest.raises(ValueError, match="a group contains features of two inputs"):
        result.groups((torch.zeros(3, 1).long(), torch.zeros(4).long())).between(0, 1)
    for sigma in ((0.1,), {"a": 0.1, "b": 0.2}, (0.1, 0.2, 0.3)):
        with pytest.raises(ValueError, match=r"one for each of \[0, 1\]"):
            explainer.attribute(inputs, sigma=sigma, n_calls=14)
    with pytest.raises(ValueError, match=r"sigma of input 1 must be a number or have its shape \(4,\)"):
        explainer.attribute(inputs, sigma=(0.1, torch.ones(5)), n_calls=14)


def test_results_are_continued_saved_selected_and_merged(tmp_path):
    f = lambda a, b, c: (bilinear(a, b) * c).sin()
    explainer, options = sh.SmoothHess(f), {"sigma": (0.5, 0.3), "control": None}
    c = torch.tensor([0.5, 1.0]).double()
    one = explainer.attribute((A, B), None, c, n_calls=42, **options)
    explainer.attribute((A, B), None, c, n_calls=14, **options).save(tmp_path / "r")
    two = explainer.more(sh.Interactions.load(tmp_path / "r"), 28, c)
    torch.testing.assert_close(two.between(0, 1).value, one.between(0, 1).value)
    assert two.input_parts == one.input_parts
    other = explainer.attribute((A, B), None, c, n_calls=42, seed=1, **options)
    assert one.merge(other)[1].between(0, 1).value.shape == (1, 3, 4)
    joined = sh.SmoothHess(lambda x, c: f(x[:, :3], x[:, 3:], c)).attribute(
        torch.cat([A, B], 1), None, c, sigma=torch.tensor([0.5] * 3 + [0.3] * 4), n_calls=42, seed=1, control=None
    )
    torch.testing.assert_close(joined.hessian, other.hessian)
    with pytest.raises(ValueError, match="differ in inputs"):
        one.merge(joined)


class Towers(nn.Module):
    """The cosine of the embeddings of an image and a vector."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, image, text):
        return nn.functional.cosine_similarity(self.image(image), self.text(text))


def test_two_towers():
    torch.manual_seed(0)
    model = Towers().double()
    inputs = {"image": torch.randn(2, 1, 4, 4).double(), "text": torch.randn(2, 5).double()}
    result = sh.SmoothHess(model).attribute(inputs, sigma=0.3, tol=0.05)
    assert bool((result.relative_error <= 0.05).all())
    assert result.between("image", "text").value.shape == (2, 1, 4, 4, 5)
    delta = 0.3 * torch.randn(8_000, 2, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = (result.inputs + delta).flatten(0, 1).requires_grad_()
    cosine = model(x[:, :16].reshape(-1, 1, 4, 4), x[:, 16:])
    gradient = torch.autograd.grad(cosine.sum(), x)[0].reshape(delta.shape)
    rows = delta[..., :16, None] * gradient[..., None, 16:] / 0.3**2  # Eq. 8
    found = result.between("image", "text")
    error = (rows.var(0) / len(rows)).sqrt().reshape(found.value.shape)
    z = (found.value - rows.mean(0).reshape(found.value.shape)) / (error.square() + found.stderr.square()).sqrt()
    assert float(z.square().mean().sqrt()) < 1.5
    neuron = sh.NeuronSmoothHess(model, model.text[0]).attribute(inputs, 3, sigma=0.3, n_calls=42)
    assert float(neuron.between("image", "text").value.abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ((), ValueError, "inputs are empty"),
        ((A, [1.0]), TypeError, "input 1 must be a tensor"),
        ((A, B[0]), TypeError, r"input 1 must be a tensor \(B, …\).* got shape \(4,\)"),
        ((A, B[:1]), ValueError, r"same number of examples, got \[2, 1\]"),
        ((A, B.float()), TypeError, "one dtype and device, got torch.float64 on cpu, torch.float32 on cpu"),
        ((A, B / 0), ValueError, "NaN or infinity"),
    ],
)
def test_wrong_inputs_are_refused(inputs, error, words):
    with pytest.raises(error, match=words):
        sh.SmoothHess(bilinear).attribute(inputs, sigma=0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sh.SmoothHess(bilinear).closed_form((A, B), sigma=0.5),
        lambda: sh.baselines.hessian(bilinear, (A, B)),
        lambda: sh.baselines.gradient(bilinear, (A, B)),
        lambda: sh.baselines.softplus(bilinear, (A, B), beta=1.0),
        lambda: sh.baselines.swish(bilinear, (A, B), beta=1.0),
        lambda: sh.baselines.random(bilinear, (A, B)),
        lambda: sh.baselines.gauss_newton(bilinear, (A, B), 0),
        lambda: sh.baselines.caso(bilinear, (A, B)),
        lambda: sh.baselines.gradient_nid(bilinear, (A, B)),
        lambda: sh.perturbation_mse(bilinear, (A, B), None, 0.1),
        lambda: sh.baselines.smoothgrad(bilinear, (A, B), sigma=0.5),
        lambda: sh.baselines.integrated_hessians(bilinear, (A, B)),
        lambda: sh.diagnose(bilinear, (A, B), sigma=0.5),
        lambda: sh.sweep(bilinear, (A, B), sigmas=[0.5]),
        lambda: sh.explain_dataset(sh.SmoothHess(bilinear), [((A, B), 0)], "store", sigma=0.5),
    ],
)
def test_other_functions_refuse_several_inputs(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="several inputs are supported by SmoothHess.attribute"):
        call()
