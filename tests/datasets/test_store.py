"""Stores read back: records of every detail, the index and its loss, and files that do not belong."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from smoothhess import Dense, SmoothHess, datasets
from smoothhess.datasets import Record, Store, explain_dataset
from smoothhess.datasets.job_settings import described, differences, fingerprint
from smoothhess.datasets.store import shard_reader
from smoothhess.datasets.store.job_manifest import known_store
from smoothhess.datasets.store.shard_files import MANIFEST, Name, numbers_in, spans
from smoothhess.evaluate.global_interactions import record_seeds
from smoothhess.model.json_checksum import with_checksum
from smoothhess.result.exact import Exact
from tests.datasets import job

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "datasets.md"
CHEAP = {"sigma": 0.5, "n_calls": 8, "control": None, "target": 0}


# --- reading ----------------------------------------------------------------------------------------------------------


def test_reading(made):
    store = Store(made.path)
    assert len(store) == 12
    assert store.numbers == list(range(12))
    assert 3 in store
    assert 12 not in store
    assert "3" not in store
    assert store.missing(14) == [12, 13]
    assert store.missing() == []
    assert [record.number for record in store] == store.numbers
    assert isinstance(store[3], Record)
    assert store.settings["n_calls"] == 8
    assert store.damaged == ()
    assert store.n_bytes == sum(p.stat().st_size for p in made.path.iterdir())
    assert store.column("output").tolist() == [record.output for record in store]
    assert repr(store).startswith(f"Store {made.path}: 12 records, numbers 0 to 11; keep='hessian', Sequential ")
    assert re.match(r"Record 3: f\(x\) = .*, 8 calls, stopped by calls\n  \d × \d: .* ± ", repr(store[3]))
    with pytest.raises(IndexError, match=r"record 12 is not in .*12 records, numbers 0 to 11"):
        store[12]
    with pytest.raises(IndexError, match="record -1"):
        store[-1]
    with pytest.raises(TypeError, match="one by one"):
        store[1:3]  # type: ignore[index]
    with pytest.raises(ValueError, match="a column is one of output"):
        store.column("hessian")


def test_a_store_that_grows_is_seen_when_it_is_opened(made, tmp_path):
    old = job.run(tmp_path, n=4)
    job.run(tmp_path, n=6)
    assert len(old) == 4
    assert len(Store(tmp_path)) == 6


@pytest.mark.parametrize("keep", ["pairs", "hessian", "result"])
def test_every_detail(tmp_path, keep):
    net, x = SmoothHess(job.network(5).double()), job.data(5, 5)
    store = explain_dataset(net, x, tmp_path, keep=keep, n_pairs=4, **CHEAP)
    truth = net.attribute(x, seed=[s for s, _ in (record_seeds(0, i) for i in range(5))], **CHEAP)
    for record, one in zip(store, truth, strict=True):
        torch.testing.assert_close(record.gradient, one.gradient[0])
        for mine, other in zip(record.top_pairs(4), one.top_pairs(4)[0], strict=True):
            assert mine[:3] == other[:3]
            assert mine[3:10] == pytest.approx(other[3:10])
        assert record.top_pairs(2, names="abcde")[0].names == tuple("abcde"[i] for i in record.top_pairs(2)[0][:2])
        if keep == "pairs":
            with pytest.raises(ValueError, match=r"matrices were not kept \(keep='pairs'\).*keep='hessian'"):
                _ = record.hessian
        else:
            torch.testing.assert_close(record.hessian, one.hessian[0])
            torch.testing.assert_close(record.stderr, one.stderr()[0])
        if keep == "result":
            torch.testing.assert_close(record.result @ torch.ones(5).double(), one @ torch.ones(5).double())
            more = net.more(record.result, 8)  # a whole result can be gone on with
            assert int(more.n_calls) == 16
        else:
            with pytest.raises(ValueError, match="results were not kept"):
                _ = record.result
            with pytest.raises(ValueError, match="between 1 and 4 pairs"):
                record.top_pairs(5)


def test_images_and_single_features(tmp_path):
    x = torch.randn(3, 1, 2, 2, generator=torch.Generator().manual_seed(0)).double()
    options = {"sigma": 0.5, "n_calls": 16, "control": None}
    store = explain_dataset(SmoothHess(lambda x: x.flatten(1).prod(1)), x, tmp_path / "a", **options)
    assert store[1].gradient.shape == (1, 2, 2)
    assert store[1].hessian.shape == (4, 4)
    assert store[1].top_pairs(1)[0].names[0].startswith("(0, ")
    lone = explain_dataset(SmoothHess(lambda x: x[:, 0] ** 2), x[:, 0, 0, :1], tmp_path / "b", **options)
    torch.testing.assert_close(lone[2].hessian, torch.tensor([[2.0]]).double())
    assert lone[2].top_pairs(3) == []


@pytest.mark.parametrize("keep", ["hessian", "result"])
def test_results_that_were_not_sampled(tmp_path, keep):
    def exactly(x, target, seeds):
        return Exact.make(x, x.square().sum(1) / 2, x, torch.eye(3).double().expand(len(x), 3, 3), method="by hand")

    store = explain_dataset(exactly, job.data(4), tmp_path, keep=keep)
    assert torch.equal(store[3].hessian, torch.eye(3).double())
    assert store[3].status == "exact"
    if keep == "result":
        assert store[3].result.method == "by hand"

    def matrix_free(x, target, seeds):
        return Exact.make(x, x.square().sum(1) / 2, x, operator=lambda rows: rows)

    if keep == "result":
        with pytest.raises(ValueError, match=r"matrix-free Hessian .* keep='hessian'"):
            explain_dataset(matrix_free, job.data(4), tmp_path / "b", keep=keep, summary=False)
    else:
        store = explain_dataset(matrix_free, job.data(4), tmp_path / "b", keep=keep)
        assert torch.equal(store[3].hessian, torch.eye(3).double())


def test_what_all_records_share_is_kept_once(tmp_path):
    covariance = torch.eye(20).double() + 0.1
    mask = torch.arange(20) // 5
    options = {"gaussian": Dense(covariance), "n_calls": 4, "control": None, "keep": "result", "summary": False}
    net, x = SmoothHess(lambda x: x.prod(1)), job.data(6, 20)
    store = explain_dataset(net, x, tmp_path, feature_mask=mask, pack_size=3, shard_seconds=60, **options)
    with shard_reader.opened(tmp_path / store.shards[0].file) as file:
        names = file.keys()
    assert len([n for n in names if "gaussian" in n]) == len([n for n in names if n.startswith("shared.gaussian")])
    assert torch.equal(store[5].result.grouping.mask, mask[None])
    assert store[4].result.gaussian.same_as(store[1].result.gaussian)
    torch.testing.assert_close(store[5].result.inputs, x[5:6])


def test_no_summary(tmp_path, made):
    store = explain_dataset(SmoothHess(job.network().double()), job.data(2), tmp_path, summary=False, **CHEAP)
    with pytest.raises(ValueError, match=r"no summary was kept \(summary=False\)"):
        store.summary()
    assert not list(tmp_path.glob("summary*"))


# --- index and manifest -----------------------------------------------------------------------------------------------


def test_a_lost_index_is_made_again(made, copy):
    index = copy / "index-0000.jsonl"
    before = index.read_text()
    index.unlink()
    assert Store(copy).numbers == made.numbers
    job.run(copy)
    assert sorted(index.read_text().splitlines()) == sorted(before.splitlines())


def test_an_index_line_that_was_cut_short(made, copy):
    index = copy / "index-0000.jsonl"
    index.write_text(index.read_text()[:-60])
    assert Store(copy).numbers == made.numbers
    job.run(copy, n=14)
    assert Store(copy).numbers == list(range(14))
    lines = index.read_text().splitlines()
    assert len([line for line in lines if line.endswith("}") and "shard" in line]) == 7


def test_shards_of_another_job(made, copy, tmp_path):
    other = job.run(tmp_path / "other", n=2, seed=7)
    foreign = other.path / other.shards[0].file
    shutil.copy(foreign, copy / Name(0, 77, "00000000").file("shard"))
    with pytest.warns(UserWarning, match="belongs to another job. Remove it"):
        assert Store(copy).numbers == made.numbers
    with pytest.raises(ValueError, match="belongs to another job"):
        job.run(copy)
    path = copy / Name(0, 77, "00000000").file("shard")
    save_file({"a": torch.zeros(1)}, path)
    with pytest.warns(UserWarning, match="was not written by explain_dataset"):
        Store(copy)


def test_files_of_other_kinds_are_no_concern(made, copy):
    (copy / "README.txt").write_text("mine")
    (copy / "shard-1.safetensors").write_text("not one of ours")
    assert Store(copy).numbers == made.numbers


def test_other_versions_and_things_that_are_no_store(copy, tmp_path):
    manifest = copy / "store.json"
    about = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(with_checksum({**about, "version": 2})))
    with pytest.raises(ValueError, match="version 2 of the format, this smoothhess reads and writes version 1"):
        Store(copy)
    with pytest.raises(ValueError, match="version 2 of the format"):
        job.run(copy)
    manifest.write_text(json.dumps(with_checksum({**about, "format": "photos"})))
    with pytest.raises(ValueError, match="expected format 'smoothhess.store', got 'photos'"):
        Store(copy)
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"store.json is damaged"):
        Store(copy)
    with pytest.raises(FileNotFoundError, match="no store"):
        Store(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"it has no store.json"):
        Store(tmp_path)


def test_bytes_that_changed_under_the_index(made, copy):
    """Same size, so the index says nothing: it is met when it is read, and named."""
    shard = made.shards[1]
    (copy / shard.file).write_bytes(b"\xff" * shard.n_bytes)
    store = Store(copy)
    with pytest.raises(ValueError, match=f"{shard.file} cannot be read.*delete this file"):
        store[2]
    assert torch.equal(store[4].hessian, made[4].hessian)


# --- small parts ------------------------------------------------------------------------------------------------------


def test_spans():
    numbers = [0, 1, 2, 5, 9, 10]
    assert spans(numbers) == ((0, 3), (5, 6), (9, 11))
    assert numbers_in(spans(numbers)).tolist() == numbers
    assert numbers_in(()).tolist() == []


def test_settings_in_words():
    net = job.network()
    assert described({"a": (1, 2.5, None, True), "b": torch.tensor(3)}) == {"a": [1, 2.5, None, True], "b": 3}
    assert described(torch.zeros(2)) != described(torch.ones(2))
    assert described(Dense(torch.eye(2))) == described(Dense(torch.eye(2)))
    assert described(Dense(torch.eye(2))) != described(Dense(2 * torch.eye(2)))
    assert fingerprint(net) == fingerprint(job.network())
    assert fingerprint(lambda x: net(x).softmax(1)) == f"<lambda> of {fingerprint(net)}"
    assert fingerprint(torch.sin) == "function sin"
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": (2,), "c": 0}) == ["b = 2, not [2]", "c = None, not 0"]


@pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs")
@pytest.mark.skipif(not hasattr(datasets, "explain_dataset"), reason="not exported yet")
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    with torch.random.fork_rng(devices=[]):
        for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
            exec(compile(code, str(PAGE), "exec"), names)
    assert len(names["store"]) == 40
    assert "Global interactions of 6 features over 40 record(s)" in capsys.readouterr().out


def test_a_store_that_another_process_begins_meanwhile(made, copy, monkeypatch):
    """Between the look for a manifest and the look at the folder."""
    looked, real = [], Path.is_file

    def not_there_at_first(path):
        looked.append(path.name)
        return real(path) if looked.count(MANIFEST) > 1 or path.name != MANIFEST else False

    monkeypatch.setattr(Path, "is_file", not_there_at_first)
    assert len(known_store(copy)) == len(made)


def test_every_entry_of_a_weight_counts():
    """Also of a large one, and of buffers that are not saved with the model."""
    net = torch.nn.Linear(600, 600)
    net.register_buffer("shift", torch.zeros(3), persistent=False)
    before = fingerprint(net)
    with torch.no_grad():
        net.weight[1, 1] += 0.1
    changed = fingerprint(net)
    net.shift[1] = 1
    assert len({before, changed, fingerprint(net)}) == 3
