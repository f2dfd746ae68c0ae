"""Networks of scikit-learn give the same numbers as torch modules."""

import warnings

import numpy as np
import pytest
import torch

from smoothhess import SmoothHess, from_sklearn

pytest.importorskip("sklearn")
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

ACTIVATIONS = ["relu", "tanh", "logistic", "identity"]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 3)) * [1.0, 20.0, 300.0] + [0.0, 50.0, 2000.0]
SCORE = ((X - X.mean(0)) / X.std(0)) @ [1.0, -2.0, 0.5]


def fitted(estimator, y, x=X):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(x, y)


def mlp(kind, activation="relu"):
    return kind(hidden_layer_sizes=(12, 7), activation=activation, max_iter=20, random_state=0)


def outputs(estimator, x=X):
    return from_sklearn(estimator)(torch.tensor(x)).detach()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("classes", [2, 4])
def test_log_softmax_of_a_classifier_is_its_log_probability(activation, classes):
    y = np.digitize(SCORE, np.quantile(SCORE, np.linspace(0, 1, classes + 1)[1:-1]))
    model = fitted(make_pipeline(StandardScaler(), mlp(MLPClassifier, activation)), y)
    found = outputs(model)
    np.testing.assert_allclose(found.log_softmax(1), model.predict_log_proba(X), rtol=1e-6, atol=1e-8)
    assert (model.classes_[found.argmax(1)] == model.predict(X)).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_regressor_predicts_the_same(activation):
    model = fitted(make_pipeline(StandardScaler(), mlp(MLPRegressor, activation)), SCORE)
    np.testing.assert_allclose(outputs(model)[:, 0], model.predict(X), rtol=1e-8, atol=1e-8)
    several = fitted(mlp(MLPRegressor, activation), np.stack([SCORE, SCORE**2], 1), X / 1000)
    np.testing.assert_allclose(outputs(several, X / 1000), several.predict(X / 1000), rtol=1e-8, atol=1e-8)


def test_labels_of_a_multilabel_classifier_have_a_logit_each():
    model = fitted(mlp(MLPClassifier), np.stack([SCORE > 0, SCORE > 1], 1).astype(int), X / 1000)
    np.testing.assert_allclose(outputs(model, X / 1000).sigmoid(), model.predict_proba(X / 1000), rtol=1e-6)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("std", [False, True])
def test_a_scaler_may_keep_mean_or_scale(mean, std):
    scaler = StandardScaler(with_mean=mean, with_std=std)
    model = fitted(Pipeline([("a", scaler), ("none", None), ("mlp", mlp(MLPRegressor))]), SCORE)
    np.testing.assert_allclose(outputs(model)[:, 0], model.predict(X), rtol=1e-7)


def test_it_is_explained_in_raw_units():
    model = fitted(make_pipeline(StandardScaler(), mlp(MLPClassifier)), (SCORE > 0).astype(int))
    result = SmoothHess(from_sklearn(model)).attribute(X[:2], "predicted", sigma=0.25 * X.std(0), n_calls=64)
    assert result.predicted
    assert result.target[:, 0].tolist() == model.predict(X[:2]).tolist()


@pytest.mark.parametrize(
    ("estimator", "error", "text"),
    [
        (RandomForestClassifier(), TypeError, "got RandomForestClassifier.* use from_gradient.* Trees and"),
        (mlp(MLPClassifier), ValueError, r"the MLPClassifier is not fitted.* Call fit\(x, y\) first"),
        (
            make_pipeline(StandardScaler(), mlp(MLPRegressor)),
            ValueError,
            "StandardScaler .* is not fitted",
        ),
        (make_pipeline(MinMaxScaler(), mlp(MLPRegressor)), TypeError, "got a Pipeline of MinMaxScaler, MLPRegressor"),
        (make_pipeline(StandardScaler(), PCA(), mlp(MLPRegressor)), TypeError, "transform the inputs with the other"),
        (make_pipeline(StandardScaler()), TypeError, "got StandardScaler"),
        ("mlp", TypeError, "got str"),
    ],
)
def test_other_estimators_are_refused(estimator, error, text):
    with pytest.raises(error, match=text):
        from_sklearn(estimator)


def test_tables_must_have_the_columns_of_the_fit():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X / 1000, columns=["a", "b", "c"])
    model = from_sklearn(fitted(mlp(MLPRegressor), SCORE, table))
    options = {"sigma": 0.1, "n_calls": 64}
    expected = SmoothHess(model).attribute(X[:2] / 1000, 0, **options)
    torch.testing.assert_close(SmoothHess(model).attribute(table[:2], 0, **options).hessian, expected.hessian)
    with pytest.raises(ValueError, match="expected 'a' at position 0, got 'c'"):
        SmoothHess(lambda x: model(x) / 2).attribute(table[["c", "a", "b"]][:2], 0, **options)
    with pytest.raises(TypeError, match=r"got MLPRegressor\. Use from_sklearn"):
        SmoothHess(mlp(MLPRegressor))
