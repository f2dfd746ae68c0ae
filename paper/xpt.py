"""SAS transport files, version 5 (.xpt), the format in which the CDC publishes NHANES.

Records are 80 bytes: headers, one description of 140 bytes for each variable, then the rows back to back. Numbers are
IBM doubles, cut to the variable's length: sign and base-16 exponent in the first byte, a fraction in the others. The
layout is that of the technical paper TS-140 of the SAS Institute.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Column", "parse_xpt", "read_xpt"]

RECORD = 80
_LIBRARY = b"HEADER RECORD*******LIBRARY HEADER RECORD!!!!!!!"
_LIBRARY_8 = b"HEADER RECORD*******LIBV8"
_MEMBER = b"HEADER RECORD*******MEMBER  HEADER RECORD!!!!!!!"
_DESCRIPTION = b"HEADER RECORD*******DSCRPTR HEADER RECORD!!!!!!!"
_VARIABLES = b"HEADER RECORD*******NAMESTR HEADER RECORD!!!!!!!"
_ROWS = b"HEADER RECORD*******OBS     HEADER RECORD!!!!!!!"
_MISSING = b"._ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # first byte of a missing number, the others being zero

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
Bytes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
Column = Numbers | list[str]


@dataclass(frozen=True)
class _Variable:
    name: str
    is_number: bool
    length: int
    start: int  # in the row


def read_xpt(path: Path | str) -> dict[str, Column]:
    """Columns by name: float64 arrays, missing numbers as NaN, and lists of strings without their trailing blanks.

    Files with one data set, as NHANES has them.
    """
    return parse_xpt(Path(path).read_bytes(), str(path))


def parse_xpt(raw: bytes, path: str) -> dict[str, Column]:
    """The same from the bytes of a file; `path` is for messages."""
    if raw.startswith(_LIBRARY_8):
        raise ValueError(f"{path}: wanted a SAS transport file of version 5, got version 8. Export it as version 5.")
    _expect(raw, 0, _LIBRARY, path)
    _expect(raw, 3 * RECORD, _MEMBER, path)
    _expect(raw, 4 * RECORD, _DESCRIPTION, path)
    _expect(raw, 7 * RECORD, _VARIABLES, path)
    try:
        description_size = int(raw[3 * RECORD + 74 : 3 * RECORD + 78])  # 140; 136 on VAX
        n_variables = int(raw[7 * RECORD + 54 : 7 * RECORD + 58])
    except ValueError as error:
        raise ValueError(f"{path}: damaged SAS transport header ({error}); fetch the file again") from error
    first = 8 * RECORD
    after = first + -(-n_variables * description_size // RECORD) * RECORD
    _expect(raw, after, _ROWS, path)
    variables = [_variable(raw, first + k * description_size) for k in range(n_variables)]
    width = sum(variable.length for variable in variables)
    if not width:
        raise ValueError(f"{path}: wanted variables, got a data set without any")
    rows = _rows(raw[after + RECORD :], width, path)
    return {variable.name: _column(rows, variable) for variable in variables}


def _expect(raw: bytes, place: int, header: bytes, path: str) -> None:
    if not raw.startswith(header, place):
        found = raw[place : place + len(header)]
        raise ValueError(
            f"{path}: wanted a SAS transport file of version 5 with '{header[20:28].decode().strip()}' at byte "
            f"{place}, got {found[:34]!r}. It is cut off or of another format."
        )


def _variable(raw: bytes, place: int) -> _Variable:
    kind, _, length, _, name = struct.unpack_from(">hhhh8s", raw, place)
    (start,) = struct.unpack_from(">l", raw, place + 84)
    return _Variable(name.decode("latin-1").strip(), kind == 1, length, start)


def _rows(data: bytes, width: int, path: str) -> Bytes:
    """(rows, width) bytes. The last record is filled up with blanks, which may look like further rows."""
    for place in range(0, len(data), RECORD):
        if data.startswith(_MEMBER, place):
            raise ValueError(f"{path}: wanted one data set, got a second one. Export each to a file of its own.")
    n = len(data) // width
    while n and not data[(n - 1) * width : n * width].strip(b" "):
        n -= 1
    if len(data) - n * width >= RECORD:
        raise ValueError(f"{path}: {len(data)} bytes of data are no whole number of rows of {width}; fetch it again")
    return np.frombuffer(data, np.uint8, n * width).reshape(n, width)


def _column(rows: Bytes, variable: _Variable) -> Column:
    values = rows[:, variable.start : variable.start + variable.length]
    if not variable.is_number:
        return [row.tobytes().decode("latin-1").rstrip(" \0") for row in values]
    return _ibm_numbers(values)


def _ibm_numbers(values: Bytes) -> Numbers:
    """IBM floating point of 2 to 8 bytes → float64."""
    whole = np.zeros((len(values), 8), np.uint8)
    whole[:, : values.shape[1]] = values
    bits = whole.view(">u8")[:, 0].astype(np.uint64)
    fraction = (bits & np.uint64(0x00FFFFFFFFFFFFFF)).astype(np.float64)
    first = whole[:, 0].astype(np.int64)
    sign = np.where(first & 0x80, -1.0, 1.0)
    numbers = sign * np.ldexp(fraction, 4 * ((first & 0x7F) - 64) - 56)
    missing = np.isin(whole[:, 0], np.frombuffer(_MISSING, np.uint8)) & (whole[:, 1:] == 0).all(1)
    return np.where(missing, np.nan, numbers)
