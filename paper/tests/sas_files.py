"""SAS files written by hand: transport version 5 after TS-140, and the smallest 32-bit SAS7BDAT that holds a table."""

import math
import struct

BLANK = b" "


def ibm_double(value):
    """IBM floating point: sign, base-16 exponent plus 64, and a fraction of 56 bits in [1/16, 1)."""
    if value is None:
        return b"." + bytes(7)
    if value == 0:
        return bytes(8)
    exponent = 0
    fraction = abs(value)
    while fraction >= 1:
        fraction, exponent = fraction / 16, exponent + 1
    while fraction < 1 / 16:
        fraction, exponent = fraction * 16, exponent - 1
    first = (0x80 if math.copysign(1, value) < 0 else 0) | (64 + exponent)
    return bytes([first]) + round(fraction * 2**56).to_bytes(7, "big")


def header(kind, tail="0" * 30):
    return f"HEADER RECORD*******{kind:<8}HEADER RECORD!!!!!!!{tail:<32}".encode()


def filled(raw, size):
    return raw + BLANK * (-len(raw) % size)


def namestr(number, name, length, start, is_number):
    label = f"label of {name}"
    fixed = struct.pack(">hhhh8s40s", 1 if is_number else 2, 0, length, number, name.ljust(8).encode(), label.encode())
    formats = struct.pack(">8shhh2s8shh", BLANK * 8, 0, 0, 0, b"", BLANK * 8, 0, 0)
    return fixed + formats + struct.pack(">l", start) + bytes(52)


def xpt(columns, lengths):
    """The bytes of a transport file; `columns` by name hold numbers (None: missing) or strings of `lengths` bytes."""
    stamp = b"01JAN12:00:00:00"
    library = header("LIBRARY") + filled(b"SAS     SAS     SASLIB  9.2     W32_7PRO".ljust(64) + stamp, 80)
    library += filled(stamp, 80)
    member = header("MEMBER", "000000000000000001600000000140") + header("DSCRPTR")
    member += filled(b"SAS     SPXRAW  SASDATA 9.2     W32_7PRO".ljust(64) + stamp, 80) + filled(stamp, 80)
    start, descriptions = 0, b""
    for number, (name, length) in enumerate(lengths.items(), 1):
        is_number = not isinstance(columns[name][0], str)
        descriptions += namestr(number, name, length, start, is_number)
        start += length
    variables = header("NAMESTR", f"000000{len(lengths):04d}" + "0" * 20) + filled(descriptions, 80)
    rows = b""
    for values in zip(*(columns[name] for name in lengths), strict=True):
        for value, length in zip(values, lengths.values(), strict=True):
            text = isinstance(value, str)
            rows += value.encode().ljust(length) if text else ibm_double(value)[:length]
    return library + member + variables + header("OBS") + filled(rows, 80)


MAGIC = bytes.fromhex("000000000000000000000000c2ea8160b31411cfbd92080009c7318c181f1011")


def sas7bdat(columns, lengths, page_size=65_536):
    """The bytes of a SAS7BDAT file, 32-bit little-endian, uncompressed, all on one page of metadata and rows."""
    n_rows = len(next(iter(columns.values())))
    names = "".join(lengths)
    text = struct.pack("<H", 28 + len(names)) + bytes(26) + names.encode()
    text += bytes(-len(text) % 4)
    row_length = sum(lengths.values())

    size = bytearray(480)
    size[:4] = b"\xf7\xf7\xf7\xf7"
    for slot, number in {5: row_length, 6: n_rows, 9: len(lengths), 15: n_rows}.items():
        struct.pack_into("<I", size, 4 * slot, number)
    name_entries, attribute_entries, name_place, place = b"", b"", 28, 0
    for name, length in lengths.items():
        name_entries += struct.pack("<HHHH", 0, name_place, len(name), 0)
        kind = 2 if isinstance(columns[name][0], str) else 1
        attribute_entries += struct.pack("<IIHBB", place, length, 0, kind, 0)
        name_place, place = name_place + len(name), place + length
    subheaders = [
        bytes(size),
        b"\xf6\xf6\xf6\xf6" + struct.pack("<II", len(lengths), 0),
        b"\xfd\xff\xff\xff" + text,
        b"\xff\xff\xff\xff" + bytes(8) + name_entries + bytes(8),
        b"\xfc\xff\xff\xff" + bytes(8) + attribute_entries + bytes(8),
        *[b"\xfe\xfb\xff\xff" + bytes(48)] * len(lengths),
    ]
    rows = b""
    for values in zip(*(columns[name] for name in lengths), strict=True):
        for value, length in zip(values, lengths.values(), strict=True):
            rows += value.encode().ljust(length) if isinstance(value, str) else struct.pack("<d", value)

    page = bytearray(page_size)
    struct.pack_into("<HHH", page, 16, 0x0200, n_rows + len(subheaders), len(subheaders))
    end = page_size
    for k, subheader in enumerate(subheaders):
        end -= len(subheader)
        page[end : end + len(subheader)] = subheader
        struct.pack_into("<IIBBH", page, 24 + 12 * k, end, len(subheader), 0, 0, 0)
    first = 24 + 12 * len(subheaders)
    first += first % 8
    assert first + len(rows) <= end, "the page is too small"
    page[first : first + len(rows)] = rows

    head = bytearray(1_024)
    head[:32], head[32], head[35], head[37], head[70] = MAGIC, 0x22, 0x22, 1, 29
    struct.pack_into("<III", head, 196, len(head), page_size, 1)
    return bytes(head) + bytes(page)
