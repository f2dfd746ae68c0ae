import numpy as np
import pytest
import torch
from scipy import stats

from smoothhess.estimate import student_t


@pytest.mark.parametrize("df", [0.5, 1.0, 2.0, 3.75, 10.0, 20.0, 50.0, 1e3, 1e6])
def test_agrees_with_scipy(df):
    t = torch.linspace(-8, 8, 65).double()
    expected = 2 * stats.t.sf(t.abs().numpy(), df)
    np.testing.assert_allclose(student_t.two_sided_p(t, torch.tensor(df).double()).numpy(), expected, rtol=1e-5)
    for level in (0.5, 0.95, 0.999):
        assert float(student_t.quantile(level, torch.tensor(df).double())) == pytest.approx(
            stats.t.ppf((1 + level) / 2, df), rel=1e-7
        )


def test_mixed_degrees_of_freedom():
    t, df = torch.full((3,), 2.0).double(), torch.tensor([1.0, 30.0, torch.inf]).double()
    expected = [2 * stats.t.sf(2, 1), 2 * stats.t.sf(2, 30), 2 * stats.norm.sf(2)]
    np.testing.assert_allclose(student_t.two_sided_p(t, df).numpy(), expected, rtol=1e-6)


def test_no_degrees_of_freedom_means_no_interval():
    assert student_t.quantile(0.95, torch.tensor([0.0])).isinf().all()
    with pytest.raises(ValueError, match="between 0 and 1"):
        student_t.quantile(1.0, torch.tensor([5.0]))


def test_tables_agree_with_scipy():
    """Many t at once, near zero and far out, for few and for many degrees of freedom."""
    df = torch.tensor([0.0625, 0.75, 3.0, 19.5, 25.0, 60.0, 1e3, 1e5, torch.inf]).double()
    t = torch.cat([torch.linspace(0, 12, 300), torch.logspace(1, 30, 100)]).double().expand(len(df), -1)
    expected = np.stack([2 * (stats.norm if n == np.inf else stats.t(n)).sf(t[0].numpy()) for n in df.tolist()])
    found = student_t.Tails.of(df)(t).numpy()
    inside = expected > 1e-240  # where the tables end
    np.testing.assert_allclose(found[inside], expected[inside], rtol=2e-7)
    assert (found[~inside] < 1e-230).all()


def test_many_t_of_one_df_are_read_from_a_table():
    t = torch.linspace(0, 40, student_t.MANY).double()
    for df in (2.0, 60.0):
        expected = 2 * stats.t.sf(t.numpy(), df)
        np.testing.assert_allclose(student_t.two_sided_p(t, torch.tensor(df)).numpy(), expected, rtol=1e-7)


def test_tables_of_nothing_but_extremes():
    t = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0]).double()
    p = student_t.Tails.of(torch.tensor([4.0]))(t[None])[0]
    assert p[:2].tolist() == [0, 0]
    assert bool(p[2].isnan())
    assert float(p[3]) == 1
    assert float(student_t.Tails.of(torch.tensor([4.0]))(t[None, :2]).max()) == 0
