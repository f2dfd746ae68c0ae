"""Raw spirometry curves of NHANES 2007–2012, as the CDC publishes them.

Download SPXRAW_E.ZIP (2007–2008), SPXRAW_F.ZIP (2009–2010) and SPXRAW_G.ZIP (2011–2012) from the examination data of
each cycle at wwwn.cdc.gov/nchs/nhanes into DIR/NHANES, and pass --data DIR. Each holds one SAS file, spxraw_e.sas7bdat
and so on; SAS transport files (.xpt) are read as well. Either may be zipped, and both are read by pandas.

The code relies on the CDC's documentation of SPXRAW: there is one record for each curve, with SEQN (participant),
SPATTYPE ("Pre" or "Bron", before or after a bronchodilator), SPAMANU (number of the curve), SPAFACT (factor from
ambient to body temperature and pressure), SPAACC ("Y" if acceptable), SPAQEFF (grade of the effort; "D": cough or large
extrapolated volume), SPXPTS (number of points) and SPXRAW, the points: changes of volume in mL over 10 ms, separated by
commas, each between −63 and 192. So a volume is a sum of points, times SPAFACT.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Generator, Tensor

from paper.spirometry import Spirograms, fev1, find_coughs, resample

__all__ = ["Manoeuvre", "Reading", "nhanes", "parse_curve", "read_manoeuvres"]

RAW_STEP = 0.01  # s
CYCLES = ("SPXRAW_E", "SPXRAW_F", "SPXRAW_G")
FORMATS = {".xpt": "xport", ".sas7bdat": "sas7bdat"}  # pandas' names for SAS files
ENDINGS = (*FORMATS, ".zip")
LEAST = 1e-77  # smaller numbers are zero
FIELDS = ("SEQN", "SPATTYPE", "SPAMANU", "SPAFACT", "SPAACC", "SPAQEFF", "SPXPTS", "SPXRAW")
LOWEST, HIGHEST = -63, 192  # mL in 10 ms
SHORTEST = 1.0  # s: a shorter record has no FEV₁
CHUNK = 2_000  # records read at a time
_BEFORE, _ACCEPTABLE, _COUGH_GRADE = "Pre", "Y", "D"


@dataclass(frozen=True)
class Manoeuvre:
    """One curve of one participant, at body temperature and pressure."""

    participant: int  # SEQN
    number: int  # SPAMANU
    before_bronchodilator: bool
    acceptable: bool
    grade: str  # SPAQEFF, "A" to "D"
    curve: Tensor  # (300,) L at 50 ms
    fev1: float  # L, from the points at 10 ms


@dataclass(frozen=True)
class Reading:
    """The curves of a file, and how many records were not as documented or shorter than a second."""

    manoeuvres: tuple[Manoeuvre, ...]
    n_left_out: int


def parse_curve(points: str, factor: float, n_points: int) -> Tensor:
    """Volumes in litres at 0, 10, 20, … ms from a record's text, (n_points + 1,), float64.

    >>> parse_curve("0,10,90,100,-20", 1.1, 5)
    tensor([0.0000, 0.0000, 0.0110, 0.1100, 0.2200, 0.1980], dtype=torch.float64)
    """
    try:
        changes = [int(point) for point in points.split(",") if point.strip()]
    except ValueError as error:
        raise ValueError(f"expected integers between commas ({error})") from error
    if len(changes) != n_points:
        raise ValueError(f"expected {n_points} points according to SPXPTS, got {len(changes)}")
    if changes and not LOWEST <= min(changes) <= max(changes) <= HIGHEST:
        raise ValueError(f"expected {LOWEST} to {HIGHEST} mL in 10 ms, got {min(changes)} to {max(changes)}")
    if not factor > 0:
        raise ValueError(f"expected a factor to body temperature and pressure above 0, got {factor}")
    return torch.tensor([0, *changes], dtype=torch.float64).cumsum(0) * (factor / 1_000)


def read_manoeuvres(path: Path | str) -> Reading:
    """All curves of an .xpt, .sas7bdat or .zip file of raw curves."""
    path = Path(path)
    kept, n_left_out = [], 0
    for record in _records(path):
        try:
            kept.append(_manoeuvre(record))
        except ValueError:  # the release is unedited; skip bad records and read the others
            n_left_out += 1
    if not kept:
        raise ValueError(f"{path}: none of {n_left_out} records is a curve as documented; is it a SPXRAW file?")
    return Reading(tuple(kept), n_left_out)


def nhanes(data: Path | str | None = None, *, seed: int = 0) -> Spirograms:
    """Coughing efforts of NHANES with the best acceptable FEV₁ of the same visit, in random order.

    Only efforts before a bronchodilator are used. An effort has a cough if it is graded "D" and a break is detected
    in its flow (the grade is also given for a large extrapolated volume); the first such effort of each participant is
    kept, so that no participant is in two parts of a split, and only if another effort was acceptable.
    """
    paths = _find(data)
    readings = [read_manoeuvres(path) for path in paths]
    visits: dict[int, list[Manoeuvre]] = defaultdict(list)
    for reading in readings:
        for manoeuvre in reading.manoeuvres:
            if manoeuvre.before_bronchodilator:
                visits[manoeuvre.participant].append(manoeuvre)
    curves, labels, coughs = [], [], []
    for _, visit in sorted(visits.items()):
        best = max((m.fev1 for m in visit if m.acceptable), default=None)
        graded = [m for m in sorted(visit, key=lambda m: m.number) if m.grade == _COUGH_GRADE]
        seen = [(m, found) for m in graded if (found := find_coughs(m.curve[None])[0])]
        if best is not None and seen:
            curves.append(seen[0][0].curve)
            labels.append(best)
            coughs.append(seen[0][1])
    if not curves:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no participant has a coughing effort and an acceptable one; "
            "download the files again or add the other cycles."
        )
    order = torch.randperm(len(curves), generator=Generator().manual_seed(seed)).tolist()
    left_out = sum(reading.n_left_out for reading in readings)
    note = (
        f"{', '.join(path.stem.upper() for path in paths)}: {len(curves)} coughing efforts of {len(visits)} "
        f"participants; {left_out} records left out as not as documented or shorter than {SHORTEST:g} s"
    )
    return Spirograms(
        torch.stack(curves)[order].float(),
        torch.tensor(labels)[order],
        tuple(coughs[k] for k in order),
        "NHANES",
        note,
    )


def _manoeuvre(record: Mapping[str, Any]) -> Manoeuvre:
    volumes = parse_curve(str(record["SPXRAW"]), float(record["SPAFACT"]), int(record["SPXPTS"]))
    if len(volumes) <= SHORTEST / RAW_STEP:
        raise ValueError(f"expected {SHORTEST:g} s or more, got {len(volumes) - 1} points")
    return Manoeuvre(
        participant=int(record["SEQN"]),
        number=int(record["SPAMANU"]),
        before_bronchodilator=record["SPATTYPE"] == _BEFORE,
        acceptable=record["SPAACC"] == _ACCEPTABLE,
        grade=str(record["SPAQEFF"]),
        curve=resample(volumes, RAW_STEP),
        fev1=float(fev1(volumes, RAW_STEP)),
    )


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The records of a file, whatever its kind, each by field."""
    if not path.is_file():
        raise FileNotFoundError(f"no file of raw curves at {path}")
    ending = path.suffix.lower()
    if ending != ".zip":
        with path.open("rb") as stream:
            yield from _parsed(stream, ending, str(path))
        return
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not a complete zip file ({error}); download it again") from error
    with archive:
        inside = [name for name in archive.namelist() if name.lower().endswith(ENDINGS[:2])]
        if len(inside) != 1:
            names = ", ".join(archive.namelist()) or "nothing"
            raise ValueError(f"{path}: expected one .sas7bdat or .xpt file in it, got {names}. Download it again.")
        with archive.open(inside[0]) as stream:
            yield from _parsed(stream, Path(inside[0]).suffix.lower(), f"{path}/{inside[0]}")


def _parsed(stream: IO[bytes], ending: str, name: str) -> Iterator[Mapping[str, Any]]:
    if ending not in FORMATS:
        raise ValueError(
            f"{name}: expected {', '.join(ENDINGS)}, got {ending or 'no ending'}. Download the file again."
        )
    try:
        import pandas as pd  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{name} is a SAS file, which needs pandas: pip install pandas") from error
    for chunk in _chunks(pd, stream, FORMATS[ending], name):
        _check(chunk.columns, name)
        yield from chunk[list(FIELDS)].to_dict("records")


def _chunks(pd: Any, stream: IO[bytes], kind: str, name: str) -> Iterator[Any]:
    """Frames of some records each."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "xport file may be corrupted")
            with pd.read_sas(io.BytesIO(stream.read()), format=kind, encoding="latin-1", chunksize=CHUNK) as reader:
                for chunk in reader:
                    numbers = chunk.select_dtypes("number").columns
                    # pandas reads the zero of a transport file as the smallest number that it can hold
                    chunk[numbers] = chunk[numbers].mask(chunk[numbers].abs() < LEAST, 0.0)
                    yield chunk
    except (ValueError, EOFError, UserWarning, struct.error) as error:
        raise ValueError(f"{name}: expected a complete SAS file ({error}); download it again") from error


def _check(columns: Any, name: str) -> None:
    if missing := [field for field in FIELDS if field not in columns]:
        raise ValueError(f"{name}: expected the fields of SPXRAW, got none called {', '.join(missing)}.")


def _find(data: Path | str | None) -> list[Path]:
    """Return one file for each available cycle, of the first available format."""
    folder = data or os.environ.get("SMOOTHHESS_DATA")
    if not folder:
        raise ValueError("expected a folder with NHANES curves: pass data=… (--data DIR) or set SMOOTHHESS_DATA")
    places = [Path(folder) / "NHANES", Path(folder)]
    files = [file for place in places if place.is_dir() for file in sorted(place.iterdir())]
    found = []
    for cycle in CYCLES:
        fitting: Sequence[Path] = [f for e in ENDINGS for f in files if f.name.lower() == (cycle + e).lower()]
        found += fitting[:1]
    if not found:
        raise FileNotFoundError(
            f"no raw spirometry curves in {' or '.join(map(str, places))}: expected {', '.join(CYCLES)} as "
            f"{', '.join(ENDINGS)}. Download them from the examination data of NHANES at wwwn.cdc.gov/nchs/nhanes."
        )
    return found
