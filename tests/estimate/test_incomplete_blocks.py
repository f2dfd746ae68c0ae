"""Incomplete orthogonal blocks: an unbiased estimate, exact for mean curvature, and its variance."""

import math
import warnings

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess, segments
from smoothhess.estimate.incomplete_blocks import Gram, Values, correct, missing_variance
from smoothhess.estimate.statistics import DrawRange

F64 = torch.float64


def quadratic(matrix):
    return lambda x: ((x @ matrix) * x).sum(1) / 2


def explain(f, d, runs, **options):
    """One result of `runs` examples at the same input, each with its own draws."""
    options = {"sigma": 0.5, "control": None, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SmoothHess(f).attribute(torch.zeros(runs, d, dtype=F64), seed=list(range(runs)), **options)


def multiple_eigenvalues(d, values, multiplicities):
    found = torch.zeros(d, dtype=F64)
    start = 0
    for value, count in zip(values, multiplicities, strict=True):
        found[start : start + count] = value
        start += count
    return torch.diag(found - found.mean())


class TestMeanCurvature:
    @pytest.mark.parametrize(("d", "calls"), [(6, 4), (20, 20), (64, 320), (100, 128)])
    def test_is_exact_from_a_part_of_a_block(self, d, calls):
        result = explain(quadratic(torch.eye(d, dtype=F64)), d, 3, n_calls=calls)
        torch.testing.assert_close(result.unshrunk().hessian, torch.eye(d, dtype=F64).expand(3, d, d))
        torch.testing.assert_close(result.hessian, torch.eye(d, dtype=F64).expand(3, d, d))

    def test_rounding_is_not_significant(self):
        result = explain(quadratic(torch.eye(100, dtype=F64)), 100, 2, n_calls=128)
        pairs = [pair for example in result.top_pairs(4950) for pair in example]
        assert not any(pair.significant for pair in pairs)
        assert all(pair.low <= 0 <= pair.high for pair in pairs)

    def test_of_columns_in_different_units(self):
        scales = torch.logspace(-2, 2, 12, dtype=F64)
        result = explain(quadratic(torch.diag(1 / scales**2)), 12, 2, sigma=0.5 * scales, n_calls=12)
        expected = torch.diag(1 / scales**2).expand(2, -1, -1)
        torch.testing.assert_close(
            result.unshrunk().hessian * scales * scales[:, None], expected * scales * scales[:, None]
        )

    def test_of_merged_parts_of_blocks(self):
        d = 30
        one, other = (
            SmoothHess(quadratic(torch.eye(d, dtype=F64))).attribute(
                torch.zeros(1, d, dtype=F64), sigma=0.5, n_calls=2 * rows, seed=seed, control=None
            )
            for rows, seed in ((10, 0), (17, 1))
        )
        torch.testing.assert_close(one.merge(other).unshrunk().hessian[0], torch.eye(d, dtype=F64))

    def test_of_groups(self):
        d, mask = 30, torch.arange(30) // 10
        whole = explain(quadratic(torch.eye(d, dtype=F64)), d, 2, n_calls=30)
        masked = explain(quadratic(torch.eye(d, dtype=F64)), d, 2, n_calls=30, feature_mask=mask, shrink=False)
        for sums in (whole.unshrunk().groups(mask), masked):
            torch.testing.assert_close(sums.hessian, 10 * torch.eye(3, dtype=F64).expand(2, 3, 3))

    def test_of_whole_segments(self):
        d, mask = 36, torch.arange(36) // 4
        result = explain(
            quadratic(torch.eye(d, dtype=F64)), d, 2, sigma=None, gaussian=segments.noise(mask, 0.5), n_calls=10
        ).groups(mask)
        torch.testing.assert_close(result.unshrunk().hessian, 4 * torch.eye(9, dtype=F64).expand(2, 9, 9))


MATRICES = {
    "rank 1": lambda d: 2 * torch.diag((torch.arange(d) < 1).to(F64)),
    "rank 5": lambda d: 2 * torch.diag((torch.arange(d) < 5).to(F64)),
    "half the rank": lambda d: 2 * torch.diag((torch.arange(d) < d // 2).to(F64)),
    "five-fold eigenvalue": lambda d: multiple_eigenvalues(d, [3.0, 0.0], [5, d - 5]),
    "± two-fold eigenvalues": lambda d: multiple_eigenvalues(d, [1.0, -1.0, 0.0], [2, 2, d - 4]),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("rows", [20, 30])  # with fewer, errors follow the estimates they belong to: limits.md
class TestQuadratics:
    d, runs = 40, 150

    def test_the_estimate_is_unbiased_and_intervals_hold(self, name, rows):
        matrix = MATRICES[name](self.d)
        result = explain(quadratic(matrix), self.d, self.runs, n_calls=2 * rows).unshrunk()
        error = result.hessian - matrix
        scatter = error.std(0).clamp_min(1e-12)
        score = error.mean(0) / scatter * math.sqrt(self.runs)
        assert score.abs().max() < 5  # of 820 different entries
        low, high = result.diagonal().interval()
        truth = matrix.diagonal()
        assert ((low <= truth) & (truth <= high)).double().mean() > 0.92
        row = result.row(0).interval()
        assert ((row[0] <= matrix[0]) & (matrix[0] <= row[1])).double().mean() > 0.92
        u, v = torch.ones(self.d, dtype=F64), torch.linspace(-1, 1, self.d, dtype=F64)
        for left, right in ((u, u), (u, v), (v, v)):
            low, high = result.bilinear(left, right).interval()
            truth = left @ matrix @ right
            assert ((low <= truth) & (truth <= high)).double().mean() > 0.88  # of 150

    def test_the_standard_errors_are_not_too_large(self, name, rows):
        turn = torch.linalg.qr(torch.randn(self.d, self.d, generator=torch.Generator().manual_seed(1), dtype=F64)).Q
        matrix = turn @ MATRICES[name](self.d) @ turn.mT
        result = explain(quadratic(matrix), self.d, self.runs, n_calls=2 * rows).unshrunk()
        scatter = (result.hessian - matrix).square().mean(0).sqrt()
        assert 0.8 < (result.stderr().median(0).values / scatter).median() < 1.35
        true = (result.hessian - matrix).norm(dim=(1, 2)) / matrix.norm()
        if rows >= self.d // 2:  # before, the noise may exceed the signal
            assert 0.8 < (result.relative_error / true).median() < 1.25


class TestVariance:
    def test_of_a_linear_field_is_the_formula(self):
        """Simulated projectors against C [½(|Wu|² + |Wv|²) + …], of which the skew shows the first terms."""
        k, m, runs = 12, 5, 40_000
        rng = torch.Generator().manual_seed(0)
        q = torch.linalg.qr(torch.randn(runs, k, m, generator=rng, dtype=F64)).Q
        matrix = multiple_eigenvalues(k, [2.0, -1.0, 0.0], [3, 3, 6])
        raw = k / m * q @ (q.mT @ matrix)
        skew, half = (raw - raw.mT) / 2, (raw + raw.mT) / 2
        result = explain(quadratic(matrix), k, 1, n_calls=2 * m)
        correction = correct(result.statistics)
        assert float(correction.mean.abs()) < 10  # the slope of the field, whatever it is, is subtracted
        zero = torch.zeros(1, dtype=F64)
        plain = type(correction)(correction.slope, correction.lift, zero, zero, correction.corrected, zero, zero, zero)
        for i, j in ((0, 1), (0, 4), (0, 9), (4, 5)):
            shown = (matrix[i] @ matrix[i] + matrix[j] @ matrix[j]) / 2 * correction.corrected
            values = Values(*(matrix[a, b].reshape(1) for a, b in ((i, i), (j, j), (i, j))))
            gram = Gram(torch.ones(1, dtype=F64), torch.ones(1, dtype=F64), zero)
            expected = shown + missing_variance(plain, values, gram, k)
            found = half[:, i, j].var()
            assert abs(float(found / expected) - 1) < 5 * math.sqrt(6 / runs) if expected > 1e-9 else found < 1e-9
        assert skew[:, 0, 1].abs().max() < 1e-9  # the same eigenvalue: the skew shows nothing

    def test_complete_blocks_need_no_correction(self):
        result = explain(quadratic(MATRICES["rank 5"](20)), 20, 2, n_calls=80)
        correction = correct(result.statistics)
        assert not correction.is_needed
        assert not correction.has_variance

    def test_pieces_of_blocks_that_begin_in_the_middle(self):
        result = explain(quadratic(MATRICES["rank 5"](20)), 20, 1, n_calls=20)
        stats = result.statistics
        assert stats.stream == ((DrawRange(0, 0, 10),),)
        more = SmoothHess(quadratic(MATRICES["rank 5"](20))).more(result, 20)
        assert not correct(more.statistics).is_needed


class TestRadialFunctions:
    @pytest.mark.parametrize("rows", [15, 30, 60])
    def test_noise_that_the_skew_cannot_show(self, rows):
        """f = ‖x‖⁴ at 0: γ is along z, so that no block has an antisymmetric half; H = 4σ²(d + 2) I."""
        d, runs = 30, 60
        result = explain(lambda x: x.square().sum(1).square(), d, runs, n_calls=2 * rows).unshrunk()
        truth = 4 * 0.25 * (d + 2) * torch.eye(d, dtype=F64)
        low, high = result.diagonal().interval()
        assert ((low <= truth.diagonal()) & (truth.diagonal() <= high)).double().mean() > 0.92
        true = (result.hessian - truth).norm(dim=(1, 2)) / truth.norm()
        assert 0.67 < (result.relative_error / true).median() < 1.5

    @pytest.mark.parametrize("rows", [30, 60])
    def test_the_value_is_covered(self, rows):
        """f = ‖x‖⁴ at 0 has the smoothed value σ⁴ d(d + 2), and two blocks may agree by chance."""
        d, runs = 30, 100
        result = explain(lambda x: x.square().sum(1).square(), d, runs, n_calls=2 * rows)
        low, high = result.value_estimate().interval()
        truth = 0.5**4 * d * (d + 2)
        assert ((low <= truth) & (truth <= high)).double().mean() > 0.92

    def test_a_quadratic_is_exact_from_one_block(self):
        result = explain(quadratic(MATRICES["rank 1"](8)), 8, 50, n_calls=16).unshrunk()
        assert result.stderr().max() < 1e-9


class TestFunctionsOfTheDistance:
    """exp(−|x − c|²/2w²), whose smoothed Hessian is known: its mean curvature errs with the lengths of the rows."""

    @staticmethod
    def bumps(d, centres, width, seed):
        rng = torch.Generator().manual_seed(seed)
        return width * torch.randn(centres, d, generator=rng, dtype=F64) / math.sqrt(d)

    @pytest.mark.parametrize("d", [10, 40])
    @pytest.mark.parametrize("blocks", [0.6, 1, 2])
    def test_are_covered_at_and_around_one_block(self, d, blocks):
        seeds, sigma, width = 200, 0.5, 1.2 * math.sqrt(d)
        c = self.bumps(d, 12, width, seed=d)
        result = explain(
            lambda x: torch.exp(-(x[:, None] - c).square().sum(-1) / 2 / width**2).sum(1),
            d,
            seeds,
            sigma=sigma,
            n_calls=2 * int(blocks * d),
        )
        spread = width**2 + sigma**2
        weight = (width**2 / spread) ** (d / 2) * torch.exp(-c.square().sum(1) / 2 / spread)
        truth = (c.mT * weight) @ c / spread**2 - weight.sum() / spread * torch.eye(d, dtype=F64)
        for estimate, exact in (
            (result.diagonal(), truth.diagonal()),
            (result.row(1), truth[1]),
            (result.bilinear(*torch.ones(2, seeds, d, dtype=F64)), truth.sum()),
        ):
            low, high = estimate.interval()
            assert float(((low <= exact) & (exact <= high)).double().mean()) > 0.92
        true = torch.linalg.matrix_norm(result.hessian - truth) / truth.norm()
        assert 0.6 < float((result.relative_error / true).median()) < 1.8


def test_groups_of_examples_with_different_numbers_of_rows():
    """A mask per example, and examples that stop at different times: all numbers are those of single examples."""
    rng = torch.Generator().manual_seed(4)
    net = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 1)).double()
    for p in net.parameters():
        p.data = 0.5 * torch.randn(p.shape, generator=rng, dtype=F64)
    x = torch.randn(4, 12, generator=rng).double() * torch.tensor([0.1, 1.0, 2.0, 4.0]).double()[:, None]
    masks = torch.stack([(torch.arange(12) // 4).roll(shift) for shift in (0, 1, 2, 5)])
    parts = [
        SmoothHess(net).attribute(
            x[i : i + 1], sigma=0.3, n_calls=n, feature_mask=masks[i : i + 1], shrink=False, control=None
        )
        for i, n in enumerate((10, 14, 14, 40))
    ]
    together = type(parts[0]).cat(parts)
    alone = torch.cat([p.relative_error for p in parts])
    torch.testing.assert_close(together.relative_error, alone, equal_nan=True)
    torch.testing.assert_close(together.stderr(), torch.cat([p.stderr() for p in parts]), equal_nan=True)
