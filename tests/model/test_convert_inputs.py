"""Arrays, tables, predicted targets and common mistakes: what is accepted, and the remedies that errors name."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import NeuronSmoothHess, SmoothHess, TokenSmoothHess, baselines, evaluate

X = torch.linspace(-1, 1, 12).reshape(3, 4)
OPTIONS = {"sigma": 0.5, "n_calls": 64}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)


def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [np.float32, np.float64])
def test_arrays_have_the_dtype_of_the_model(dtype, given):
    result = SmoothHess(network(dtype)).attribute(X.numpy().astype(given), 0, **OPTIONS)
    assert result.dtype == dtype
    expected = SmoothHess(network(dtype)).attribute(X.to(dtype), 0, **OPTIONS)
    torch.testing.assert_close(result.hessian, expected.hessian, rtol=1e-4, atol=1e-4)


def test_arrays_of_a_function_keep_their_dtype():
    result = SmoothHess(lambda x: x.prod(1)).attribute(X.double().numpy()[::-1], **OPTIONS)  # negative strides
    assert result.dtype == torch.float64
    torch.testing.assert_close(result.inputs, X.double().flip(0))


def test_tables_may_hold_integers_and_booleans():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": [40, 50], "dose": [0.5, 0.1], "male": [True, False], "n": [1, 2]})
    result = SmoothHess(network()).attribute(table, 0, **OPTIONS)
    assert result.names[0] == ("age", "dose", "male", "n")
    torch.testing.assert_close(result.inputs, torch.tensor([[40.0, 0.5, 1.0, 1.0], [50.0, 0.1, 0.0, 2.0]]))
    table["n"] = ["a", "b"]
    with pytest.raises(TypeError, match="column 'n' must hold numbers, got str.*get_dummies"):
        SmoothHess(network()).attribute(table, 0, **OPTIONS)
    with pytest.raises(ValueError, match=r"df\.iloc\[\[0\]\] of a DataFrame"):
        SmoothHess(network()).attribute(table.drop(columns="n").iloc[0].astype(float), 0, **OPTIONS)


def test_arrays_of_integers_and_text_are_refused():
    with pytest.raises(TypeError, match=r"got torch.int64.*Use inputs.float\(\)"):
        SmoothHess(network()).attribute(np.ones((2, 4), dtype=int), 0, **OPTIONS)
    with pytest.raises(TypeError, match=r"must hold numbers.*astype\(float\)"):
        SmoothHess(network()).attribute(np.array([["a"] * 4]), 0, **OPTIONS)


SELECT = {"radius": 0.5, "n_samples": 20, "n_calls": 64}


def zero(points):
    return 0 * points.sum(-1)


FUNCTIONS = {
    "closed_form": lambda m, x, t: SmoothHess(m).closed_form(x, t, sigma=0.5, check_calls=64).hessian,
    "hessian": lambda m, x, t: baselines.softplus(m, x, t, beta=4.0).hessian,
    "gradient": lambda m, x, t: baselines.gradient(m, x, t).gradient,
    "smoothgrad": lambda m, x, t: baselines.smoothgrad(m, x, t, sigma=0.5, n_calls=64).gradient,
    "random": lambda m, x, t: baselines.random(m, x, t).gradient,
    "integrated": lambda m, x, t: baselines.integrated_hessians(m, x, t, of="softplus", beta=4.0, n_steps=4).hessian,
    "gradient_nid": lambda m, x, t: baselines.gradient_nid(m, x, t, of="softplus", beta=4.0).hessian,
    "taylor_cam": lambda m, x, t: baselines.taylor_cam(m, m[0], x, t, of="softplus", beta=4.0).hessian,
    "caso": lambda m, x, t: baselines.caso(m, x, t, radius=0.1).hessian,
    "smooth_hvp": lambda m, x, t: sh.smooth_hvp(m, x, np.ones(4), t, **OPTIONS),
    "sweep": lambda m, x, t: sh.sweep(m, x, [0.5], target=t, n_calls=64).results[0].hessian,
    "pmse": lambda m, x, t: sh.perturbation_mse(m, x, zero, 0.1, target=t, n_samples=20),
    "select": lambda m, x, t: evaluate.select(m, x, t, values=[0.4, 0.5], **SELECT).scores,
    "sanity": lambda m, x, t: torch.tensor(evaluate.sanity(m, x, t, sigma=0.5, n_calls=64, stages=1).checks[0].value),
    "diagnose": lambda m, x, t: sh.diagnose(m, x, t, sigma=0.5, n_calls=64).expected_flips,
    "global": lambda m, x, t: evaluate.global_interactions(SmoothHess(m), x, target=t, **OPTIONS).mean.value,
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_function_takes_arrays_and_predicted_targets(name):
    model = network(torch.float64)
    classes = model(X.double()).argmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = FUNCTIONS[name](model, X.numpy().astype(np.float32), "predicted")
        expected = FUNCTIONS[name](model, X.double(), classes)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_predicted_class_is_stated_in_the_result(tmp_path):
    model = network()
    classes = model(X).argmax(1)
    result = SmoothHess(model).attribute(X, "predicted", classes=["a", "b", "c"], **OPTIONS)
    torch.testing.assert_close(result.hessian, SmoothHess(model).attribute(X, classes, **OPTIONS).hessian)
    assert result.target[:, 0].tolist() == classes.tolist()
    assert result.predicted
    assert "target, the predicted class" in repr(result)
    result.save(tmp_path / "x.safetensors")
    assert sh.Interactions.load(tmp_path / "x.safetensors").predicted
    assert "class which the model predicts" in result.report(tmp_path / "x.html").read_text()
    assert not SmoothHess(model).attribute(X, 0, **OPTIONS).predicted


def test_predicted_classes_of_texts_and_of_several_inputs():
    words, head = nn.Embedding(10, 4), nn.Linear(4, 3)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def text(ids):
        return head(words(ids).mean(1).tanh())

    result = TokenSmoothHess(text, words).attribute(ids.numpy(), "predicted", sigma=0.1, n_calls=16)
    assert result.target[:, 0].tolist() == text(ids).argmax(1).tolist()
    both = SmoothHess(lambda a, b: torch.stack([a.sum(1), b.prod(1)], 1)).attribute(
        (X.numpy(), torch.ones(3, 2)), "predicted", **OPTIONS
    )
    assert both.target[:, 0].tolist() == torch.stack([X.sum(1), torch.ones(3)], 1).argmax(1).tolist()


def test_predicted_needs_classes():
    with pytest.raises(ValueError, match=r'"predicted" needs outputs \(N, C\) of several classes, got \(3,\)'):
        SmoothHess(lambda x: x.sum(1)).attribute(X, "predicted", **OPTIONS)
    with pytest.raises(ValueError, match="target must be \"predicted\", an index, .* got 'best'"):
        SmoothHess(network()).attribute(X, "best", **OPTIONS)
    with pytest.raises(TypeError, match="the model must return one tensor"):
        SmoothHess(lambda x: {"logits": x}).attribute(X, "predicted", **OPTIONS)


@pytest.mark.parametrize("target", [0, "predicted"])
def test_a_missing_batch_dimension_is_named(target):
    one = torch.zeros(3, 8, 8)
    for explain in (
        lambda: SmoothHess(images()).attribute(one, target, **OPTIONS),
        lambda: baselines.gradient(images(), one, target),
        lambda: NeuronSmoothHess(images(), "3").attribute(one, 0, **OPTIONS),
    ):
        text = r"inputs of shape \(3, 8, 8\) are 3 examples of shape \(8, 8\).* Pass inputs\[None\]\."
        with pytest.raises(ValueError, match=text):
            explain()
    assert len(SmoothHess(images()).attribute(one[None], target, **OPTIONS)) == 1
    with pytest.raises(ValueError, match=r"For a single example use x\[None\]"):
        SmoothHess(network()).attribute(X[0], 0, **OPTIONS)


def test_wrong_shapes_are_named_with_the_error_of_the_model():
    with pytest.raises(ValueError, match=r"fails at 2 input\(s\) of shape \(5,\): .*shapes cannot be multiplied"):
        SmoothHess(network()).attribute(torch.ones(2, 5), 0, **OPTIONS)
    with pytest.raises(ValueError, match="without a target the output must be"):
        SmoothHess(network()).attribute(X, **OPTIONS)


@pytest.mark.parametrize("model", [network, lambda dtype: images().to(dtype)])
def test_dtypes_that_do_not_fit_are_named(model):
    x = X if model is network else torch.zeros(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"float64, but .* are float32. Use inputs.float\(\), or model.double\(\)"):
        SmoothHess(model(torch.float32)).attribute(x.double(), 0, **OPTIONS)
    with pytest.raises(ValueError, match=r"float32, but .* are float64. Use inputs.double\(\), or model.float\(\)"):
        SmoothHess(model(torch.float64)).attribute(x, 0, **OPTIONS)
    for half in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=r"lost to rounding. Use model.float\(\), and precision='bf16' or 'fp16'"):
            SmoothHess(model(half)).attribute(x, 0, **OPTIONS)
        with pytest.raises(ValueError, match=r"lost to rounding. Use model.float\(\)"):
            SmoothHess(model(half)).attribute(x.numpy(), 0, **OPTIONS)
        with pytest.raises(TypeError, match=r"Use inputs.float\(\), and model.float\(\) for a model in half precision"):
            SmoothHess(model(half)).attribute(x.to(half), 0, **OPTIONS)


def test_a_model_that_converts_its_inputs_is_explained():
    model = network()
    result = SmoothHess(lambda x: model(x.float())).attribute(X.double(), 0, **OPTIONS)
    assert result.dtype == torch.float64


def test_columns_of_different_scales_are_noticed():
    model, x = network(), X * torch.tensor([1.0, 1.0, 1.0, 1e5])
    text = r"1 of 4 columns are larger than 1000 σ.* Standardise the columns, or pass a sigma per column"
    with pytest.warns(UserWarning, match=text) as caught:
        SmoothHess(model).attribute(x, 0, **OPTIONS)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SmoothHess(model).attribute(x, 0, sigma=x.std(0), n_calls=64)
        SmoothHess(model).attribute(1e5 * X, 0, **OPTIONS)  # one scale for all columns


def test_sigma_may_be_a_column_of_pandas():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X.double().numpy(), columns=list("abcd"))
    result = SmoothHess(network()).attribute(table, 0, sigma=0.25 * table.std(), n_calls=64)
    torch.testing.assert_close(result.gaussian.scales(4).double(), 0.25 * X.double().std(0))
    scaled, same = (result.top_pairs(3, scales=scales)[0] for scales in (table.std(), X.double().std(0)))
    assert [p.effect for p in scaled] == pytest.approx([p.effect for p in same])
    assert isinstance(sh.Dense.from_data(pandas.DataFrame(np.random.default_rng(0).normal(size=(9, 4)))), sh.Dense)


def test_baselines_may_be_arrays_and_rows_of_tables():
    pandas = pytest.importorskip("pandas")
    model, options = network(torch.float64), {"of": "softplus", "beta": 4.0, "n_steps": 4}
    table = pandas.DataFrame(X.numpy(), columns=list("abcd"))
    expected = baselines.integrated_hessians(model, X.double(), 0, baselines=X.double().mean(0), **options)
    for start in (X.double().mean(0).numpy(), table.astype(float).mean(), table.astype(float).mean().to_frame().T):
        found = baselines.integrated_hessians(model, table, 0, baselines=start, **options)
        torch.testing.assert_close(found.hessian, expected.hessian, rtol=1e-5, atol=1e-6)


def test_a_series_of_sigmas_follows_the_names_of_the_columns():
    """By position, the frozen column would be another one."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X.numpy(), columns=list("abcd"))
    sigma = pandas.Series({"d": 0.5, "b": 0.4, "c": 0.3, "a": 0.0})
    expected = SmoothHess(network()).attribute(X, 0, sigma=[0.0, 0.4, 0.3, 0.5], n_calls=64)
    result = SmoothHess(network()).attribute(table, 0, sigma=sigma, n_calls=64)
    torch.testing.assert_close(result.hessian, expected.hessian)
    counted = pandas.Series([0.0, 0.4, 0.3, 0.5])
    torch.testing.assert_close(
        SmoothHess(network()).attribute(table, 0, sigma=counted, n_calls=64).hessian, expected.hessian
    )
    with pytest.raises(ValueError, match="indexed by the 4 columns of the inputs, got 3 labels, without 'd'"):
        SmoothHess(network()).attribute(table, 0, sigma=sigma[["a", "b", "c"]], n_calls=64)
    with pytest.raises(ValueError, match="indexed by the 4 columns"):
        sh.diagnose(network(), table, 0, sigma=sigma.rename({"a": "z"}))


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_noise_far_larger_than_the_inputs_gives_a_warning(shift):
    model, x = network(), shift * X.abs()
    if not shift:  # inputs of zeros have no scale
        SmoothHess(model).attribute(x, 0, sigma=1000.0, n_calls=64)
        return
    with pytest.warns(UserWarning, match="sigma is 1000 times as large as the largest number of the inputs"):
        SmoothHess(model).attribute(x, 0, sigma=1000.0, n_calls=64)
