"""Files that are small and expensive, start other programs or hold code are refused before they are opened."""

import json
import struct
import time
import zipfile
import zlib

import numpy as np
import pytest
import torch
from torch import nn

from smoothhess.cli.explain import csv_files, exported_models, image_files, npy_files, state_dict_files
from smoothhess.cli.explain.size_formulas import is_size_formula
from smoothhess.linalg.memory import ARRAY_BYTES, IMAGE_PIXELS
from smoothhess.result import segments

CPU = torch.device("cpu")


def empty_png(height: int, width: int) -> bytes:
    """A grey png without pixels."""
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), b"IDAT", b"IEND")
    parts = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def repacked(source, target, change, compression=zipfile.ZIP_STORED):
    """A copy of an archive whose members are changed by `change(name, content)`."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [image_files.read, segments.from_mask])
def test_postscript_is_not_opened_as_an_image(tmp_path, monkeypatch, read):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    (tmp_path / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(ValueError, match=r"x.png is not an image that pillow can read as PNG, JPEG"):
        read(tmp_path / "x.png")


@pytest.mark.parametrize("read", [image_files.read, segments.from_mask])
@pytest.mark.parametrize("size", [(13_000, 13_000), (60_000, 60_000)])
def test_images_with_too_many_pixels_are_refused_from_their_header(tmp_path, read, size):
    (tmp_path / "x.png").write_bytes(empty_png(*size))
    with pytest.raises(ValueError, match=rf"x.png: the limit for an image is {IMAGE_PIXELS} pixels.*Resize"):
        read(tmp_path / "x.png")


def test_images_are_not_enlarged_beyond_the_limit():
    with pytest.raises(ValueError, match="--size 100000x100000: the limit is"):
        image_files.check_size((100000, 100000))


# --- arrays and tables ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [npy_files.read, segments.from_mask])
def test_large_arrays_are_refused_from_their_header(tmp_path, read):
    shape = (ARRAY_BYTES // 8 + 1,)
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.truncate(file.tell() + shape[0])  # sparse: takes no space on the disk
    with pytest.raises(ValueError, match=r"x.npy: the limit for an array is 2 GiB as float64.*Split it"):
        read(tmp_path / "x.npy")


def test_large_tables_are_refused_unread(tmp_path):
    with (tmp_path / "x.csv").open("wb") as file:
        file.truncate((1 << 27) + 1)
    with pytest.raises(ValueError, match=r"x.csv: the limit for this file is 128 MiB"):
        csv_files.read(tmp_path / "x.csv")


def test_the_time_for_a_table_grows_linearly_with_its_columns(tmp_path):
    names = [f"c{i}" for i in range(20_000)]
    (tmp_path / "x.csv").write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    start = time.perf_counter()
    table = csv_files.read(tmp_path / "x.csv", drop=names[10:10_000])
    segments.columns(table.names, {"all": table.names})
    assert time.perf_counter() - start < 2  # 21 s before
    assert len(table.names) == 10_010


def test_ids_of_segments_take_no_memory():
    with pytest.raises(ValueError, match=r"ids 0 … 1000000000000 must have a feature, got 999999999999 without"):
        segments.noise(torch.tensor([[0, 10**12]]), 1.0)


# --- exports ----------------------------------------------------------------------------------------------------------


def bomb(name, content):
    return bytes(1 << 27) if name.endswith("archive_format") else content


def test_archives_that_unpack_to_much_more_than_their_size_are_refused(exported, tmp_path):
    path = repacked(exported / "free.pt2", tmp_path / "x.pt2", bomb, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"x.pt2 unpacks to 128.* MiB from .* KiB: the limit is"):
        exported_models.read(path, CPU)
    torch.save(nn.Linear(2, 1).state_dict(), tmp_path / "w.pth")
    path = repacked(
        tmp_path / "w.pth",
        tmp_path / "x.pth",
        lambda n, c: bytes(1 << 27) if n.endswith("/0") else c,
        zipfile.ZIP_DEFLATED,
    )
    with pytest.raises(ValueError, match=r"x.pth unpacks to 128"):
        state_dict_files.read(path)


def test_an_archive_in_an_export_is_limited_as_well(exported, tmp_path):
    def inner(name, content):
        if not name.endswith("sample_inputs/model.pt"):
            return content
        (tmp_path / "inner").write_bytes(content)
        change = lambda n, c: bytes(1 << 27) if n.endswith("/0") else c
        return repacked(tmp_path / "inner", tmp_path / "inner.zip", change, zipfile.ZIP_DEFLATED).read_bytes()

    with pytest.raises(ValueError, match=r"x.pt2 \(data/sample_inputs/model.pt\) unpacks to"):
        exported_models.read(repacked(exported / "free.pt2", tmp_path / "x.pt2", inner), CPU)


def test_tensors_larger_than_the_file_are_refused(exported, tmp_path):
    def larger(name, content):
        if name.endswith(("weight_0", "weight_1")):
            return b""  # torch makes zeros of the listed shape
        if not name.endswith("weights_config.json"):
            return content
        config = json.loads(content)
        for entry in config["config"].values():
            entry["tensor_meta"]["sizes"] = [{"as_int": 1 << 30}]
        return json.dumps(config).encode()

    with pytest.raises(ValueError, match=r"x.pt2 lists tensors that are larger than the file"):
        exported_models.read(repacked(exported / "free.pt2", tmp_path / "x.pt2", larger), CPU)


@pytest.mark.parametrize(
    "text", ["__import__('builtins').open({path!r}, 'w')", "[open({path!r}, 'w')][0]", "Integer(open({path!r}, 'w'))"]
)
def test_code_as_the_size_of_a_tensor_is_not_evaluated(exported, tmp_path, text):
    def changed(item):
        if isinstance(item, dict):
            trap = text.format(path=str(tmp_path / "sprung"))
            return {key: trap if key == "expr_str" else changed(value) for key, value in item.items()}
        return [changed(value) for value in item] if isinstance(item, list) else item

    def trapped(name, content):
        return json.dumps(changed(json.loads(content))).encode() if name.endswith("models/model.json") else content

    path = repacked(exported / "free.pt2", tmp_path / "x.pt2", trapped)
    with pytest.raises(ValueError, match=r"x.pt2 holds a size that is no formula"):
        exported_models.read(path, CPU)
    assert not (tmp_path / "sprung").exists()


def test_sizes_that_torch_writes_are_formulas(tmp_path):
    class Sizes(nn.Module):
        def forward(self, x):
            rows = x.shape[0]
            longer = nn.functional.pad(x.reshape(2 * rows, -1), (0, rows // 3 + 1))
            wider = nn.functional.interpolate(longer[None], scale_factor=1.5)
            return x + wider.sum() + max(rows, 3) + longer.shape[1] % 5

    dynamic = ({0: torch.export.Dim.AUTO},)
    torch.export.save(torch.export.export(Sizes(), (torch.zeros(7, 4),), dynamic_shapes=dynamic), tmp_path / "x.pt2")
    assert exported_models.read(tmp_path / "x.pt2", CPU).forward_func(torch.zeros(8, 4)).shape == (8, 4)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9", "Pow(Integer(9), Integer(10000000))", "Pow(Pow(Symbol('s0'), Integer(60)), Integer(60))",
        "LShift(Integer(1), Integer(10000000))", "1e999999999", "Float('1e999999999')",
        "Float('1.5', precision=10000000)",
        "s0.__class__", "s0[0]", "lambda: 0", "exec('1')", "Symbol('s0', **{})", "f(s0)", "Symbol('s 0')", "s0 # x",
        "s0\n", "", None, ["s0"], "(" * 5000, "9" * 5000,
    ],
)  # fmt: skip
def test_other_texts_are_no_formulas(text):
    assert not is_size_formula(text)
