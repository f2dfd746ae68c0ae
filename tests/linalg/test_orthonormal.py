"""Orthonormal rows by reflections and by Cholesky QR."""

import pytest
import torch

from smoothhess.linalg.orthonormal import cholesky_qr, gram_schmidt, orthonormal, triangular_inverse

pytestmark = pytest.mark.rounding


@pytest.mark.parametrize("made", [gram_schmidt, lambda rows: cholesky_qr(rows)[0]])
@pytest.mark.parametrize("shape", [(20, 30), (3, 5, 40)])
def test_gram_schmidt(made, shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    found = made(rows)
    torch.testing.assert_close(found @ found.mT, torch.eye(shape[-2]).double().expand(*shape[:-1], -1))
    lower = rows @ found.mT  # triangular, with a positive diagonal
    torch.testing.assert_close(lower, lower.tril(), rtol=0, atol=1e-12)
    assert bool((lower.diagonal(dim1=-2, dim2=-1) > 0).all())


@pytest.mark.parametrize("made", [orthonormal, gram_schmidt])
def test_dependent_rows_have_an_orthonormal_basis_that_holds_them(made):
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double() @ torch.eye(3, 9).double()
    found = made(rows)
    torch.testing.assert_close(found @ found.mT, torch.eye(5).double())
    torch.testing.assert_close(rows @ found.mT @ found, rows)


def test_products_that_lose_a_direction_say_so():
    parallel = torch.ones(60, 60).double() + 1e-12 * torch.randn(60, 60, generator=torch.Generator().manual_seed(0))
    assert all(found.isnan().all() for found in cholesky_qr(parallel.double()))


@pytest.mark.parametrize("k", [1, 5, 63, 64, 130, 200, 256, 517])
def test_the_inverse_of_a_triangle(k):
    rng = torch.Generator().manual_seed(k)
    lower = torch.linalg.cholesky(torch.eye(k).double() + torch.cov(torch.randn(k, 3 * k + 5, generator=rng).double()))
    found = triangular_inverse(lower)
    torch.testing.assert_close(found @ lower, torch.eye(k).double(), rtol=0, atol=1e-11)
    assert torch.equal(found, found.tril())
