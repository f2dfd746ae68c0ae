"""Which pairs of features act together inside a neural network, how strongly, and how sure are we?

>>> import torch, smoothhess as sh
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).double()
>>> result = sh.SmoothHess(net).attribute(torch.zeros(1, 4).double(), target=0, radius=0.5, n_calls=400)
>>> result.hessian.shape, len(result.top_pairs(3)[0])
(torch.Size([1, 4, 4]), 3)
"""

from smoothhess import evaluate, rivals, segments
from smoothhess.closed_form import ClosedForm
from smoothhess.dataset import Store, explain_dataset
from smoothhess.diagnosis import diagnose
from smoothhess.embedding import Embedded
from smoothhess.estimator import NeuronSmoothHess, SmoothHess, smooth_hvp
from smoothhess.evaluate import attack, minimize_in_ball, perturbation_mse, sweep
from smoothhess.gaussian import Dense, Diagonal, Eigenbasis, Gaussian, Isotropic
from smoothhess.interactions import Estimate, Interactions
from smoothhess.oracle import from_gradient
from smoothhess.pairs import Pair
from smoothhess.taylor import Taylor

__version__ = "0.1.0.dev0"

__all__ = [
    "ClosedForm",
    "Dense",
    "Diagonal",
    "Eigenbasis",
    "Embedded",
    "Estimate",
    "Gaussian",
    "Interactions",
    "Isotropic",
    "NeuronSmoothHess",
    "Pair",
    "SmoothHess",
    "Store",
    "Taylor",
    "attack",
    "diagnose",
    "evaluate",
    "explain_dataset",
    "from_gradient",
    "minimize_in_ball",
    "perturbation_mse",
    "rivals",
    "segments",
    "smooth_hvp",
    "sweep",
]
