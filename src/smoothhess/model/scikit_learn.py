"""Networks of scikit-learn as torch modules: MLPClassifier, MLPRegressor, and pipelines that standardise first.

Models of other frameworks that return gradients are in `external`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid, "identity": nn.Identity}
EXPECTED = "a fitted MLPClassifier or MLPRegressor, or a Pipeline of a StandardScaler and one of them"


class FittedNetwork(nn.Sequential):
    """A network that knows the columns of the table that it was fitted on; None if it was fitted on an array."""

    feature_names: tuple[str, ...] | None = None


def from_sklearn(estimator: Any) -> nn.Sequential:
    """Make a torch module from a fitted neural network of scikit-learn.

    The module computes the same numbers in float64. With a StandardScaler in front its inputs are in raw units, so
    `sigma` needs one number per column, such as 0.25 times its standard deviation.

    Args:
        estimator: an MLPClassifier or MLPRegressor, or a Pipeline of a StandardScaler and one of them.

    Returns:
        A module (N, d) → (N, C). For a classifier the outputs are logits, in the order of its `classes_`: log_softmax
        of them is predict_log_proba (the two logits of a binary classifier are −z/2 and z/2, with the log-odds z); of
        a multilabel classifier, the logit of each label. For a regressor they are its predictions, one for each output.
        If the estimator was fitted on a DataFrame, explainers refuse tables with other columns, or in another order.

    Raises:
        TypeError: if the estimator is of another kind.
        ValueError: if it is not fitted, or if its output is neither linear nor that of a classifier.

    >>> import pytest; _ = pytest.importorskip("sklearn")
    >>> from sklearn.neural_network import MLPRegressor
    >>> x = np.random.default_rng(0).normal(size=(50, 2))
    >>> mlp = MLPRegressor(hidden_layer_sizes=(8,), max_iter=20, tol=1e9).fit(x, x.prod(1))
    >>> bool(np.allclose(from_sklearn(mlp)(torch.tensor(x)).detach()[:, 0], mlp.predict(x)))
    True
    """
    network, scaler = _steps(estimator)
    kind = type(network).__name__
    if not hasattr(network, "coefs_"):
        raise ValueError(f"the {kind} is not fitted, so it has no weights. Call fit(x, y) first.")
    if network.out_activation_ not in ("identity", "logistic", "softmax"):
        raise ValueError(
            f"the output of the {kind} is the {network.out_activation_!r} of its last layer, which is not supported. "
            "Use a network with a linear output, or from_gradient."
        )
    weights = [torch.tensor(np.asarray(w, dtype=np.float64)).T for w in network.coefs_]  # (out, in)
    biases = [torch.tensor(np.asarray(b, dtype=np.float64)) for b in network.intercepts_]
    if scaler is not None:  # W (x − mean)/scale + b = (W/scale) x + b − (W/scale) mean
        if scaler.scale_ is not None:
            weights[0] = weights[0] / torch.tensor(scaler.scale_)
        if scaler.with_mean:
            biases[0] = biases[0] - weights[0] @ torch.tensor(scaler.mean_)
    if network.out_activation_ == "logistic" and len(biases[-1]) == 1:  # a binary classifier
        weights[-1], biases[-1] = (torch.cat([-t, t]) / 2 for t in (weights[-1], biases[-1]))
    layers: list[nn.Module] = []
    for weight, bias in zip(weights, biases, strict=True):
        layers += [_linear(weight, bias), ACTIVATIONS[network.activation]()]
    module = FittedNetwork(*layers[:-1]).eval()
    columns = getattr(estimator, "feature_names_in_", None)
    module.feature_names = None if columns is None else tuple(map(str, columns))
    return module


def _steps(estimator: Any) -> tuple[Any, Any]:
    """The network of an estimator, and the fitted StandardScaler in front of it or None."""
    try:
        from sklearn.neural_network import MLPClassifier, MLPRegressor
        from sklearn.pipeline import Pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise ImportError("from_sklearn needs scikit-learn: pip install scikit-learn") from error
    steps = [step for _, step in estimator.steps] if isinstance(estimator, Pipeline) else [estimator]
    steps = [step for step in steps if step is not None and step != "passthrough"]
    kinds = [type(step).__name__ for step in steps]
    if not steps or not isinstance(steps[-1], MLPClassifier | MLPRegressor):
        raise TypeError(
            f"expected {EXPECTED}, got {' and '.join(kinds) or 'an empty Pipeline'}. For another differentiable model "
            "use from_gradient, with a function that returns values and gradients. Trees and forests have no gradient "
            "to smooth."
        )
    if len(steps) > 2 or (len(steps) == 2 and not isinstance(steps[0], StandardScaler)):
        raise TypeError(
            f"expected {EXPECTED}, got a Pipeline of {', '.join(kinds)}. Convert its last step, and transform the "
            "inputs with the other steps before."
        )
    scaler = steps[0] if len(steps) == 2 else None
    if scaler is not None and not hasattr(scaler, "n_features_in_"):
        raise ValueError("the StandardScaler of the Pipeline is not fitted. Call fit(x, y) first.")
    return steps[-1], scaler


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer
