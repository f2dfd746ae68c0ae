"""A data set shared by two processes: the records of one process, whatever happens on the way."""

import re
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from smoothhess import NeuronSmoothHess, SmoothHess
from smoothhess.datasets import Store, distributed, explain_dataset
from smoothhess.datasets.record_explainer import CheckedExplainer
from tests.datasets.distributed.cases import MASK, X, network
from tests.datasets.distributed.launch import torchrun

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "cluster.md"
INPUTS = torch.linspace(-1, 1, 24)[:, None].double() + X[0]
ASKED = {
    "target": 1,
    "sigma": 0.4,
    "n_calls": 32,
    "feature_mask": MASK,
    "pack_size": 2,
    "shard_seconds": 0.0,  # a shard for each pack
    "keep": "hessian",
}


def compare_with_one_process(store, folder):
    one = explain_dataset(SmoothHess(network()), INPUTS, folder, **ASKED)
    assert store.numbers == one.numbers == list(range(24))
    for shared, alone in zip(store, one, strict=True):
        torch.testing.assert_close(shared.hessian, alone.hessian, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(shared.stderr, alone.stderr, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(shared.gradient, alone.gradient, rtol=1e-9, atol=1e-12)
        assert (shared.n_calls, shared.status) == (alone.n_calls, alone.status)
    both = (s.summary() for s in (store, one))
    mine, yours = ((g.mean_square.value, g.mean_square.stderr, torch.tensor(len(g))) for g in both)
    torch.testing.assert_close(mine, yours, rtol=1e-9, atol=1e-12)


def test_a_killed_rank_ends_the_job_and_fewer_ranks_can_go_on(tmp_path):
    """Under torchrun, which ends the other rank: within seconds, with what was stored so far."""
    finished = torchrun("records_worker.py", tmp_path, "dies")
    assert finished.returncode != 0
    assert "Signal 9 (SIGKILL)" in finished.stderr, finished.stderr
    took = time.time() - float((tmp_path / "killed").read_text())
    assert took < 20
    first = {record.number: record.hessian for record in Store(tmp_path / "store")}
    assert 4 <= len(first) < 24
    store = distributed.explain_dataset(SmoothHess(network()), INPUTS, tmp_path / "store", **ASKED)
    assert all(torch.equal(store[number].hessian, hessian) for number, hessian in first.items())
    compare_with_one_process(store, tmp_path / "alone")


@pytest.mark.slow
def test_an_elastic_job_goes_on_by_itself(tmp_path):
    finished = torchrun("records_worker.py", tmp_path, "dies", options=("--max-restarts", "1"))
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "killed").exists()
    store = Store(tmp_path / "store")
    assert {shard.name.rank for shard in store.shards} == {0, 1}
    assert [(tmp_path / f"seen by {rank}").read_text() for rank in (0, 1)] == ["24", "24"]
    compare_with_one_process(store, tmp_path / "alone")


def test_a_single_process_does_it_all(tmp_path):
    store = distributed.explain_dataset(SmoothHess(network()), INPUTS, tmp_path / "store", **ASKED)
    compare_with_one_process(store, tmp_path / "alone")


def test_a_loader_that_splits_the_records_itself_is_refused(tmp_path):
    data = TensorDataset(INPUTS)
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(ValueError, match="DistributedSampler.*same loader on every rank"):
        distributed.explain_dataset(SmoothHess(network()), loader, tmp_path / "store", **ASKED)


def test_ranks_come_from_the_group(tmp_path):
    with pytest.raises(ValueError, match="rank and world_size come from the process group"):
        distributed.explain_dataset(SmoothHess(network()), INPUTS, tmp_path, rank=0, world_size=2, **ASKED)


@pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs")
def test_the_script_on_the_page_runs_alone(tmp_path, monkeypatch):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exec(compile(script, str(PAGE), "exec"), {})
    assert (tmp_path / "result.safetensors").exists()
    assert len(Store("store")) == 60


@pytest.mark.parametrize("kind", ["model", "neuron", "function"])
def test_a_checked_explainer_has_the_same_settings_and_results(kind, tmp_path):
    """Settings are compared when a job goes on, also by a single process."""

    class Others:
        n_checks = 0

        def check(self):
            self.n_checks += 1

    net, others = network(), Others()

    def function(x, target, seeds):
        return SmoothHess(net).attribute(x, 1, sigma=0.4, n_calls=16, seed=seeds)

    explainer = {"model": SmoothHess(net), "neuron": NeuronSmoothHess(net, "3"), "function": function}[kind]
    options = {} if kind == "function" else {"sigma": 0.4, "n_calls": 16}
    options |= {"model": {"target": 1}, "neuron": {"neuron_selector": 2}}.get(kind, {})
    checked = explain_dataset(
        CheckedExplainer(explainer, others.check, lambda about: None),
        INPUTS[:6],
        tmp_path / "a",
        pack_size=2,
        **options,
    )
    assert others.n_checks >= 3  # before each pack
    unchecked = explain_dataset(explainer, INPUTS[:6], tmp_path / "b", pack_size=2, **options)
    assert checked.settings == unchecked.settings
    assert all(torch.equal(a.hessian, b.hessian) for a, b in zip(checked, unchecked, strict=True))
