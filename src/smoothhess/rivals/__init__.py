"""What SmoothHess is compared with: other gradients and Hessians of the same model, read like its own results.

>>> import torch
>>> from smoothhess import rivals
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
>>> rivals.softplus(net, torch.zeros(2, 4), target=0, beta=5.0).hessian.shape
torch.Size([2, 4, 4])
"""

from smoothhess.rivals.derivatives import gradient, hessian, random, smoothgrad
from smoothhess.rivals.softened import softplus, swish

__all__ = ["gradient", "hessian", "random", "smoothgrad", "softplus", "swish"]
