"""Draws shared by two processes: the numbers of one process, the same on every rank, for half of the work each."""

import json

import pytest
import torch
from torch import nn

from smoothhess import Interactions, SmoothHess
from smoothhess.datasets import distributed
from smoothhess.datasets.distributed.distributed_attribute import refuse_distributed_model
from smoothhess.datasets.distributed.shared_sampler import Stretch
from tests.datasets.distributed.cases import CASES, OPTIONS, Counter, X, network, plain
from tests.datasets.distributed.launch import torchrun

NUMBERS = "hessian gradient relative_error value output r2 gradient_stderr n_calls n_passes converged".split()


def alone(explainer, *args, **options):
    return explainer.attribute(*args, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two ranks found, each for itself."""
    path = tmp_path_factory.mktemp("ranks")
    finished = torchrun("equal_worker.py", path)
    assert finished.returncode == 0, finished.stderr
    return path


def of_rank(folder, name, rank):
    return Interactions.load(folder / f"{name} {rank}.safetensors")


@pytest.mark.filterwarnings("ignore:.*stopped at max_calls")
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_find_what_one_process_finds(folder, name):
    one, shared = CASES[name](alone, 1), of_rank(folder, name, 0)
    close = {"rtol": 1e-9, "atol": 1e-12} if one.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    for member in NUMBERS:
        torch.testing.assert_close(getattr(shared, member), getattr(one, member), **close, equal_nan=True)
    torch.testing.assert_close(shared.stderr(), one.stderr(), **close, equal_nan=True)
    for member in "status design seed control shrink unbiased tau_probes".split():
        assert getattr(shared, member) == getattr(one, member)
    assert shared.statistics.stream == one.statistics.stream
    torch.testing.assert_close(shared.statistics.tensors(), one.statistics.tensors(), **close)  # row by row


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_same_bits(folder, name):
    first, second = (of_rank(folder, name, rank) for rank in (0, 1))
    mine, yours = (result.statistics.tensors() for result in (first, second))
    assert mine.keys() == yours.keys()
    assert all(torch.equal(mine[key], yours[key]) for key in mine)
    assert torch.equal(first.n_passes, second.n_passes)
    for member in "status control control_note shrink unbiased precision".split():
        assert getattr(first, member) == getattr(second, member)


def test_the_cases_are_what_they_say(folder):
    """Otherwise agreement would prove little."""
    assert of_rank(folder, "defaults", 1).control == "kink"
    flips = of_rank(folder, "defaults", 1).control_weights[:, 1] > 0
    assert flips.any()  # frozen passes for each call of some examples,
    assert not flips.all()  # and not of others
    assert len(set(of_rank(folder, "adaptive", 1).n_calls.tolist())) > 1  # examples stop at different places
    assert of_rank(folder, "dense", 1).statistics.total is not None
    assert of_rank(folder, "groups, sampled", 1).statistics.total is not None
    assert of_rank(folder, "tau", 1).statistics.drift is not None
    assert of_rank(folder, "closed form in a few directions", 1).statistics.known.is_thin
    assert of_rank(folder, "another path", 1).control is None
    assert of_rank(folder, "another path", 0).control_note.startswith("rank 1: freeze wants the 2 recorded calls")
    assert of_rank(folder, "another path later", 0).control_note.startswith("rank 1: the model takes another path")


def test_each_rank_makes_half_of_the_calls(folder):
    rows = [json.loads((folder / f"about {rank}.json").read_text())["rows"] for rank in (0, 1)]
    calls = len(X) * (200 + 2)  # and the input itself, alone and in company
    assert rows[1] == calls
    search = 3 * 9  # for tail strata: two gradients and a frozen pass for each pair
    assert calls <= rows[0] <= calls + len(X) * (12 + search)  # which also checks whether kinks are independent


def test_only_rank_0_warns(folder):
    warned = [json.loads((folder / f"about {rank}.json").read_text())["warned"] for rank in (0, 1)]
    with pytest.warns(UserWarning, match="stopped at max_calls") as caught:
        plain(alone, 0, **OPTIONS["unfinished"])
    assert warned[0]["unfinished"] == [str(w.message) for w in caught]
    assert not any(warned[1].values())


def test_a_shared_result_goes_on_anywhere(folder):
    """More draws of the same stream, by a single process."""
    further = SmoothHess(network()).more(of_rank(folder, "sampled", 1), 40)
    torch.testing.assert_close(further.hessian, plain(alone, 0, control=None, n_calls=100).hessian)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.filterwarnings("ignore:.*stopped at max_calls")
def test_two_ranks_may_share_a_gpu(tmp_path):
    finished = torchrun("equal_worker.py", tmp_path, "cuda")
    assert finished.returncode == 0, finished.stderr
    for name, options in OPTIONS.items():
        one, shared = plain(alone, 0, "cuda", **options), of_rank(tmp_path, name, 1)
        for member in NUMBERS:
            expected = getattr(one, member).cpu()
            torch.testing.assert_close(getattr(shared, member), expected, rtol=1e-8, atol=1e-11, equal_nan=True)


# --- without other processes ------------------------------------------------------------------------------------------


def test_a_single_process_does_it_all():
    shared = plain(distributed.attribute, 0, n_calls=40)
    assert torch.equal(shared.hessian, plain(alone, 0, n_calls=40).hessian)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_all_rows_in_order_and_even(rows, count):
    shares = [Stretch((0,), ((0, 0),), 0, rows).share(rank, count) for rank in range(count)]
    assert [row for share in shares for row in share] == list(range(rows))
    sizes = [len(share) for share in shares]
    assert sizes[0] == max(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_processes_that_cannot_be_reached_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4 processes were started.*init_process_group"):
        distributed.attribute(SmoothHess(network()), X, target=0, sigma=0.1)


def test_a_model_that_talks_to_other_ranks_is_refused():
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapped = nn.Sequential(DistributedDataParallel(Counter()))
    with pytest.raises(ValueError, match=r"'0' is a DistributedDataParallel.*model.module"):
        refuse_distributed_model(lambda x: wrapped(x))
    refuse_distributed_model(wrapped[0].module)


def test_something_else_than_an_explainer_is_refused():
    with pytest.raises(TypeError, match="SmoothHess"):
        distributed.attribute(network(), X, sigma=0.1)
