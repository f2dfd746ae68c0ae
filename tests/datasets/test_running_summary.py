"""The summary of a store: signs that are rounding alone."""

import torch

from smoothhess.evaluate.global_summary import sign


def test_what_is_rounding_has_no_sign():
    """An entry that is zero up to rounding would change the mean absolute value with the size of a batch."""
    one = torch.tensor([[[1.0, 1e-9], [-1e-9, -0.5]]]).double()
    assert sign(one, one, torch.float32).tolist() == [[[1, 0], [0, -1]]]
    assert sign(one, one, torch.float64).tolist() == [[[1, 1], [-1, -1]]]
    assert not sign(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), torch.float32).any()
    assert sign(one, 1e3 * one, torch.float64)[0, 0, 1] == 1
