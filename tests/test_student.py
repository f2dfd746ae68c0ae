import numpy as np
import pytest
import torch
from scipy import stats

from smoothhess import student


@pytest.mark.parametrize("df", [0.5, 1.0, 2.0, 3.75, 10.0, 20.0, 50.0, 1e3, 1e6])
def test_agrees_with_scipy(df):
    t = torch.linspace(-8, 8, 65).double()
    wanted = 2 * stats.t.sf(t.abs().numpy(), df)
    np.testing.assert_allclose(student.two_sided_p(t, torch.tensor(df).double()).numpy(), wanted, rtol=1e-5)
    for level in (0.5, 0.95, 0.999):
        assert float(student.quantile(level, torch.tensor(df).double())) == pytest.approx(
            stats.t.ppf((1 + level) / 2, df), rel=1e-7
        )


def test_mixed_degrees_of_freedom():
    t, df = torch.full((3,), 2.0).double(), torch.tensor([1.0, 30.0, torch.inf]).double()
    wanted = [2 * stats.t.sf(2, 1), 2 * stats.t.sf(2, 30), 2 * stats.norm.sf(2)]
    np.testing.assert_allclose(student.two_sided_p(t, df).numpy(), wanted, rtol=1e-6)


def test_no_degrees_of_freedom_means_no_interval():
    assert student.quantile(0.95, torch.tensor([0.0])).isinf().all()
    with pytest.raises(ValueError, match="between 0 and 1"):
        student.quantile(1.0, torch.tensor([5.0]))
