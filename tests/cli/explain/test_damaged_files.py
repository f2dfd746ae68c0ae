"""Random damage of valid files: every reader raises an error that names the file, and nothing else."""

import contextlib
import io
import json
import random
import re
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

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
from smoothhess.result import segments

CPU = torch.device("cpu")
MUTATIONS = 20  # of each kind of file


def fill(path):
    state_dict_files.fill(nn.Linear(3, 2), path)


def mask(path):
    segments.from_mask(path, (4, 5))


def groups(path):
    segments.parse(f"columns:{path}", torch.zeros(3), ["a", "b", "c"])


def export(path):
    exported_models.read(path, CPU)


def rows(path):
    model = load_model.Model(load_model.OneTensor(lambda x: x.sum(1), None), "model", None, torch.float32, "")
    inputs.read([path], model, inputs.Reading(), CPU)


def records(path):
    folder = Folder(path.parent)
    with folder.opened():
        for name, record in folder.records.items():
            folder.kept(name, record.key)
            folder.refuse_foreign(list(record.files))


READERS = {
    "x.png": image_files.read, "x.jpg": image_files.read, "x.bmp": image_files.read, "x.gif": image_files.read,
    "x.tif": image_files.read, "x.webp": image_files.read, "mask.png": mask, "mask.npy": mask, "x.npy": npy_files.read,
    "x.csv": rows, "x.pth": fill, "x.safetensors": fill, "x.pt2": export, "inside.pt2": export,
    "classes.json": target_class.read_classes, "classes.txt": target_class.read_classes, "groups.json": groups,
    "mean.npy": lambda path: normalization.read_numbers([str(path)], "--mean"),
    "mean.txt": lambda path: normalization.read_numbers([str(path)], "--mean"), "explain.json": records,
}  # fmt: skip


@pytest.fixture(scope="module")
def valid(tmp_path_factory, exported):
    """The content of one valid file of each kind."""
    folder = tmp_path_factory.mktemp("valid")
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8))
    for ending in ("png", "jpg", "bmp", "gif", "tif", "webp"):
        picture.save(folder / f"x.{ending}", exif=Image.Exif())
    Image.fromarray(rng.integers(0, 3, (4, 5), dtype=np.uint8)).save(folder / "mask.png")
    np.save(folder / "mask.npy", rng.integers(0, 3, (4, 5)))
    np.save(folder / "x.npy", rng.normal(size=(3, 4)))
    np.save(folder / "mean.npy", rng.normal(size=3))
    (folder / "mean.txt").write_text("0.5,0.25,1\n")
    (folder / "x.csv").write_text("age,dose,time\n1,2.5,3\n4,5,-6e-1\n7,8,9\n")
    torch.save(nn.Linear(3, 2).state_dict(), folder / "x.pth")
    save_file(nn.Linear(3, 2).state_dict(), folder / "x.safetensors")
    (folder / "classes.json").write_text('{"0": "cat", "1": ["n1", "dog"]}')
    (folder / "classes.txt").write_text("cat\ndog\n")
    (folder / "groups.json").write_text('{"body": ["a", "b"], "rest": ["c"]}')
    record = {"key": "k", "files": {"x.html": "0123"}, "words": {"title": "x"}}
    about = {"format": "smoothhess.explain", "version": 2, "finished": {"x": record}}
    (folder / "explain.json").write_text(json.dumps(about))
    for name in ("x.pt2", "inside.pt2"):
        (folder / name).write_bytes((exported / "free.pt2").read_bytes())
    return {name: (folder / name).read_bytes() for name in READERS}


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Truncate, flip, swap, insert or repeat bytes, once or several times."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice([1, 4, 20]))
        match rng.randrange(5):
            case 0:
                del data[start:]
            case 1:
                data[start:end] = bytes(rng.choice([0, 255, 34, 91, rng.randrange(256)]) for _ in data[start:end])
            case 2:
                data[start:end] = data[start:end][::-1]
            case 3:
                data[start:start] = rng.choice(
                    [b"\0", b"9" * 40, b"[" * 9000, b'"', b"null", b"-1", b",,", b"\xff\xfe"]
                )
            case _:
                del data[start:end]
    return bytes(data)


def damaged_inside(content: bytes, rng: random.Random) -> bytes:
    """Damage one member of an archive, whose check sums stay right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        chosen = rng.choice([name for name in old.namelist() if name.endswith((".json", ".pt"))])
        for name in old.namelist():
            new.writestr(name, damaged(old.read(name), rng) if name == chosen else old.read(name))
    return buffer.getvalue()


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_raise_an_error_that_names_them(valid, tmp_path, name):
    rng, path = random.Random(name), tmp_path / name
    path.write_bytes(valid[name])
    READERS[name](path)
    for _ in range(MUTATIONS):
        path.write_bytes((damaged_inside if name == "inside.pt2" else damaged)(valid[name], rng))
        with contextlib.suppress(ValueError):  # what is still valid is read
            READERS[name](path)
            continue
        with pytest.raises(ValueError, match=rf"{re.escape(name)}|^--mean must be"):
            READERS[name](path)
