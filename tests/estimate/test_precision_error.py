"""The upper limit of the rounding of gradients holds as often as it says, however few the directions."""

from itertools import product

import pytest
import torch

from smoothhess.estimate.precision_error import upper_ratio

SPECTRA = {
    "one direction": [1.0],
    "three": [1.0] * 3,
    "thirty": [1.0] * 30,
    "decaying": [0.5**i for i in range(20)],
    "one of many": [1.0] + [0.02] * 30,
}
TIMES, DRAWS = 8000, 4


@pytest.mark.parametrize(("rounding", "change"), list(product(SPECTRA, SPECTRA)))
def test_the_limit_holds_in_95_percent(rounding, change):
    generator = torch.Generator().manual_seed(0)

    def vectors(variances):
        return torch.randn(TIMES, DRAWS, len(variances), generator=generator) * torch.tensor(variances).sqrt()

    a, b = SPECTRA[rounding], SPECTRA[change]
    limit = upper_ratio(vectors(a), vectors(b))
    covered = float((limit >= (sum(a) / sum(b)) ** 0.5).float().mean())
    assert covered > 0.95 - 4 * (0.95 * 0.05 / TIMES) ** 0.5
    assert limit.median() < 2.7 * (sum(a) / sum(b)) ** 0.5


def test_zero_rounding_and_zero_changes():
    none, some = torch.zeros(1, 4, 5), torch.ones(1, 4, 5)
    assert upper_ratio(none, some) == 0
    assert upper_ratio(some, none) > 1e30
