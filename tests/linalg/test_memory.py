"""Results are moved from a GPU to the host by what they hold, not by a bound."""

import torch
from torch import nn

from smoothhess import SmoothHess
from smoothhess.explainers.adaptive import too_large
from smoothhess.linalg.memory import stored_bytes


def test_results_are_measured_by_the_memory_they_hold():
    result = SmoothHess(nn.Linear(5, 2)).attribute(torch.zeros(3, 5), 1, sigma=0.1, n_calls=20)
    assert result.hessian.shape == (3, 5, 5)  # computed once, and held from then on
    held = stored_bytes(result.estimate)
    assert held >= 3 * 5 * 5 * 4
    assert not too_large([result], 3, held)
    assert too_large([result], 3, held - 1)
    assert too_large([result], 4, held)
