"""Seeded damage of files: of their bytes, and of their structure (keys, types, shapes, claimed sizes, code).

A mutation takes a random generator and the content of a valid file, and returns other content.
"""

import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib

import numpy as np
import safetensors.torch
import torch

SEALED = ("checksum", "checksums")
NUMBERS = [-1, 0, 1, 2**31, 2**40, 2**63, -(2**63), 10**30, 0.5, 1e300]
VALUES = [None, True, [], {}, "", "x", [[1]], ["x"], {"x": 1}, *NUMBERS, float("nan"), float("inf")]


class Payload:
    """An object whose unpickling creates the folder `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


# --- bytes ------------------------------------------------------------------------------------------------------------


def flip_bit(rng, content):
    data = bytearray(content)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(rng, content):
    return content[: rng.choice([0, 1, 7, 8, rng.randrange(len(content)), len(content) - 1])]


def append(rng, content):
    return content + rng.choice([b"\0", b"\n", b"}", content, bytes(4096), b"PK\x05\x06" + bytes(18)])


def zero_sector(rng, content):
    """Zeros in place of a sector, as after a power failure."""
    size = rng.choice([16, 64, 512])
    start = size * rng.randrange(-(-len(content) // size))
    return content[:start] + bytes(len(content[start : start + size])) + content[start + size :]


def scatter(rng, content):
    """Truncate, overwrite, reverse, insert or remove bytes, once or several times."""
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


def exchange_parts(rng, content):
    """Two parts of the file in the other order."""
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[b:] + content[a:b] + content[:a]


BYTES = {
    "bit flip": flip_bit,
    "truncation": truncate,
    "appended bytes": append,
    "zeroed sector": zero_sector,
    "scattered bytes": scatter,
    "exchanged parts": exchange_parts,
}


# --- JSON -------------------------------------------------------------------------------------------------------------


def places(item):
    """Every (container, key) of nested JSON."""
    entries = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    for key, value in entries:
        yield item, key
        yield from places(value)


def _in_json(change):
    def mutate(rng, content):
        about = json.loads(content)
        found = [*places(about)]
        if not found:
            return json.dumps(rng.choice(VALUES)).encode()
        change(rng, *rng.choice(found))
        return json.dumps(about).encode()

    return mutate


def _remove(rng, container, key):
    del container[key]


def _rename(rng, container, key):
    if isinstance(container, dict):
        container[rng.choice([key + "x", "", key.upper()])] = container.pop(key)
    else:
        container.append(container.pop(key))


def _retype(rng, container, key):
    container[key] = rng.choice(VALUES)


def _claim(rng, container, key):
    container[key] = rng.choice(NUMBERS)


def nest(rng, content):
    """Deep nesting in place of the content, or around it."""
    depth = rng.choice([100, 5_000, 100_000])
    return rng.choice([b"[" * depth, b"[" * depth + content + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])


def exchange_values(rng, content):
    about = json.loads(content)
    found = [*places(about)]
    if len(found) > 1:
        (a, i), (b, j) = rng.sample(found, 2)
        copies = json.dumps(a[i]), json.dumps(b[j])
        b[j], a[i] = map(json.loads, copies)
    return json.dumps(about).encode()


JSON = {
    "removed key": _in_json(_remove),
    "renamed key": _in_json(_rename),
    "other type": _in_json(_retype),
    "claimed size": _in_json(_claim),
    "exchanged values": exchange_values,
    "nesting": nest,
}


def json_lines(change):
    """A mutation of one line of a file of JSON lines."""

    def mutate(rng, content):
        lines = content.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = change(rng, lines[at])
        return b"\n".join(lines) + b"\n"

    return mutate


def exchange_lines(rng, content):
    lines = content.splitlines()
    rng.shuffle(lines)
    return b"\n".join(lines[rng.randrange(2) :] + rng.choices(lines, k=rng.randrange(2))) + b"\n"


JSON_LINES = {
    **{name: json_lines(change) for name, change in JSON.items()},
    "exchanged lines": exchange_lines,
}


# --- safetensors ------------------------------------------------------------------------------------------------------


def drop(rng, tensors, metadata):
    tensors.pop(rng.choice(sorted(tensors)))


def rename(rng, tensors, metadata):
    name = rng.choice(sorted(tensors))
    tensors[name + "x"] = tensors.pop(name)


def reshape(rng, tensors, metadata):
    name = rng.choice(sorted(tensors))
    t = tensors[name]
    changes = [t[None], t.flatten(), torch.cat([t, t]) if t.ndim else t.repeat(2), t[:0] if t.ndim else t[None][:0]]
    changes += [t[..., :-1], t.mT] if t.ndim > 1 else []
    tensors[name] = rng.choice(changes).contiguous().clone()


def recast(rng, tensors, metadata):
    name = rng.choice(sorted(tensors))
    kinds = [torch.int32, torch.float16, torch.bool, torch.int64, torch.float64, torch.float32, torch.uint8]
    tensors[name] = tensors[name].to(rng.choice([*kinds, torch.bfloat16, torch.complex64, torch.float8_e4m3fn]))


def swap(rng, tensors, metadata):
    a, b = rng.sample(sorted(tensors), 2)
    tensors[a], tensors[b] = tensors[b], tensors[a]


def extreme(rng, tensors, metadata):
    """One entry, or all entries, become NaN, infinite, negative or huge."""
    name = rng.choice(sorted(tensors))
    t = tensors[name] = tensors[name].clone()
    if t.is_floating_point():
        limits = torch.finfo(t.dtype)
        values = [-1, 0, limits.max, limits.tiny, float("nan"), *([float("inf")] if limits.bits > 8 else [])]
    else:
        values = [0, 1] if t.dtype == torch.bool else [0, 1, torch.iinfo(t.dtype).min, torch.iinfo(t.dtype).max]
    if t.numel():
        t.view(-1)[rng.choice([slice(None), slice(0, 1), slice(-1, None)])] = rng.choice(values)


def drop_text(rng, tensors, metadata):
    metadata.pop(rng.choice(sorted(metadata)))


def change_text(rng, tensors, metadata):
    name = rng.choice(sorted(metadata))
    try:
        value = json.loads(metadata[name])
    except ValueError:
        value = None
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        metadata[name] = rng.choice([*JSON.values()])(rng, metadata[name].encode()).decode()
    else:
        metadata[name] = rng.choice(["", "[]", "{", "null", "[[1]]", '["x"]', "9" * 5000])


TENSORS = {
    "removed tensor": drop,
    "renamed tensor": rename,
    "other shape": reshape,
    "other dtype": recast,
    "exchanged tensors": swap,
    "extreme numbers": extreme,
    "removed text": drop_text,
    "changed text": change_text,
}


def contents(content: bytes):
    """Tensors and metadata of a safetensors file."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return safetensors.torch.load(content), header.get("__metadata__", {})


def _in_tensors(change, seal=None):
    def mutate(rng, content):
        tensors, metadata = contents(content)
        if not metadata and change in (drop_text, change_text):
            metadata = {"note": "[1]"}
        if len(tensors) > 1 or change is not swap:
            change(rng, tensors, metadata)
        if seal is not None:
            metadata = seal(tensors, {name: text for name, text in metadata.items() if name not in SEALED})
        return safetensors.torch.save(tensors, metadata)

    return mutate


def in_header(rng, content):
    """Offsets, shapes and dtypes that the data do not have, or a header of another length."""
    size = int.from_bytes(content[:8], "little")
    if rng.random() < 0.2:
        length = rng.choice([0, 1, size - 1, size + 1, len(content), 2**24, 2**62, 2**64 - 1])
        return length.to_bytes(8, "little") + content[8:]
    header = json.loads(content[8 : 8 + size])
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    match rng.randrange(4):
        case 0:
            entry["shape"] = [rng.choice(NUMBERS), *entry["shape"]]
        case 1:
            entry["data_offsets"] = [rng.choice([0, 8, 2**40, -1]), rng.choice([0, 8, 2**62, 10**30])]
        case 2:
            entry["dtype"] = rng.choice(["F64", "I8", "BOOL", "X", "", "F4", None])
        case _:
            _retype(rng, entry, rng.choice(sorted(entry)))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


SAFETENSORS = {**{name: _in_tensors(change) for name, change in TENSORS.items()}, "claimed size": in_header}


def resealed(seal):
    """The mutations of tensors with checksums that fit, `seal(tensors, metadata)`, or without any."""
    return {name: _in_tensors(change, seal) for name, change in TENSORS.items()}


# --- archives ---------------------------------------------------------------------------------------------------------


def repacked(content: bytes, change, compression=zipfile.ZIP_STORED) -> bytes:
    """A copy of an archive whose members are changed by `change(name, content)`; None removes a member."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", compression) as new:
        for name in old.namelist():
            if (member := change(name, old.read(name))) is not None:
                new.writestr(name, member)
    return buffer.getvalue()


def _members(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.namelist()


def damage_member(rng, content):
    """Damage one member of an archive, whose checksums stay right."""
    chosen = rng.choice(_members(content))
    change = rng.choice([*BYTES.values()])
    return repacked(content, lambda name, data: change(rng, data) if name == chosen and data else data)


def remove_member(rng, content):
    chosen = rng.choice(_members(content))
    return repacked(content, lambda name, data: None if name == chosen else data)


def exchange_members(rng, content):
    a, b = rng.sample(_members(content), 2)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        swapped = {a: archive.read(b), b: archive.read(a)}
    return repacked(content, lambda name, data: swapped.get(name, data))


def inflate_member(rng, content):
    """A larger member that is compressed to almost nothing."""
    chosen = rng.choice(_members(content))
    size = rng.choice([1 << 16, 1 << 20, 1 << 20, 65 << 20])
    return repacked(content, lambda name, data: bytes(size) if name == chosen else data, zipfile.ZIP_DEFLATED)


def change_json_member(rng, content):
    chosen = rng.choice([name for name in _members(content) if name.endswith(".json")])
    change = rng.choice([*JSON.values()])
    return repacked(content, lambda name, data: change(rng, data) if name == chosen else data)


ARCHIVE = {
    "damaged member": damage_member,
    "removed member": remove_member,
    "exchanged members": exchange_members,
    "claimed size": inflate_member,
}


def code_in_member(canary):
    """A pickle that runs code in place of a member."""

    def mutate(rng, content):
        chosen = rng.choice([name for name in _members(content) if not name.endswith(".json")])
        payload = rng.choice([pickled(canary), in_archive(canary)])
        return repacked(content, lambda name, data: payload if name == chosen else data)

    return mutate


def code_as_size(canary):
    """Code in place of the symbolic sizes of an export."""

    def mutate(rng, content):
        code = f"__import__('os').mkdir({canary!r})"
        text = rng.choice([code, f"[{code}][0]", f"Integer({code})", f"Symbol('s0', {code})", f"s0 + {code}"])

        def change(name, data):
            if not name.endswith(".json"):
                return data
            about = json.loads(data)
            strings = [(c, k) for c, k in places(about) if isinstance(c[k], str)]
            formulas = [(c, k) for c, k in strings if k == "expr_str"]
            for container, key in formulas if rng.random() < 0.7 else rng.sample(strings, min(3, len(strings))):
                container[key] = text
            return json.dumps(about).encode()

        return repacked(content, change)

    return mutate


def pickled(canary) -> bytes:
    return pickle.dumps({"weight": Payload(canary)})


def in_archive(canary) -> bytes:
    """A file of torch.save that holds code."""
    buffer = io.BytesIO()
    torch.save({"weight": Payload(canary)}, buffer)
    return buffer.getvalue()


def code_instead(canary):
    """A pickle, an object array or an archive with code in place of the file."""

    def mutate(rng, content):
        buffer = io.BytesIO()
        np.save(buffer, np.array([Payload(canary)], dtype=object), allow_pickle=True)
        legacy = io.BytesIO()
        torch.save({"weight": Payload(canary)}, legacy, _use_new_zipfile_serialization=False)
        return rng.choice([pickled(canary), in_archive(canary), buffer.getvalue(), legacy.getvalue()])

    return mutate


# --- arrays, images, tables -------------------------------------------------------------------------------------------


def npy_header(rng, content):
    """Another shape, dtype or order than the data have."""
    array = np.load(io.BytesIO(content))
    data = array.tobytes()
    shape = rng.choice(
        [(2**40,), (2**31, 2**31), (-1,), (0,), (), (len(data),), array.shape[::-1], (1,) * 40, "x", None]
    )
    kind = rng.choice([array.dtype.str, "|O", "<c16", "<U4", "|V8", "<f2", ">f8", "|b1", "<i8", "<M8[s]", "x", None])
    shape, kind = rng.choice([(shape, array.dtype.str), (array.shape, kind), (shape, kind)])
    header = repr({"descr": kind, "fortran_order": rng.choice([False, True, 3]), "shape": shape})
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def npy_numbers(rng, content):
    """Other numbers: not finite, huge, another dtype or shape."""
    array = np.load(io.BytesIO(content)).astype(np.float64)
    array.flat[rng.randrange(array.size)] = rng.choice([np.nan, np.inf, 1e308, -1, 2**62])
    with np.errstate(over="ignore"):
        changed = rng.choice([array, array[..., None], array.astype("f4"), array[:0], array.T, array.astype(complex)])
    buffer = io.BytesIO()
    np.save(buffer, changed) if rng.random() < 0.8 else np.savez(buffer, a=changed, b=changed)
    return buffer.getvalue()


NPY = {"claimed size": npy_header, "other type": npy_numbers}


def png_header(rng, content):
    """Other sizes, depths and colour types than the pixels have, with a right checksum."""
    sizes = [0, 1, 9, 2**15, 2**31 - 1, 2**32 - 1]
    head = struct.pack(
        ">IIBBBBB",
        rng.choice(sizes),
        rng.choice(sizes),
        rng.choice([1, 8, 16, 3]),
        rng.choice([0, 2, 3, 6, 5]),
        0,
        0,
        0,
    )
    chunk = b"IHDR" + head
    return content[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + content[33:]


def png_chunks(rng, content):
    """Chunks in another order, twice, or removed."""
    chunks, at = [], 8
    while at < len(content):
        size = struct.unpack(">I", content[at : at + 4])[0] + 12
        chunks.append(content[at : at + size])
        at += size
    match rng.randrange(3):
        case 0:
            rng.shuffle(chunks)
        case 1:
            chunks.pop(rng.randrange(len(chunks)))
        case _:
            chunks.insert(rng.randrange(len(chunks)), rng.choice(chunks))
    return content[:8] + b"".join(chunks)


PNG = {"claimed size": png_header, "exchanged chunks": png_chunks}


def cells(rng, content):
    """One cell becomes text, empty, huge or quoted."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    row = rng.choice(rows)
    other = [
        "",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "x",
        "1_0",
        '"',
        '"a\nb"',
        "=1",
        "1;2",
        "\0",
        "٣",
        "0x1",
        "9" * 400,
        "1 2",
    ]
    row[rng.randrange(len(row))] = rng.choice(other)
    return "\n".join(",".join(r) for r in rows).encode()


def table_shape(rng, content):
    """Rows and columns removed, added, exchanged or repeated; another encoding or separator."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    match rng.randrange(7):
        case 0:
            rows.pop(rng.randrange(len(rows)))
        case 1:
            rng.choice(rows).append("1")
        case 2:
            rng.choice(rows).pop()
        case 3:
            rng.shuffle(rows)
        case 4:
            rows = [[*row, row[0]] for row in rows]
        case 5:
            return content.replace(b",", rng.choice([b";", b"\t", b"|", b", "]))
        case _:
            return content.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"]))
    return "\n".join(",".join(r) for r in rows).encode()


TABLE = {"other type": cells, "other shape": table_shape}


def mutations(name: str, canary: str) -> dict[str, object]:
    """All kinds of damage for a file of this name; code in it creates the folder `canary`."""
    ending = name.rpartition(".")[2]
    each = {
        "json": JSON,
        "jsonl": JSON_LINES,
        "safetensors": SAFETENSORS,
        "npy": NPY,
        "png": PNG,
        "csv": TABLE,
        "txt": TABLE,
        "pth": ARCHIVE | {"code": code_in_member(canary)},
        "pt2": ARCHIVE
        | {"code": code_in_member(canary), "code as a size": code_as_size(canary), "changed graph": change_json_member},
    }
    return {**BYTES, **each.get(ending, {}), "code instead": code_instead(canary)}


def seeded(*parts: object) -> random.Random:
    """A generator for one mutation, so that it can be repeated."""
    return random.Random(" ".join(map(str, parts)))
