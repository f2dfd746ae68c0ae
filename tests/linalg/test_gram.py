"""Gram matrices of local and dense columns."""

import pytest
import torch

from smoothhess.linalg import gram
from smoothhess.linalg.gram import Grams, inner, weighted_gram

pytestmark = pytest.mark.rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dense", [0, 5, 70])
def test_local_columns_give_the_gram_matrix_of_all_columns(dense, dtype):
    generator = torch.Generator().manual_seed(0)
    k, local = 60, 200
    columns = torch.zeros(k, local, dtype=torch.float64)
    for n, start in enumerate(torch.randint(0, k - 4, (local,), generator=generator).tolist()):
        columns[start : start + 4, n] = torch.randn(4, generator=generator).double()
    columns = torch.cat([columns, torch.randn(k, dense, generator=generator).double()], 1)
    columns = columns[:, torch.randperm(local + dense, generator=generator)].to(dtype)
    weight = torch.randn(local + dense, generator=generator).double()
    found, exact = weighted_gram(columns, weight), (columns.double() * weight) @ columns.double().mT
    torch.testing.assert_close(found, exact.to(dtype), rtol=0, atol=20 * torch.finfo(dtype).eps * float(exact.norm()))


def test_entries_below_rounding_do_not_make_columns_dense():
    columns = torch.full((300, 200), 1e-9)
    columns[torch.arange(200), torch.arange(200)] = 1.0
    found = weighted_gram(columns, torch.ones(200))
    assert int((found != 0).sum()) < 200 * 200
    torch.testing.assert_close(found, torch.diag((torch.arange(300) < 200).float()), rtol=0, atol=1e-8)


def test_no_columns_give_zero():
    assert torch.equal(weighted_gram(torch.ones(3, 0), torch.ones(0)), torch.zeros(3, 3))


def test_gram_matrices_do_not_depend_on_memory_that_others_take(monkeypatch):
    """On a GPU the size of a chunk follows from the free memory, which changes while other processes run."""
    rng = torch.Generator().manual_seed(0)
    odd, score = torch.randn(2, 5, 9, generator=rng), torch.randn(1, 5, 9, generator=rng)
    steps = iter([4, 3, 2, 1])
    monkeypatch.setattr(gram, "_step", lambda rows: next(steps))
    found = Grams.of(odd, score)
    torch.testing.assert_close(found.cross, odd.double() @ score.double().mT)
    torch.testing.assert_close(found.score, score.double() @ score.double().mT)
    torch.testing.assert_close(inner(odd, odd), odd.double() @ odd.double().mT)
