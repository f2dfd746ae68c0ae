"""Pairwise feature interactions of differentiable models, with confidence intervals.

The package exports the public names, imports the module of a name at its first use, and holds no other code: the
explainers are in `smoothhess.explainers`, the results in `smoothhess.result`, other methods in `smoothhess.baselines`,
and the comparison of methods in `smoothhess.evaluate`.

>>> import torch, smoothhess as sh
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).double()
>>> result = sh.SmoothHess(net).attribute(torch.zeros(1, 4).double(), target=0, radius=0.5, n_calls=400)
>>> result.hessian.shape, len(result.top_pairs(3)[0])
(torch.Size([1, 4, 4]), 3)
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from smoothhess._version import __version__ as __version__

if TYPE_CHECKING:
    from smoothhess import baselines, evaluate
    from smoothhess.datasets import Store, explain_dataset
    from smoothhess.draws.gaussian import Dense, Diagonal, Eigenbasis, Gaussian, Isotropic
    from smoothhess.evaluate import attack, minimize_in_ball, perturbation_mse, sweep
    from smoothhess.explainers.diagnose_model import diagnose
    from smoothhess.explainers.interrupted import Interrupted
    from smoothhess.explainers.smooth_hess import NeuronSmoothHess, SmoothHess, smooth_hvp
    from smoothhess.explainers.token_smooth_hess import TokenSmoothHess
    from smoothhess.model.external import from_gradient
    from smoothhess.model.layer_functions import Embedded
    from smoothhess.model.scikit_learn import from_sklearn
    from smoothhess.model.targets import continuation, contrast
    from smoothhess.result import segments
    from smoothhess.result.closed_form_hessian import ClosedForm
    from smoothhess.result.exact import Attribution, Exact
    from smoothhess.result.interactions import Interactions
    from smoothhess.result.intervals import Estimate
    from smoothhess.result.pairs import Pair
    from smoothhess.result.taylor import Taylor

__all__ = [
    "Attribution",
    "ClosedForm",
    "Dense",
    "Diagonal",
    "Eigenbasis",
    "Embedded",
    "Estimate",
    "Exact",
    "Gaussian",
    "Interactions",
    "Interrupted",
    "Isotropic",
    "NeuronSmoothHess",
    "Pair",
    "SmoothHess",
    "Store",
    "Taylor",
    "TokenSmoothHess",
    "attack",
    "baselines",
    "continuation",
    "contrast",
    "diagnose",
    "evaluate",
    "explain_dataset",
    "from_gradient",
    "from_sklearn",
    "minimize_in_ball",
    "perturbation_mse",
    "segments",
    "smooth_hvp",
    "sweep",
]

# torch is imported with the first of these names: the command line prints its help and most errors without it
_PLACES = {
    "Attribution": "smoothhess.result.exact:Attribution",
    "ClosedForm": "smoothhess.result.closed_form_hessian:ClosedForm",
    "Dense": "smoothhess.draws.gaussian:Dense",
    "Diagonal": "smoothhess.draws.gaussian:Diagonal",
    "Eigenbasis": "smoothhess.draws.gaussian:Eigenbasis",
    "Embedded": "smoothhess.model.layer_functions:Embedded",
    "Estimate": "smoothhess.result.intervals:Estimate",
    "Exact": "smoothhess.result.exact:Exact",
    "Gaussian": "smoothhess.draws.gaussian:Gaussian",
    "Interactions": "smoothhess.result.interactions:Interactions",
    "Interrupted": "smoothhess.explainers.interrupted:Interrupted",
    "Isotropic": "smoothhess.draws.gaussian:Isotropic",
    "NeuronSmoothHess": "smoothhess.explainers.smooth_hess:NeuronSmoothHess",
    "Pair": "smoothhess.result.pairs:Pair",
    "SmoothHess": "smoothhess.explainers.smooth_hess:SmoothHess",
    "Store": "smoothhess.datasets:Store",
    "Taylor": "smoothhess.result.taylor:Taylor",
    "TokenSmoothHess": "smoothhess.explainers.token_smooth_hess:TokenSmoothHess",
    "attack": "smoothhess.evaluate:attack",
    "baselines": "smoothhess.baselines",
    "continuation": "smoothhess.model.targets:continuation",
    "contrast": "smoothhess.model.targets:contrast",
    "diagnose": "smoothhess.explainers.diagnose_model:diagnose",
    "evaluate": "smoothhess.evaluate",
    "explain_dataset": "smoothhess.datasets:explain_dataset",
    "from_gradient": "smoothhess.model.external:from_gradient",
    "from_sklearn": "smoothhess.model.scikit_learn:from_sklearn",
    "minimize_in_ball": "smoothhess.evaluate:minimize_in_ball",
    "perturbation_mse": "smoothhess.evaluate:perturbation_mse",
    "segments": "smoothhess.result.segments",
    "smooth_hvp": "smoothhess.explainers.smooth_hess:smooth_hvp",
    "sweep": "smoothhess.evaluate:sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = resolve_name(_PLACES[name])
    return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
