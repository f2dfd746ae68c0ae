"""Damaged result files and stores: a ValueError that names the file, and never a raw error; summaries rebuilt."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from smoothhess import Interactions
from smoothhess.datasets import Store
from smoothhess.model.json_checksum import with_checksum
from smoothhess.model.tensor_hash import with_checksums
from tests import damage
from tests.datasets import job
from tests.datasets.test_explain_dataset import same_summary

DATA = Path(__file__).parents[1] / "data"


def mutate(rng, source, path):
    """Change a file in one place; half of the files lose their checksums, as if written before there were any."""
    content = source.read_bytes()
    if rng.random() < 0.5:
        tensors, metadata = damage.contents(content)
        content = save(tensors, {name: text for name, text in metadata.items() if name not in damage.SEALED})
    kinds = [damage.truncate, *damage.SAFETENSORS.values()]
    path.write_bytes(rng.choice(kinds)(rng, content))


def check(path, read):
    """Reading succeeds, or the error names the file."""
    said = None
    try:
        read()
    except ValueError as error:
        said = str(error)
    assert said is None or path.name in said
    return said is not None


@pytest.mark.parametrize("name", ["sampled", "groups", "exact", "estimator-1", "new"])
def test_mutated_results(tmp_path, name):
    rng, refused = random.Random(name), 0
    source = DATA / f"{name}.safetensors"
    if name == "new":
        source = tmp_path / "new.safetensors"
        Interactions.load(DATA / "sampled.safetensors").save(source)
    for i in range(60):
        path = tmp_path / f"{i}.safetensors"
        mutate(rng, source, path)
        refused += check(path, lambda path=path: Interactions.load(path).hessian)
    assert refused > 30


@pytest.mark.parametrize(
    ("name", "about", "removed", "said"),
    [
        ("sampled", {"design": "orth/gonal"}, (), "design must be one of"),
        ("sampled", {"gaussian": ["Isotropic", {"sigma": {}}]}, (), "expected 'sigma' of Isotropic as a float"),
        ("sampled", {"gaussian": ["Isotropic", {"sigma": 0}]}, (), "expected 'sigma' of Isotropic as a float"),
        ("sampled", {"gaussian": ["Isotropic", {"sigma": 1e300}]}, (), "expected 'sigma' of Isotropic as a float"),
        ("groups", {}, ("statistics.gram",), "'statistics.gram' of the groups is missing"),
    ],
)
def test_parts_that_only_later_methods_would_miss(tmp_path, name, about, removed, said):
    """With valid checksums: they are refused when the file is loaded."""
    tensors, metadata = damage.contents((DATA / f"{name}.safetensors").read_bytes())
    metadata["about"] = json.dumps({**json.loads(metadata["about"]), **about})
    for tensor in removed:
        del tensors[tensor]
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(tensors, with_checksums(tensors, metadata)))
    with pytest.raises(ValueError, match=rf"x.safetensors is damaged .*{said}"):
        Interactions.load(path)


@pytest.mark.parametrize("change", [lambda t: t[:, :-1].contiguous(), lambda t: t.to(torch.float8_e4m3fn)])
def test_inputs_that_do_not_fit_the_draws(tmp_path, change):
    tensors, metadata = damage.contents((DATA / "sampled.safetensors").read_bytes())
    tensors["inputs"] = change(tensors["inputs"])
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(tensors, with_checksums(tensors, metadata)))
    with pytest.raises(ValueError, match="x.safetensors is damaged"):
        Interactions.load(path)


@pytest.mark.parametrize("source", ["old", "new"])
def test_mutated_shards(made, tmp_path, source):
    rng, refused = random.Random(source), 0
    folder = Path(shutil.copytree(DATA / "store" if source == "old" else made.path, tmp_path / "store"))
    (folder / "index-0000.jsonl").unlink()
    shard = sorted(folder.glob("shard-*"))[0]
    kept = tmp_path / "kept.safetensors"
    shutil.copy(shard, kept)
    for _ in range(60):
        mutate(rng, kept, shard)

        def read():
            store = Store(folder)
            if store.damaged:
                raise ValueError(store.damaged[0].problem)
            for _ in store:
                pass
            store.column("digest")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *a, **k: None)
            refused += check(shard, read)
    assert refused > 30


@pytest.mark.parametrize("change", [{"job": 3}, {"pack_size": None}, {"settings": []}, {"settings": {"keep": "pairs"}}])
def test_a_damaged_manifest(copy, change):
    manifest = copy / "store.json"
    manifest.write_text(json.dumps(with_checksum({**json.loads(manifest.read_text()), **change})))
    with pytest.raises(ValueError, match=r"store.json is damaged .*Restore it from a backup"):
        Store(copy)


@pytest.mark.parametrize("change", ["other number", "nesting"])
def test_a_manifest_that_was_changed(copy, change):
    """Its checksum shows numbers that would be valid."""
    manifest = copy / "store.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"pack_size": 2', '"pack_size": 4') if change == "other number" else "[" * 99_999)
    with pytest.raises(ValueError, match=r"store.json is damaged .*(checksum does not match|nested too deeply)"):
        Store(copy)


@pytest.mark.parametrize("lines", ["[" * 99_999, '{"shard": 1e999}', '{"world_size": Infinity, "read": 1, "data": ""}'])
def test_an_index_of_nonsense_is_ignored(made, copy, lines):
    (copy / "index-0000.jsonl").write_text(lines + "\n")
    assert Store(copy).numbers == made.numbers
    assert len(job.run(copy)) == len(made)


def test_a_changed_index_is_ignored(made, copy):
    """Also where the changed line would be valid; other lines of the index are used."""
    index = copy / "index-0000.jsonl"
    index.write_text(index.read_text().replace("[[2, 4]]", "[[2, 3]]").replace('"read": 12', '"read": 13'))
    assert Store(copy).numbers == made.numbers
    assert len(job.run(copy)) == len(made)


@pytest.mark.parametrize("claimed", [[[0, 10**13]], [[4, 2]], [[-2, 0]]])
def test_claimed_records_that_the_file_cannot_hold(copy, claimed):
    """In files without checksums; nothing of that size is allocated."""
    shard = sorted(copy.glob("shard-*"))[0]
    tensors, metadata = damage.contents(shard.read_bytes())
    metadata = {name: text for name, text in metadata.items() if name not in damage.SEALED}
    shard.write_bytes(save(tensors, {**metadata, "records": json.dumps(claimed)}))
    with pytest.warns(UserWarning, match=rf"{shard.name} is damaged .*ascending intervals"):
        Store(copy)


def test_a_flipped_bit(made, copy):
    shard = made.shards[2]
    data = bytearray((copy / shard.file).read_bytes())
    tensors, _ = damage.contents(bytes(data))
    at = data.index(tensors["column.hessian"].numpy().tobytes())
    data[at + 3] ^= 16
    (copy / shard.file).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{shard.file} is damaged .*checksum of 'column.hessian'.*delete this file"):
        Store(copy)[4]
    assert torch.equal(Store(copy)[6].hessian, made[6].hessian)


def test_exchanged_shards(made, copy):
    """Of the same size, so that the index does not show it."""
    a, b = (copy / made.shards[i].file for i in (1, 2))
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(kept)
    with pytest.raises(ValueError, match=f"{a.name} was written as {b.name}: files were exchanged"):
        _ = Store(copy)[2]


@pytest.mark.parametrize("damage", ["removed", "truncated", "doubled"])
def test_a_lost_summary_is_rebuilt(made, copy, damage):
    for path in copy.glob("summary-*"):
        data = path.read_bytes()
        if damage == "doubled":
            shutil.copy(path, copy / path.name.replace("summary-0000", "summary-0001"))
            continue
        path.unlink() if damage == "removed" else path.write_bytes(data[:100])
    same_summary(Store(copy).summary(), made.summary(), rtol=1e-12, atol=1e-14)
    same_summary(Store(copy).rebuild_summary(), made.summary(), rtol=1e-12, atol=1e-14)
    if damage == "removed":
        assert len(job.run(copy, n=14).summary()) == 14


def test_what_cannot_be_rebuilt(tmp_path):
    """Shards written without their part of the summary."""
    shutil.copytree(DATA / "store", tmp_path / "store")
    assert len(Store(tmp_path / "store").summary()) == 3
    for path in (tmp_path / "store").glob("summary-*"):
        path.unlink()
    with pytest.raises(ValueError, match="3 only in the store.*rebuilt only from shards that hold their part"):
        Store(tmp_path / "store").summary()
    with pytest.raises(ValueError, match="does not hold the summary of its records"):
        Store(tmp_path / "store").rebuild_summary()
