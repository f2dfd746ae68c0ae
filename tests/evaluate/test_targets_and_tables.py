"""Every function with `target` takes target="predicted", arrays and tables, and gives the numbers of tensors."""

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import baselines, evaluate

X = torch.linspace(-1, 1, 8).sin().reshape(2, 4)
OPTIONS = {"sigma": 0.3, "n_calls": 16}


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


NET = network()
RESULT = sh.SmoothHess(NET).attribute(X, "predicted", **OPTIONS)
SURROGATE = RESULT.taylor()

FUNCTIONS = {
    "attribute": lambda x, t: sh.SmoothHess(NET).attribute(x, t, **OPTIONS).hessian,
    "smooth_hvp": lambda x, t: sh.smooth_hvp(NET, x, torch.ones(2, 4), t, **OPTIONS),
    "sweep": lambda x, t: sh.sweep(NET, x, [0.1, 0.2], target=t, n_calls=16).gradient,
    "perturbation_mse": lambda x, t: sh.perturbation_mse(NET, x, SURROGATE, 0.3, t, n_samples=20),
    "compare": lambda x, t: evaluate.compare(NET, x, {"a": SURROGATE}, [0.3], target=t, n_samples=20),
    "select": lambda x, t: evaluate.select(NET, x, t, radius=0.3, values=[0.1, 0.2], n_samples=20, n_calls=16).best,
    "across_models": lambda x, t: evaluate.across_models([NET, NET], x, t, **OPTIONS).mean.value,
    "global_interactions": lambda x, t: (
        evaluate.global_interactions(sh.SmoothHess(NET), x, target=t, sigma=0.3).mean.value
    ),
    "gradient": lambda x, t: baselines.gradient(NET, x, t).gradient,
    "softplus": lambda x, t: baselines.softplus(NET, x, t, beta=2.0).hessian,
    "swish": lambda x, t: baselines.swish(NET, x, t, beta=2.0).hessian,
    "smoothgrad": lambda x, t: baselines.smoothgrad(NET, x, t, **OPTIONS).gradient,
    "cafo": lambda x, t: baselines.cafo(NET, x, t, radius=0.1).gradient,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_predicted_class_of_arrays_and_tables_is_that_of_tensors(name):
    pandas = pytest.importorskip("pandas")
    function = FUNCTIONS[name]
    wanted = function(X, NET(X).argmax(1))
    for given in (X, X.numpy(), pandas.DataFrame(X.numpy(), columns=list("abcd"))):
        found = function(given, "predicted")
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
