"""Downloads that resume, are verified by checksum, and create the final file atomically."""

import hashlib
import os
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

__all__ = ["download", "md5_of"]

_CHUNK = 1 << 16


def md5_of(path: Path) -> str:
    """MD5 of a file, the published checksum; it detects damage, not manipulation."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def download(url: str, path: Path, md5: str, *, show_progress: bool = True, timeout: float = 60.0) -> Path:
    """Fetch `url` to `path`, resuming from `path`.part after an interrupted attempt.

    An existing file is kept if its checksum is correct; otherwise an error is raised and it is not overwritten.
    """
    if path.exists():
        if (got := md5_of(path)) != md5:
            raise ValueError(f"{path}: expected MD5 {md5}, got {got}. Remove the file to fetch it again.")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    _fetch(url, part, show_progress=show_progress, timeout=timeout)
    if (got := md5_of(part)) != md5:
        part.unlink()
        raise ValueError(f"{url}: expected MD5 {md5}, got {got}. The download was discarded; run it again.")
    os.replace(part, path)
    return path


def _fetch(url: str, part: Path, *, show_progress: bool, timeout: float) -> None:
    """Append the missing bytes of `url` to `part`, which is kept on disk if the connection breaks."""
    have = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urlopen(request, timeout=timeout)
    except URLError as error:
        if isinstance(error, HTTPError) and error.code == 416 and have:
            return  # nothing left to send: the checksum decides
        raise ConnectionError(f"{url} could not be fetched: {error}") from error
    with response:
        if response.status != 206:  # the server starts from the beginning
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        bar = tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=part.stem, disable=not show_progress)
        with part.open("ab" if have else "wb") as stream, bar:
            while chunk := response.read(_CHUNK):
                stream.write(chunk)
                have += len(chunk)
                bar.update(len(chunk))
    if total is not None and have < total:
        raise ConnectionError(f"{url} broke off at {have} of {total} bytes. Run it again to resume.")
