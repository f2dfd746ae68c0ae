"""Size and time of an installation: each extra in a new virtual environment, and what a CUDA build of torch downloads.

    python benchmarks/install.py                  a few minutes, and 2 GiB of disk at a time
    python benchmarks/install.py --only core view

Every environment is created in a temporary folder and removed afterwards. pip runs without its cache and with the pins
of constraints.txt, so the seconds contain all downloads, from the package index that pip is configured for. The CUDA
packages are not installed: their size is the sum of the wheels that `pip install torch` would download from that index
(`pip install --dry-run --report`).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path(__file__).parents[1]
EXTRAS = {
    "core": "",
    "view": "[view]",
    "explain": "[explain]",
    "demo": "[demo]",
    "paper": "[paper]",
}
QUIET = ["--quiet", "--disable-pip-version-check", "--no-cache-dir"]


def environment(folder: Path) -> Path:
    """The interpreter of a new virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def packages(folder: Path) -> int:
    return len([*folder.glob("lib/python*/site-packages/*.dist-info")])


def installed(requirement: str) -> tuple[float, int, int]:
    """Seconds, bytes and packages of one requirement, without pip and setuptools."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "venv"
        python = environment(folder)
        before, had = size(folder), packages(folder)
        start = time.perf_counter()
        pins = ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([str(python), "-m", "pip", "install", *QUIET, *pins, requirement], check=True)
        return time.perf_counter() - start, size(folder) - before, packages(folder) - had


def wheel_bytes(url: str) -> int:
    """The size of one wheel, without its contents."""
    where = urlparse(url)
    if where.scheme == "file":
        return Path(unquote(where.path)).stat().st_size
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def download(requirement: str) -> tuple[str, int, int]:
    """The version of torch, the bytes and the number of wheels that pip would download."""
    with tempfile.TemporaryDirectory() as name:
        python, report = environment(Path(name) / "venv"), Path(name) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run([str(python), "-m", "pip", "install", *QUIET, *options, requirement], check=True)
        wheels = json.loads(report.read_text(encoding="utf-8"))["install"]
    (version,) = [wheel["metadata"]["version"] for wheel in wheels if wheel["metadata"]["name"] == "torch"]
    return version, sum(wheel_bytes(wheel["download_info"]["url"]) for wheel in wheels), len(wheels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*EXTRAS, "cuda"], default=[*EXTRAS, "cuda"])
    options = parser.parse_args()
    print("| installed | packages | size | seconds |\n|---|---|---|---|", flush=True)
    for name, extra in EXTRAS.items():
        if name in options.only:
            seconds, bytes_, count = installed(f"{ROOT}{extra}")
            print(f"| `smoothhess{extra}` | {count} | {bytes_ / 1e6:,.0f} MB | {seconds:.0f} |", flush=True)
    if "cuda" in options.only:
        version, bytes_, count = download("torch")
        print(f"\n`pip install torch` of this index: torch {version}, {count} wheels, download {bytes_ / 1e9:.2f} GB")
    print(
        f"\n*{platform.machine()} CPU, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}; "
        "`python benchmarks/install.py`*"
    )


if __name__ == "__main__":
    main()
