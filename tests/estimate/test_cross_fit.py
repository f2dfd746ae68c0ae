"""Rows of an incomplete block, from which the denoised estimate of the other rows is subtracted."""

import math

import pytest
import torch

import smoothhess as sh
from smoothhess.estimate.cross_fit import CrossFit
from smoothhess.estimate.fit_rows import LEAST_ROWS, fit_rows
from smoothhess.estimate.statistics import concatenate
from smoothhess.estimate.variance import Noise

F64 = torch.float64


def kinked(d, width=10, sigma=0.3):
    """A network with one hidden layer, and its exact Hessian at zero."""
    rng = torch.Generator().manual_seed(width)
    a = torch.randn(width, d, generator=rng, dtype=F64) / math.sqrt(d)
    u, b = (torch.randn(width, generator=rng, dtype=F64) for _ in range(2))
    tau = sigma * a.norm(dim=1)
    density = torch.exp(-((b / tau) ** 2) / 2) / math.sqrt(2 * math.pi)
    return (lambda x: torch.relu(x @ a.mT + b) @ u), (a.mT * (u * density / tau)) @ a


def explain(f, d, rows, seeds=1, sigma=0.3):
    x = torch.zeros(seeds, d, dtype=F64)
    options = {"control": None, "shrink": False, "tails": None, "seed": range(seeds)}
    return sh.SmoothHess(f).attribute(x, sigma=sigma, n_calls=2 * rows, **options)


def fitted_noise(result):
    fit = fit_rows(result.statistics, result.gaussian)
    return Noise(result.noise.white, result.noise.features, result.gaussian, None, fit)


@pytest.mark.parametrize("rows", [LEAST_ROWS, 24, 40, 47])
def test_unbiased(rows):
    d, seeds = 48, 300
    f, truth = kinked(d)
    error = fitted_noise(explain(f, d, rows, seeds)).estimate.dense() - truth
    z = error.mean(0) / (error.std(0) / math.sqrt(seeds))
    assert 0.8 < z.square().mean().sqrt() < 1.25
    assert z.abs().max() < 5


def test_less_variance():
    d = 48
    f, truth = kinked(d)
    result = explain(f, d, 24, 60)
    without, fitted = ((h - truth).square().sum() for h in (result.hessian, fitted_noise(result).estimate.dense()))
    assert fitted < without / 1.25


def test_forms_are_those_of_the_dense_estimate():
    d = 48
    f, _ = kinked(d)
    noise = fitted_noise(explain(f, d, 24, 3))
    dense = noise.estimate.dense()
    rows = torch.randn(3, 5, d, dtype=F64, generator=torch.Generator().manual_seed(0))
    again = fitted_noise(explain(f, d, 24, 3)).estimate
    torch.testing.assert_close(again.product(rows), rows @ dense)
    torch.testing.assert_close(again.diagonal(), dense.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(again.squared_norm, dense.square().sum((-1, -2)))


def test_only_single_incomplete_blocks_are_fitted():
    d = 48
    f, _ = kinked(d)
    for rows, fits in ((LEAST_ROWS - 1, False), (LEAST_ROWS, True), (d - 1, True), (d, False), (d + 20, False)):
        result = explain(f, d, rows)
        assert (fit_rows(result.statistics, result.gaussian) is not None) == fits


def test_a_fit_in_parts_of_different_lengths():
    """Examples that stopped at different numbers of rows are fitted as if they were alone."""
    d = 48
    f, _ = kinked(d)
    both = [explain(f, d, rows).statistics for rows in (20, 30)]
    gaussian = sh.Isotropic(0.3)
    fit = fit_rows(concatenate(both), gaussian)
    assert isinstance(fit, CrossFit)
    for example, (stats, rows) in enumerate(zip(both, (20, 30), strict=True)):
        alone = fit_rows(stats, gaussian)
        assert alone is not None
        torch.testing.assert_close(fit.odd[example, :rows], alone.odd[0])
        torch.testing.assert_close(fit.added.dense()[example], alone.added.dense()[0])
