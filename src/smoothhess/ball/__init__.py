"""The lowest point of a quadratic in a ball: dense, factored or matrix-free, exact and proven.

>>> import torch
>>> minimize_in_ball(torch.tensor([[1.0, 0.0]]), torch.tensor([[[0.0, 0.0], [0.0, -1.0]]]), radius=2.0).norm()
tensor(2.)
"""

from smoothhess.ball.minimum import kkt_residual, minimize_in_ball
from smoothhess.ball.spectrum import Spectrum

__all__ = ["Spectrum", "kkt_residual", "minimize_in_ball"]
