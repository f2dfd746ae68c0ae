import numpy as np
import pytest
import torch

from smoothhess.design import DESIGNS, find_design


@pytest.mark.parametrize("name", sorted(DESIGNS))
@pytest.mark.parametrize("k", [1, 2, 5, 64])
class TestContract:
    """What every design owes."""

    def test_rows_do_not_depend_on_how_they_are_asked_for(self, name, k):
        design = DESIGNS[name]
        whole = design.rows(3, 0, 200, k)
        parts = [design.rows(3, a, b, k) for a, b in [(0, 1), (1, 64), (64, 130), (130, 200)]]
        assert torch.equal(whole.z, torch.cat([p.z for p in parts]))
        assert torch.equal(whole.weight, torch.cat([p.weight for p in parts]))

    def test_float64_on_the_cpu_from_the_seed_alone(self, name, k):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        a, b = (DESIGNS[name].rows(7, 0, 10, k) for _ in range(2))
        assert torch.equal(a.z, b.z)
        assert a.z.dtype == torch.float64
        assert torch.equal(before, torch.get_rng_state())
        assert not torch.equal(a.z, DESIGNS[name].rows(8, 0, 10, k).z)

    def test_weighted_second_moment_is_the_identity(self, name, k):
        design = DESIGNS[name]
        rows = design.rows(0, 0, 64 * max(k, 64), k)
        second = (rows.weight[:, None] * rows.z).mT @ rows.z / len(rows)
        spread = (2 / len(rows)) ** 0.5
        assert (second - torch.eye(k)).abs().max() < 6 * spread


def test_draws_are_numpys_normals():
    """The stream is documented, not accidental: block b of seed s is default_rng([s, b])."""
    wanted = np.random.default_rng([5, 1]).standard_normal((3, 4))
    assert np.array_equal(find_design("antithetic").rows(5, 64, 67, 4).z.numpy(), wanted)


def test_unknown_design():
    with pytest.raises(ValueError, match="design must be one of .* got 'latin'"):
        find_design("latin")
