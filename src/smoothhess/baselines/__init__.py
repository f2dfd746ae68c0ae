"""Baselines for SmoothHess: other gradients, Hessians and second-order attributions of the same model.

Each method has its own module, and all of them return the result types of `smoothhess.result`. The evaluation of
methods belongs in `smoothhess.evaluate`.

>>> import torch
>>> from smoothhess import baselines
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
>>> baselines.softplus(net, torch.zeros(2, 4), target=0, beta=5.0).hessian.shape
torch.Size([2, 4, 4])
"""

from smoothhess.baselines.caso import cafo, caso
from smoothhess.baselines.cross_entropy import cross_entropy, gauss_newton
from smoothhess.baselines.gradient import gradient
from smoothhess.baselines.gradient_nid import gradient_nid, squared
from smoothhess.baselines.hessian import hessian
from smoothhess.baselines.integrated_hessians import integrated_hessians
from smoothhess.baselines.random import random
from smoothhess.baselines.smoothgrad import smoothgrad
from smoothhess.baselines.softplus import softplus
from smoothhess.baselines.swish import swish
from smoothhess.baselines.taylor_cam import taylor_cam, taylor_map

__all__ = [
    "cafo",
    "caso",
    "cross_entropy",
    "gauss_newton",
    "gradient",
    "gradient_nid",
    "hessian",
    "integrated_hessians",
    "random",
    "smoothgrad",
    "softplus",
    "squared",
    "swish",
    "taylor_cam",
    "taylor_map",
]
