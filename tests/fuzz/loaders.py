"""Every loader of the library with valid files for it, and what it reads from them as plain values."""

import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from smoothhess import Interactions, SmoothHess
from smoothhess.baselines import gradient_nid
from smoothhess.cli.explain import (
    exported_models,
    image_files,
    inputs,
    load_model,
    normalization,
    npy_files,
    state_dict_files,
    target_class,
)
from smoothhess.cli.explain.output_folder import Folder
from smoothhess.datasets import Store
from smoothhess.evaluate import GlobalInteractions
from smoothhess.model.tensor_hash import with_checksums
from smoothhess.model.weight_files import read_weights
from smoothhess.result import segments
from tests import damage
from tests.datasets import job

CPU = torch.device("cpu")
DATA = Path(__file__).parents[1] / "data"
Values = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Loader:
    """Valid files, the file that is damaged, and the function that reads them."""

    name: str
    files: dict[str, bytes]
    damaged: str  # its name
    read: Callable[[Path], Any]  # of the damaged file
    checked: bool  # whether a checksum shows every change
    kinds: dict[str, Callable[..., bytes]]

    def place(self, folder: Path, kind: str | None = None, seed: str = "") -> Path:
        """Write the files into an empty folder, one of them damaged, and return its path."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        path = folder / self.damaged
        if kind is not None:
            path.write_bytes(self.kinds[kind](damage.seeded(seed, self.name, kind), self.files[self.damaged]))
        return path


def loaders(canary: Path) -> list[Loader]:
    """All loaders; code in a damaged file would create the folder `canary`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*_results(folder, str(canary)), *_stores(folder, str(canary)), *_inputs(folder, str(canary))]


# --- results ----------------------------------------------------------------------------------------------------------


def read_result(path: Path) -> Values:
    """Everything that a user reads from a result."""
    found = Interactions.load(path)
    values: Values = {"kind": type(found).__name__, "text": repr(found), "inputs": found.inputs, "target": found.target}
    values |= {"status": found.status, "shape": found.shape, "calls": found.n_calls, "passes": found.n_passes}
    for name in ("value", "gradient", "gradient_stderr", "hessian", "relative_error", "r2"):
        values[name] = getattr(found, name)
    return values | {"pairs": found.top_pairs(3)}


def read_summary(path: Path) -> Values:
    found = GlobalInteractions.load(path)
    return {"text": repr(found), "pairs": found.top_pairs(3), "records": found.to_records(), "segments": found.segments}


def _results(folder: Path, canary: str) -> list[Loader]:
    Interactions.load(DATA / "sampled.safetensors").save(folder / "sampled.safetensors")
    Interactions.load(DATA / "groups.safetensors").save(folder / "groups.safetensors")
    Interactions.load(DATA / "exact.safetensors").save(folder / "exact.safetensors")
    GlobalInteractions.load(DATA / "global.safetensors").save(folder / "global.safetensors")
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
    gradient_nid(job.network().double(), x, target=0, of="swish", beta=5.0).save(folder / "attribution.safetensors")
    low = SmoothHess(job.network().double()).attribute(x, target=0, sigma=0.5, n_calls=16)
    low.save(folder / "control.safetensors")
    found = []
    for name in ("sampled", "groups", "exact", "attribution", "control", "global"):
        file = f"{name}.safetensors"
        content, read = (folder / file).read_bytes(), read_summary if name == "global" else read_result
        kinds = damage.mutations(file, canary)
        found.append(Loader(f"result: {name}", {file: content}, file, read, True, kinds))
        found.append(Loader(f"result: {name}, valid checksums", {file: content}, file, read, False, _resealed()))
    for name in ("sampled", "estimator-1"):
        file = f"{name}.safetensors"
        content, kinds = (DATA / file).read_bytes(), damage.mutations(file, canary)
        found.append(Loader(f"result: {name}, no checksums", {file: content}, file, read_result, False, kinds))
    return found


def _resealed() -> dict[str, Callable[..., bytes]]:
    return damage.resealed(with_checksums)


# --- stores -----------------------------------------------------------------------------------------------------------


def read_store(path: Path) -> Values:
    """Everything in a store; raises the error of the first shard that cannot be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about damaged shards
        store = Store(path.parent)
    values = {str(record.number): record_values(record) for record in store}
    if store.damaged:
        raise ValueError(store.damaged[0].problem)
    digests = store.column("digest").tolist()
    return {"records": values, "numbers": store.numbers, "digests": digests, "summary": summary_values(store)}


def record_values(record: Any) -> Values:
    fields = ("status", "target", "output", "value", "value_stderr", "relative_error", "r2", "n_calls", "gradient")
    values = {name: getattr(record, name) for name in (*fields, "gradient_stderr")}
    if record.keep == "result":
        return values | {"hessian": record.hessian}
    values["pairs"] = record.top_pairs(min(3, record.n_pairs)) if record.n_pairs else []
    return values | ({"hessian": record.hessian, "stderr": record.stderr} if record.keep == "hessian" else {})


def summary_values(store: Store) -> Values:
    found = store.summary()
    moments = {name: (m.n, m.mean, m.squares) for name, m in found.moments.items()}
    return {"moments": moments, "segments": found.segments, "method": found.method}


def _resumed(options: dict[str, Any]) -> Callable[[Path], Values]:
    def read(path: Path) -> Values:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job.run(path.parent, n=4, **options)
        return read_store(path)

    return read


def _stores(folder: Path, canary: str) -> list[Loader]:
    found = []
    for keep in ("hessian", "result", "pairs"):
        place = folder / keep
        job.run(place, n=4, keep=keep)
        files = {path.name: path.read_bytes() for path in sorted(place.iterdir()) if path.name[0] != "."}
        names = {kind: [n for n in files if n.startswith(kind)][-1] for kind in ("store", "index", "shard", "summary")}
        resume = _resumed({"keep": keep})
        for kind, file in names.items():
            for what, read in (("open", read_store), ("resume", resume)):
                kinds = damage.mutations(file, canary)
                if kind in ("shard", "summary"):
                    kinds["exchanged files"] = _content_of(files, kind)
                kept = {n: c for n, c in files.items() if kind != "shard" or not n.startswith("index")}
                found.append(Loader(f"store, {keep}: {what}, {kind}", kept, file, read, True, kinds))
            if file.endswith(".safetensors"):
                name = f"store, {keep}: open, {kind}, valid checksums"
                found.append(Loader(name, kept, file, read_store, False, _resealed()))
    old = {path.name: path.read_bytes() for path in sorted((DATA / "store").iterdir())}
    for file in old:
        name = f"store, no checksums: {file.partition('-')[0].partition('.')[0]}"
        found.append(Loader(name, old, file, read_store, False, damage.mutations(file, canary)))
    return found


def _content_of(files: dict[str, bytes], kind: str) -> Callable[..., bytes]:
    """The content of another file of this kind."""
    others = [content for name, content in files.items() if name.startswith(kind)]
    return lambda rng, content: rng.choice([c for c in others if c != content] or [b""])


# --- inputs of `smoothhess explain` -----------------------------------------------------------------------------------


def weights(path: Path) -> Values:
    network = nn.Linear(3, 2)
    state_dict_files.fill(network, path)
    return dict(network.state_dict())


def pickled_model(path: Path) -> Values:
    """--model with a pickle is refused, whatever it holds."""
    load_model.load(str(path), None, None, CPU, 0)
    return {}


def mask(path: Path) -> Values:
    found = segments.from_mask(path, (4, 5))
    return {"mask": found.mask, "names": found.names}


def groups(path: Path) -> Values:
    found = segments.parse(f"columns:{path}", torch.zeros(3), ["a", "b", "c"])
    return {} if found is None else {"mask": found.mask, "names": found.names}


def export(path: Path) -> Values:
    found = exported_models.read(path, CPU)
    return {"shape": found.shape, "dtype": found.dtype, "batch": found.batch}


def examples(path: Path) -> Values:
    """--input with a model that takes any input."""
    model = load_model.Model(
        load_model.OneTensor(lambda x: x.flatten(1).sum(1), None), "model", None, torch.float32, ""
    )
    return {e.name: (e.kind, e.values, e.names, e.units) for e in inputs.read([path], model, inputs.Reading(), CPU)}


def records(path: Path) -> Values:
    folder = Folder(path.parent)
    with folder.opened():
        for name, record in folder.records.items():
            folder.kept(name, record.key)
            folder.refuse_foreign(list(record.files))
        return dict(folder.records)


READERS: dict[str, Callable[[Path], Any]] = {
    "x.png": image_files.read, "x.jpg": image_files.read, "x.bmp": image_files.read, "x.gif": image_files.read,
    "x.tif": image_files.read, "x.webp": image_files.read, "mask.png": mask, "mask.npy": mask, "x.npy": npy_files.read,
    "x.csv": examples, "input.png": examples, "input.npy": examples, "x.pth": weights, "legacy.pth": weights,
    "x.safetensors": weights, "read.safetensors": read_weights, "read.pth": read_weights, "x.pt2": export,
    "model.pth": pickled_model, "classes.json": target_class.read_classes, "list.json": target_class.read_classes,
    "classes.txt": target_class.read_classes, "groups.json": groups,
    "mean.npy": lambda path: normalization.read_numbers([str(path)], "--mean"),
    "mean.txt": lambda path: normalization.read_numbers([str(path)], "--mean"),
    "std.csv": lambda path: normalization.read_numbers([str(path)], "--std"),
    "explain.json": records,
}  # fmt: skip


def valid_inputs(folder: Path) -> dict[str, bytes]:
    """The content of one valid file for each of READERS."""
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8))
    for file in ("x.png", "x.jpg", "x.bmp", "x.gif", "x.tif", "x.webp", "input.png"):
        picture.save(folder / file, exif=Image.Exif())
    Image.fromarray(rng.integers(0, 3, (4, 5), dtype=np.uint8)).save(folder / "mask.png")
    np.save(folder / "mask.npy", rng.integers(0, 3, (4, 5)))
    np.save(folder / "x.npy", rng.normal(size=(3, 4)))
    np.save(folder / "input.npy", rng.normal(size=(3, 4)))
    np.save(folder / "mean.npy", rng.normal(size=3))
    (folder / "mean.txt").write_text("0.5,0.25,1\n")
    (folder / "std.csv").write_text("0.5,0.25,1\n")
    (folder / "x.csv").write_text("age,dose,time\n1,2.5,3\n4,5,-6e-1\n7,8,9\n")
    layer = nn.Linear(3, 2)
    for file in ("x.pth", "read.pth", "model.pth"):
        torch.save(layer.state_dict(), folder / file)
    torch.save(layer.state_dict(), folder / "legacy.pth", _use_new_zipfile_serialization=False)
    for file in ("x.safetensors", "read.safetensors"):
        save_file(layer.state_dict(), folder / file, {"made_by": "a test"})
    (folder / "classes.json").write_text('{"0": "cat", "1": ["n1", "dog"]}')
    (folder / "list.json").write_text('["cat", "dog"]')
    (folder / "classes.txt").write_text("cat\ndog\n")
    (folder / "groups.json").write_text('{"body": ["a", "b"], "rest": ["c"]}')
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).eval()
    dynamic = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(net, (torch.zeros(4, 1, 6, 6),), dynamic_shapes=dynamic)
    torch.export.save(program, folder / "x.pt2")
    out = Folder(folder / "out")
    with out.opened(), out.writing("x", "a key", {"title": "x"}) as place:
        (place / "x.html").write_text("a page")
    shutil.copy(folder / "out" / "explain.json", folder)
    return {name: (folder / name).read_bytes() for name in READERS}


def _inputs(folder: Path, canary: str) -> list[Loader]:
    found = []
    for file, content in valid_inputs(folder).items():
        files = {file: content} | ({"x.html": b"a page"} if file == "explain.json" else {})
        kinds = damage.mutations("x" if file == "legacy.pth" else file, canary)
        found.append(Loader(f"explain: {file}", files, file, READERS[file], file == "explain.json", kinds))
    return found


def equal(a: Any, b: Any, rounding: bool = False) -> bool:
    """Whether two values that were read are the same; NaN equals NaN, and summaries are compared up to rounding."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        tolerance = {"rtol": 1e-12, "atol": 1e-14} if rounding else {"rtol": 0.0, "atol": 0.0}
        return torch.allclose(a, b, equal_nan=True, **tolerance)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k], rounding or k == "summary") for k in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(equal(x, y, rounding) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)
