"""What SmoothHess is compared with: other gradients and Hessians of the same model, read like its own results.

>>> import torch
>>> from smoothhess import rivals
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
>>> rivals.softplus(net, torch.zeros(2, 4), target=0, beta=5.0).hessian.shape
torch.Size([2, 4, 4])
"""

from smoothhess.rivals.channels import taylor_cam, taylor_map
from smoothhess.rivals.derivatives import gradient, hessian, random, smoothgrad
from smoothhess.rivals.entropy import cross_entropy, gauss_newton
from smoothhess.rivals.loss import cafo, caso
from smoothhess.rivals.path import integrated_hessians
from smoothhess.rivals.softened import softplus, swish
from smoothhess.rivals.squares import gradient_nid, squared

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
