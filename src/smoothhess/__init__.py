"""Pairwise feature interactions of differentiable models, with confidence intervals.

The package exports the public names and holds no code: the explainers are in `smoothhess.explainers`, the results in
`smoothhess.result`, other methods in `smoothhess.baselines`, and the comparison of methods in `smoothhess.evaluate`.

>>> import torch, smoothhess as sh
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).double()
>>> result = sh.SmoothHess(net).attribute(torch.zeros(1, 4).double(), target=0, radius=0.5, n_calls=400)
>>> result.hessian.shape, len(result.top_pairs(3)[0])
(torch.Size([1, 4, 4]), 3)
"""

from smoothhess.cli import early_interrupt as _early_interrupt  # noqa: F401  (before torch, which takes seconds)

# isort: split
from smoothhess import baselines, evaluate
from smoothhess._version import __version__ as __version__
from smoothhess.datasets import Store, explain_dataset
from smoothhess.draws.gaussian import Dense, Diagonal, Eigenbasis, Gaussian, Isotropic
from smoothhess.evaluate import attack, minimize_in_ball, perturbation_mse, sweep
from smoothhess.explainers.diagnose_model import diagnose
from smoothhess.explainers.interrupted import Interrupted
from smoothhess.explainers.smooth_hess import NeuronSmoothHess, SmoothHess, smooth_hvp
from smoothhess.explainers.token_smooth_hess import TokenSmoothHess
from smoothhess.model.external import from_gradient
from smoothhess.model.layer_functions import Embedded
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
    "minimize_in_ball",
    "perturbation_mse",
    "segments",
    "smooth_hvp",
    "sweep",
]
