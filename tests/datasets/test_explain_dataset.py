"""Data sets explained into a store: packs, loaders, ranks, ends of all kinds, and nothing lost or doubled."""

import contextlib
import errno
import multiprocessing
import random
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from smoothhess import Isotropic, NeuronSmoothHess, SmoothHess
from smoothhess.datasets import Store, explain_dataset, record_explainer
from smoothhess.datasets.store import shard_reader, writer
from smoothhess.evaluate.global_interactions import global_interactions, record_seeds
from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.result.exact import Exact
from tests.datasets import job

CHEAP = {"sigma": 0.5, "n_calls": 8, "control": None}


def product(x):
    return x.prod(1)


def by_hand(x, target, seeds):
    """x₀x₁x₂ without noise."""
    h = x.new_zeros(len(x), 3, 3)
    for i, j, k in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        h[:, i, j] = h[:, j, i] = x[:, k]
    return Exact.make(x, product(x), x.prod(1, keepdim=True) / x, h, method="by hand")


EXACT, ROUNDED = {"rtol": 0, "atol": 0}, {"rtol": 1e-9, "atol": 1e-12}


def same(a: Store, b: Store, exactly: bool = True, in_order: bool = True) -> None:
    """The same records, bit for bit or up to rounding, and the same summary: bit for bit where summed in order."""
    rounding = EXACT if exactly else ROUNDED
    assert a.numbers == b.numbers
    for one, two in zip(a, b, strict=True):
        assert (one.number, one.status, one.target) == (two.number, two.status, two.target)
        for name in ("output", "value", "value_stderr", "relative_error", "r2", "n_calls", "n_passes"):
            torch.testing.assert_close(getattr(one, name), getattr(two, name), equal_nan=True, **rounding)
        for name in ("gradient", "gradient_stderr") + (() if a.keep == "pairs" else ("hessian", "stderr")):
            torch.testing.assert_close(getattr(one, name), getattr(two, name), **rounding)
        k = a.settings["n_pairs"]
        assert [(p.i, p.j) for p in one.top_pairs(k)] == [(p.i, p.j) for p in two.top_pairs(k)]
    if a.settings["summary"]:
        same_summary(a.summary(), b.summary(), **(rounding if in_order else ROUNDED))


def same_summary(a: GlobalInteractions, b: GlobalInteractions, **rounding) -> None:
    assert (len(a), a.n_calls, a.n_passes) == (len(b), b.n_calls, b.n_passes)
    for name, m in a.moments.items():
        torch.testing.assert_close(m.mean, b.moments[name].mean, **rounding)
        torch.testing.assert_close(m.squares, b.moments[name].squares, **rounding)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return job.run(tmp_path_factory.mktemp("store"))


# --- packs ------------------------------------------------------------------------------------------------------------


def test_a_record_is_what_the_explainer_finds_for_it_alone(undisturbed):
    x = job.data()
    for i in (0, 7, 11):
        alone = SmoothHess(job.network().double()).attribute(x[i : i + 1], 0, seed=record_seeds(0, i)[0], **CHEAP)
        record = undisturbed[i]
        torch.testing.assert_close(record.hessian, alone.hessian[0])
        torch.testing.assert_close(record.stderr, alone.stderr()[0])
        torch.testing.assert_close(record.gradient, alone.gradient[0])
        torch.testing.assert_close(record.gradient_stderr, alone.gradient_stderr[0])
        torch.testing.assert_close(record.relative_error, float(alone.relative_error))
        assert record.output == pytest.approx(float(alone.output))
        assert record.value == pytest.approx(float(alone.value))
        assert (record.n_calls, record.n_passes, record.status) == (8, float(alone.n_passes), "calls")
        for mine, other in zip(record.top_pairs(3), alone.top_pairs(3)[0], strict=True):
            assert mine[:3] == other[:3]
            assert mine[3:10] == pytest.approx(other[3:10])


@pytest.mark.parametrize("pack_size", [1, 7, 50])
@pytest.mark.parametrize("batch", [1, 10])
def test_neither_batches_nor_packs_change_a_result(undisturbed, tmp_path, pack_size, batch):
    net = SmoothHess(job.network().double())
    made = explain_dataset(net, job.data().split(batch), tmp_path, target=0, pack_size=pack_size, **CHEAP)
    same(undisturbed, made, exactly=False)


def test_adaptive_records_of_one_pack_stop_each_on_its_own(tmp_path):
    """Some with a closed form and some without, after different numbers of calls: as if each were alone."""
    net = job.network(16, 16).double()
    for p in net.parameters():
        p.data *= 2.5
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    options = {"radius": 4.0, "tol": 0.4, "max_calls": 256}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = explain_dataset(SmoothHess(net), x, tmp_path, target=1, keep="result", summary=False, **options)
        alone = [SmoothHess(net).attribute(x[i : i + 1], 1, seed=record_seeds(0, i)[0], **options) for i in range(5)]
    assert made.pack_size == 5
    assert len(set(made.column("n_calls").tolist())) > 1
    assert len({record.result.control for record in made}) == 2
    for record, one in zip(made, alone, strict=True):
        found = record.result
        assert (found.control, found.status, int(found.n_calls)) == (one.control, one.status, int(one.n_calls))
        assert float(found.n_passes) == float(one.n_passes)
        assert (found.statistics.known is None) == (one.statistics.known is None)
        torch.testing.assert_close(found.hessian, one.hessian, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found.relative_error, one.relative_error, rtol=1e-8, atol=1e-10)


def test_packs_that_do_not_fit_are_halved_once_and_for_all(undisturbed, tmp_path, monkeypatch):
    sizes, attribute = [], SmoothHess.attribute

    def hungry(self, inputs, *args, **options):
        sizes.append(len(inputs))
        if len(inputs) > 3:
            raise torch.OutOfMemoryError("too much")
        return attribute(self, inputs, *args, **options)

    monkeypatch.setattr(SmoothHess, "attribute", hungry)
    made = job.run(tmp_path, pack_size=12)
    same(undisturbed, made, exactly=False)
    assert sizes[:4] == [12, 6, 3, 3]
    assert max(sizes[2:]) == 3


# --- what can be explained --------------------------------------------------------------------------------------------


def test_loaders_of_all_kinds(tmp_path):
    x, labels = job.data(10), torch.arange(10) % 3
    net = SmoothHess(job.network().double())
    loaders = {
        "tensor": (x, {"target": labels}),
        "loader": (DataLoader(TensorDataset(x, labels), batch_size=4), {"target": lambda x, y: y}),
        "dictionaries": (
            [{"id": i, "pixels": x[i : i + 5], "label": labels[i : i + 5]} for i in (0, 5)],
            {"target": lambda batch: batch["label"], "key": "pixels"},
        ),
        "second": (((labels[i : i + 2], x[i : i + 2]) for i in range(0, 10, 2)), {"target": lambda y, x: y, "key": 1}),
    }
    made = {
        name: explain_dataset(net, loader, tmp_path / name, **options, **CHEAP)
        for name, (loader, options) in loaders.items()
    }
    assert [record.target for record in made["tensor"]] == [(int(y),) for y in labels]
    for other in list(made.values())[1:]:
        same(made["tensor"], other, exactly=False)


def test_predicted_targets(tmp_path):
    x, net = job.data(6), job.network().double()
    made = explain_dataset(SmoothHess(net), x.split(2), tmp_path, target="predicted", **CHEAP)
    assert [record.target for record in made] == [(c,) for c in net(x).argmax(1).tolist()]


def test_further_arguments_follow_their_records(tmp_path):
    """f = ½ xᵀA_b x + c·x with a matrix for each record: a whole block sees it without noise."""
    rng = torch.Generator().manual_seed(1)
    a = torch.randn(7, 3, 3, generator=rng, dtype=torch.float64)
    a = (a + a.mT) / 2
    c = torch.ones(2, 3, dtype=torch.float64)  # as many rows as a pack of two has records, yet shared by all of them
    model = SmoothHess(lambda x, m, c: torch.einsum("bi,bij,bj->b", x, m, x) / 2 + x @ c.sum(0))
    loader = DataLoader(TensorDataset(job.data(7), a), batch_size=5)
    options = {"additional_forward_args": lambda x, m: (m, c), "sigma": 0.7, "n_calls": 24, "control": None}
    for size in (2, 7):
        made = explain_dataset(model, loader, tmp_path / str(size), pack_size=size, **options)
        for record in made:
            torch.testing.assert_close(record.hessian, a[record.number])
    torch.testing.assert_close(made.summary().mean.value, a.mean(0))


def test_groups_neurons_and_functions(tmp_path):
    x, net = job.data(6), job.network().double()
    mask = torch.tensor([0, 1, 1])
    grouped = explain_dataset(SmoothHess(net), x, tmp_path / "a", target=0, feature_mask=mask, **CHEAP)
    alone = SmoothHess(net).attribute(x[2:3], 0, feature_mask=mask, seed=record_seeds(0, 2)[0], **CHEAP)
    torch.testing.assert_close(grouped[2].hessian, alone.hessian[0])
    assert grouped.summary().feature_shape == (2,)
    neuron = explain_dataset(NeuronSmoothHess(net, net[2]), x, tmp_path / "b", neuron_selector=4, **CHEAP)
    alone = NeuronSmoothHess(net, net[2]).attribute(x[2:3], 4, seed=record_seeds(0, 2)[0], **CHEAP)
    torch.testing.assert_close(neuron[2].hessian, alone.hessian[0])
    assert neuron.settings["layer"] == "2"
    exact = explain_dataset(by_hand, x, tmp_path / "c")
    assert float(exact[2].hessian[0, 1]) == float(x[2, 2])
    assert exact.summary().noise.abs().max() == 0
    same_summary(exact.summary(), global_interactions(by_hand, x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("gaussian", [None, Isotropic(0.5)])
def test_the_summary_is_that_of_the_same_records(tmp_path, gaussian):
    net, x = SmoothHess(job.network().double()), job.data(20)
    how_far = {"sigma": 0.5} if gaussian is None else {"gaussian": gaussian}
    made = explain_dataset(
        net, x, tmp_path, target=0, pack_size=6, n_calls=24, summary_calls=24, control=None, shard_seconds=0, **how_far
    )
    truth = global_interactions(net, x, target=0, n_calls=48, control=None, **how_far)
    same_summary(made.summary(), truth, rtol=1e-9, atol=1e-14)
    assert made.summary().segments == truth.segments


def test_unequal_halves_of_the_summary_are_unbiased(tmp_path):
    """A second estimate from fewer calls: E[H²] of a network with noise comes out, and noise is what the mean has."""
    x = torch.zeros(400, 4, dtype=torch.float64)  # one input many times, each with draws of its own
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for p in net.parameters():
            p.copy_(torch.randn_like(p))
    rough = {"sigma": 0.5, "n_calls": 16, "summary_calls": 4, "design": "iid", "control": None}
    made = explain_dataset(SmoothHess(lambda x: net(x)), x, tmp_path, keep="pairs", n_pairs=0, pack_size=200, **rough)
    found = made.summary()
    truth = SmoothHess(net).attribute(x[:1], sigma=0.5, n_calls=20_000).hessian[0]
    z = (found.mean_square.value - truth.square()) / found.mean_square.stderr
    assert float(z.abs().max()) < 4
    torch.testing.assert_close(found.noise / len(found), found.mean.stderr.square(), rtol=0.3, atol=0)


# --- ends and beginnings ----------------------------------------------------------------------------------------------


def test_what_is_stored_costs_no_call(undisturbed, tmp_path):
    calls = []

    def counting(x):
        calls.append(len(x))
        return x.prod(1)

    options = {"pack_size": 4, **CHEAP}
    explain_dataset(SmoothHess(counting), job.data()[:6], tmp_path, **options)
    calls.clear()
    assert len(explain_dataset(SmoothHess(counting), job.data()[:6], tmp_path, **options)) == 6
    assert calls == []
    grown = explain_dataset(SmoothHess(counting), job.data(), tmp_path, **options)  # more records came
    whole = explain_dataset(SmoothHess(counting), job.data(), tmp_path.parent / "whole", **options)
    same(grown, whole, exactly=False)


@pytest.fixture(scope="module")
def processes():
    """Children that are ready to work at once: the library is loaded before they are forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.datasets.job"])
    return context


def test_killed_at_random_moments(processes, undisturbed, tmp_path):
    """Kill −9, ten times; then exactly the records, and the summary, of a run that nobody disturbed."""
    moments, patience, kills, partial, rounds = random.Random(0), 0.3, 0, 0, 0
    folder, reached = tmp_path / "0", 0
    while kills < 10 or (not partial and kills < 40):
        started, ended = processes.Event(), processes.Event()
        child = processes.Process(target=job.run_and_tell, args=(folder, started, ended))
        child.start()
        assert started.wait(60)
        child.join(moments.uniform(0, patience))
        child.kill()
        child.join()
        if ended.is_set():  # it was faster: once more, somewhere else
            same(Store(folder), undisturbed)
            rounds += 1
            folder, reached, patience = tmp_path / str(rounds), 0, patience / 1.5
            continue
        kills += 1
        stored = check_whole(folder)
        assert stored >= reached  # nothing is lost
        partial += 0 < stored < job.RECORDS
        patience *= 1.3 if stored == reached else 1  # on a slow machine, wait for something to kill
        reached = stored
    same(job.run(folder), undisturbed)
    assert not list(folder.glob(".s*"))
    assert partial


def check_whole(folder) -> int:
    """How many records a killed job has left; no shard is half there, no record doubled, and the summary is theirs."""
    if not (folder / "store.json").exists():
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(folder)
    assert len(store) == sum(stop - start for shard in store.shards for start, stop in shard.spans)
    if len(store):
        assert len(store.summary()) == len(store)
    return len(store)


@pytest.mark.slow
def test_killed_before_every_step(processes, tmp_path):
    """Kill −9 before each change of the file system in turn; the summary is at all times that of the records."""
    whole = job.run(tmp_path / "whole", n=6)
    for step in range(200):
        folder = tmp_path / str(step)
        ended = processes.Event()
        child = processes.Process(target=job.run_until, args=(folder, step, ended))
        child.start()
        child.join()
        check_whole(folder)
        same(job.run(folder, n=6), whole)
        assert not list(folder.glob(".s*"))
        if ended.is_set():
            break
    assert step > 20


def test_temporary_files_of_a_killed_writer_do_not_count_and_are_removed(processes, undisturbed, tmp_path):
    """Also those of a rank that does not run again; those of a process that runs stay."""
    ready, ended = processes.Event(), processes.Event()
    child = processes.Process(target=job.begin_to_write, args=(tmp_path / "shard-0001-000000-abcd1234", ready, ended))
    child.start()
    assert ready.wait(60)
    (left,) = (path for path in tmp_path.rglob("*") if path.stat().st_size == 100_000)
    options = {"max_bytes": 60_000, "rank": 0, "world_size": 2}
    made = job.run(tmp_path, n=4, **options)
    assert made.n_bytes < 60_000
    assert left.exists()
    child.kill()
    child.join()
    job.run(tmp_path, n=6, **options)
    assert not left.exists()


def test_a_second_writer_is_refused(processes, tmp_path):
    job.run(tmp_path, n=2)
    ready, go = processes.Event(), processes.Event()
    child = processes.Process(target=job.hold, args=(tmp_path, ready, go))
    child.start()
    assert ready.wait(60)
    with pytest.raises(ValueError, match=rf"another process is writing .* as rank 0: process {child.pid} on "):
        job.run(tmp_path, n=4)
    go.set()
    child.join()
    assert len(job.run(tmp_path, n=4)) == 4


def test_ranks_share_a_store(undisturbed, tmp_path):
    for rank in (2, 0, 1):
        job.run(tmp_path, rank=rank, world_size=3)
    store = Store(tmp_path)
    assert {s.name.rank for s in store.shards} == {0, 1, 2}
    assert store[2].number == 2
    same(store, undisturbed, in_order=False)


def test_another_number_of_ranks_goes_on(undisturbed, tmp_path):
    job.run(tmp_path, n=8, rank=1, world_size=2)
    store = Store(tmp_path)
    assert store.numbers == [2, 3, 6, 7]
    assert store.missing(10) == [0, 1, 4, 5, 8, 9]
    job.run(tmp_path, n=9, rank=0, world_size=3)
    same(job.run(tmp_path), undisturbed, exactly=False)  # packs of one record were among them


def test_packs_are_small_enough_for_all_ranks(tmp_path):
    made = explain_dataset(by_hand, job.data(9), tmp_path, rank=1, world_size=4)
    assert made.pack_size == 3
    assert made.numbers == [3, 4, 5]


def test_an_error_on_the_way_keeps_what_was_done(undisturbed, tmp_path):
    poisoned = job.data()
    poisoned[7, 1] = torch.nan
    net = SmoothHess(job.network().double())
    with pytest.raises(ValueError, match="NaN or infinity"):
        explain_dataset(net, poisoned.split(2), tmp_path, target=0, pack_size=2, **CHEAP)
    assert Store(tmp_path).numbers == list(range(6))

    whole = job.network().double()

    def broken(x):
        if bool((x[:, 0] - job.data()[9, 0]).abs().min() < 1e-9):
            raise RuntimeError("out of paper")
        return whole(x)

    with pytest.raises(RuntimeError, match="out of paper") as caught:
        explain_dataset(SmoothHess(broken), job.data(), tmp_path / "b", target=0, pack_size=4, **CHEAP)
    assert "records 8 to 11" in caught.value.__notes__[0]
    assert Store(tmp_path / "b").numbers == list(range(8))
    made = explain_dataset(net, job.data().split(2), tmp_path, target=0, pack_size=2, **CHEAP)
    same(made, undisturbed)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"n_calls": 16}, "n_calls = 8, not 16"),
        ({"sigma": None, "radius": 0.5}, "sigma = 0.5, not None; radius = None, not 0.5"),
        ({"target": 1}, "target = 0, not 1"),
        ({"seed": 3}, "seed = 0, not 3"),
        ({"keep": "pairs"}, "keep = 'hessian', not 'pairs'"),
        ({"summary": False}, "summary = True, not False"),
        ({"shrink": False}, "shrink = True, not False"),
        ({"feature_mask": torch.tensor([0, 0, 1])}, "feature_mask = None, not 'int64 [3] "),
        ({"pack_size": 3}, "pack_size = 2, not 3"),
    ],
)
def test_other_settings_are_named(undisturbed, changed, said):
    before = {p.name: p.stat().st_mtime_ns for p in undisturbed.path.iterdir() if not p.name.startswith(".")}
    with pytest.raises(ValueError, match=re.escape(said)):
        job.run(undisturbed.path, **changed)
    assert before == {p.name: p.stat().st_mtime_ns for p in undisturbed.path.iterdir() if not p.name.startswith(".")}


def test_other_weights_data_and_stores_are_refused(undisturbed, tmp_path):
    net = job.network().double()
    with torch.no_grad():
        net[0].weight[0, 0] += 1e-3
    options = {"target": 0, "pack_size": 2, **CHEAP}
    with pytest.raises(ValueError, match="model = 'Sequential [0-9a-f]{16}', not 'Sequential"):
        explain_dataset(SmoothHess(net), job.data(), undisturbed.path, **options)
    net = job.network().double()
    logits, chances = (lambda x: net(x)), (lambda x: net(x).softmax(1))  # the same name, the same weights
    explain_dataset(SmoothHess(logits), job.data(4), tmp_path / "a", **options)
    explain_dataset(SmoothHess(chances), job.data(4), tmp_path / "a", **options)  # nothing to do, nothing is asked
    with pytest.raises(ValueError, match=r"f\(x\) of record 0 is .*was made with .*another model, target"):
        explain_dataset(SmoothHess(chances), job.data(6), tmp_path / "a", **options)
    for labels, said in ((0, None), (2, r"\(target \(2,\)\), but .* \(target \(0,\)\)")):
        asked = {**options, "target": lambda x, labels=labels: torch.full((len(x),), labels)}
        n = 4 if said is None else 6
        with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
            explain_dataset(SmoothHess(net), job.data(n), tmp_path / "b", **asked)
    with pytest.raises(ValueError, match=r"record 0 is not the one that was explained.*no shuffling"):
        explain_dataset(SmoothHess(net), job.data().flip(0), undisturbed.path, **options)
    with pytest.raises(ValueError, match="inputs = .*float64.*float32"):
        explain_dataset(SmoothHess(net.float()), job.data().float(), undisturbed.path, **options)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not a store and not empty: it has notes.txt"):
        job.run(other)
    assert [p.name for p in other.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="does not exist"):
        job.run(tmp_path / "no" / "folder")


def test_a_store_that_was_begun_in_error_is_begun_anew(undisturbed, tmp_path):
    with pytest.raises(ValueError, match="n_calls must be even"):
        job.run(tmp_path, n_calls=7)
    same(job.run(tmp_path), undisturbed)


def test_bad_loaders(tmp_path):
    x, net = job.data(6), SmoothHess(job.network().double())
    data = TensorDataset(x)
    for loader, error, said in [
        (data, TypeError, r"single records.*DataLoader"),
        (DataLoader(data, shuffle=True), ValueError, "shuffle=False"),
        ([], ValueError, "at least one batch"),
        ("abc", TypeError, "loader must be a tensor"),
        ([{"x": x}], ValueError, "dictionary with 'x': the entry of the inputs is not given"),
        ([object()], TypeError, "a batch must be"),
        ([x, x[:, :2]], ValueError, "one shape and dtype.*from record 6"),
        ([x, x.float()], ValueError, "one shape and dtype"),
    ]:
        with pytest.raises(error, match=said):
            explain_dataset(net, loader, tmp_path / "s", target=0, **CHEAP)
    with pytest.raises(ValueError, match="there is no 'y'"):
        explain_dataset(net, [{"x": x}], tmp_path / "s", key="y", **CHEAP)
    with pytest.raises(ValueError, match="tuple of 2 entries"):
        explain_dataset(net, [(x, x)], tmp_path / "s", key=5, **CHEAP)


def test_bad_arguments(tmp_path):
    x, net = job.data(4), SmoothHess(job.network().double())
    for options, error, said in [
        ({"keep": "all"}, ValueError, "keep must be 'pairs', 'hessian', 'result'"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size"),
        ({"rank": -1}, ValueError, "rank must be a whole number, 0 or more"),
        ({"seed": 0.5}, ValueError, "seed must be a whole number"),
        ({"pack_size": 0}, ValueError, "pack_size must be a whole number, 1 or more"),
        ({"target": "largest"}, ValueError, "predicted"),
        ({"colour": 3}, TypeError, "no option 'colour'"),
        ({"radius": 1.0}, ValueError, "one of"),
        ({"feature_mask": torch.zeros(4, 3, dtype=torch.long)}, ValueError, "shape of one input"),
    ]:
        with pytest.raises(error, match=said):
            explain_dataset(net, x, tmp_path / "s", **{**CHEAP, "target": 0, **options})
        assert not (tmp_path / "s").exists()
    with pytest.raises(TypeError, match="explainer must be"):
        explain_dataset(nn.Linear(3, 1), x, tmp_path / "s")
    with pytest.raises(ValueError, match="n_calls cannot be passed on to a function"):
        explain_dataset(by_hand, x, tmp_path / "s", n_calls=4)
    with pytest.raises(ValueError, match="neuron_selector"):
        explain_dataset(NeuronSmoothHess(net.forward_func, "0"), x, tmp_path / "s", sigma=1.0)


def test_too_many_features(tmp_path):
    x = torch.zeros(2, 20_001)
    net = SmoothHess(lambda x: x.square().sum(1))
    with pytest.raises(ValueError, match=r"20001 features are too many for a summary.*feature_mask"):
        explain_dataset(net, x, tmp_path / "a", **CHEAP)
    with pytest.raises(ValueError, match=r"20001 features are too many for matrices.*feature_mask"):
        explain_dataset(net, x, tmp_path / "a", summary=False, **CHEAP)
    slopes = explain_dataset(net, x, tmp_path / "b", summary=False, n_pairs=0, **CHEAP)
    assert slopes.keep == "pairs"
    assert slopes[0].gradient.shape == (20_001,)


# --- room -------------------------------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_beforehand(tmp_path):
    x = torch.zeros(1000, 300)
    calls = []

    def counting(x):
        calls.append(len(x))
        return x.square().sum(1)

    options = {"keep": "hessian", "summary": False, "max_bytes": 10_000_000, **CHEAP}
    with pytest.raises(ValueError, match=r"1000 record\(s\) of at least 365 kB need 365 MB.*feature_mask.*'pairs'"):
        explain_dataset(SmoothHess(counting), x, tmp_path / "s", **options)
    assert calls == []
    assert not (tmp_path / "s").exists()
    with pytest.raises(ValueError, match=r"1 record\(s\) of at least"):  # nobody knows how many will come
        explain_dataset(SmoothHess(counting), iter(x.split(10)), tmp_path / "s", **{**options, "max_bytes": 100_000})


@pytest.mark.parametrize("keep", ["pairs", "hessian", "result"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_record_takes_what_was_estimated(tmp_path, keep, grouped):
    """As far as numbers go; names and text come on top."""
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(40) // 4 if grouped else None
    net = SmoothHess(lambda x: (x[:, 1:] * x[:, :-1]).sum(1))
    asked = {"n_calls": 80, "sigma": 0.5, "control": None, "feature_mask": mask}
    estimate = record_explainer.Question.make(net, asked).sizes(x).record_bytes(keep, 20)
    made = explain_dataset(net, x, tmp_path, keep=keep, summary=False, **asked)
    numbers = 0
    with shard_reader.opened(made.path / made.shards[0].file) as file:
        for name in file.keys():  # noqa: SIM118
            if not name.startswith("shared."):
                tensor = file.get_tensor(name)
                numbers += tensor.numel() * tensor.element_size()
    assert 0.9 * numbers / 4 < estimate < 1.1 * numbers / 4


def test_max_bytes_stops_a_job_cleanly(undisturbed, tmp_path):
    """Where nobody knows how many records will come, the store ends before the limit and can be gone on with."""
    options = {"pack_size": 2, "shard_seconds": 0, "target": 0, **CHEAP}
    net = SmoothHess(job.network().double())
    with pytest.raises(ValueError, match=r"would exceed max_bytes=20_000.*is intact; 2 record\(s\).*larger max_bytes"):
        explain_dataset(net, iter(job.data().split(5)), tmp_path, max_bytes=20_000, **options)
    store = Store(tmp_path)
    assert 0 < len(store) < 12
    assert store.n_bytes <= 20_000
    assert len(store.summary()) == len(store)
    same(explain_dataset(net, iter(job.data().split(5)), tmp_path, max_bytes=1_000_000, **options), undisturbed)


def test_whole_results_larger_than_thought_are_noticed_at_once(tmp_path):
    """An adaptive run's size is known after its first pack."""
    net, x = SmoothHess(job.network().double()), job.data(200)
    options = {"target": 0, "sigma": 0.5, "tol": 0.01, "max_calls": 256, "control": None, "keep": "result"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"190 record\(s\) of at least .* kB"):
            explain_dataset(net, x, tmp_path, pack_size=10, max_bytes=400_000, summary=False, **options)
    assert len(Store(tmp_path)) == 10  # and the first pack is kept


def test_a_full_disk(undisturbed, tmp_path, monkeypatch):
    save, written = writer.save_file, []

    def full(tensors, path, metadata):
        written.append(path)
        if len(written) > 3:
            Path(path).write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(writer, "save_file", full)
    with pytest.raises(OSError, match=r"the disk is full: 2 record\(s\) could not be written.*unchanged") as caught:
        job.run(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    store = Store(tmp_path)
    assert store.numbers == list(range(6))
    assert len(store.summary()) == 6
    assert not list(tmp_path.glob(".shard*"))
    same(job.run(tmp_path), undisturbed)


def test_a_disk_that_is_full_for_the_summary_already(undisturbed, tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(self, path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    job.run(tmp_path, n=4)
    monkeypatch.setattr(GlobalInteractions, "save", full)
    with pytest.raises(OSError, match="the disk is full"):
        job.run(tmp_path)
    monkeypatch.undo()
    assert len(Store(tmp_path)) == len(Store(tmp_path).summary()) == 4
    same(job.run(tmp_path), undisturbed)


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [2, -1])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_an_unreadable_shard(undisturbed, tmp_path, which, damage):
    job.run(tmp_path)
    shard = Store(tmp_path).shards[which]
    path, (first, _) = tmp_path / shard.file, shard.spans[0]
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "garbage": b"\xff" * (len(data) + 1), "empty": b""}[damage])
    with pytest.warns(UserWarning, match=rf"1 of 6 shard\(s\) cannot be read.*{shard.file}.*delete this file"):
        store = Store(tmp_path)
    assert store.damaged[0].file == shard.file
    assert store.missing(12) == [first, first + 1]
    with pytest.raises(ValueError, match=f"record {first} is lost.*{shard.file}.*delete this file and run"):
        store[first]
    for other in store:  # all others can be read
        assert torch.equal(other.hessian, undisturbed[other.number].hessian)
    assert len(store.summary()) == 10  # rebuilt from the other shards
    with pytest.raises(ValueError, match=f"{shard.file}.*delete this file and run the same"):
        job.run(tmp_path)
    path.unlink()
    same(job.run(tmp_path), undisturbed, in_order=False)


def test_lost_shards_are_made_anew_by_other_ranks_too(undisturbed, tmp_path):
    """Records that a summary still has are not added to it twice, whoever makes them again."""
    for rank in (0, 1):
        job.run(tmp_path, rank=rank, world_size=2)
    lost = [s for s in Store(tmp_path).shards if s.name.serial in (0, 2)]
    for shard in lost:
        (tmp_path / shard.file).unlink()
    assert len(Store(tmp_path)) == 12 - 2 * len(lost)
    for rank in (2, 1, 0):
        job.run(tmp_path, rank=rank, world_size=3)
    same(Store(tmp_path), undisturbed, in_order=False)


def test_warnings_are_given_once(tmp_path):
    net = SmoothHess(job.network().double())
    options = {"target": 0, "sigma": 0.5, "tol": 1e-3, "max_calls": 64, "control": None, "pack_size": 2}
    with pytest.warns(UserWarning, match="stopped at max_calls") as caught:
        made = explain_dataset(net, job.data(8), tmp_path, **options)
    said = [str(w.message) for w in caught if "max_calls" in str(w.message)]
    assert 1 <= len(said) <= 2
    assert "records 0 to 1" in said[0]
    assert {record.status for record in made} == {"budget"}


def test_chance_is_left_alone(tmp_path):
    before = torch.random.get_rng_state(), random.getstate()
    x = job.data(4)
    kept = x.clone()
    explain_dataset(SmoothHess(job.network().double()), x, tmp_path, target=0, **CHEAP)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(x, kept)


def test_a_subclass_keeps_its_defaults(tmp_path):
    """Options that the user did not give are left to the explainer."""

    class Plain(SmoothHess):
        def attribute(self, inputs, target=None, additional_forward_args=None, **options):
            return super().attribute(inputs, target, additional_forward_args, **{"design": "iid", **options})

    store = explain_dataset(
        Plain(lambda x: x.prod(1)), torch.ones(3, 4), tmp_path / "s", sigma=0.3, n_calls=20, keep="result"
    )
    assert {record.result.design for record in store} == {"iid"}
