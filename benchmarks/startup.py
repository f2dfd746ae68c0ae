"""Start-up: seconds of the command line and of imports, relative to `import torch`.

    python benchmarks/startup.py

Every command runs in a new process, with bytecode on disk. The commands are timed in turn, and the ratio is that of the
medians; a machine that is busy slows all of them. Needs the command line: pip install 'smoothhess[cli]'.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

TORCH = ["-c", "import torch"]
MISSING = ["--model", "nowhere.pt2", "--input", "nowhere.csv", "--sigma", "1"]
COMMANDS = {
    "smoothhess --help": ["-m", "smoothhess", "--help"],
    "smoothhess explain --help": ["-m", "smoothhess", "explain", "--help"],
    "smoothhess --version": ["-m", "smoothhess", "--version"],
    "smoothhess explain of a missing file": ["-m", "smoothhess", "explain", *MISSING],
    "import torch, smoothhess": ["-c", "import torch, smoothhess"],
    "import torch; from smoothhess import SmoothHess": ["-c", "import torch; from smoothhess import SmoothHess"],
}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    commands = {"import torch": TORCH, **COMMANDS}
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for run in range(options.runs + 1):
        for name, arguments in commands.items():
            once = seconds(arguments)
            if run:  # the first writes bytecode
                taken[name].append(once)
    base = statistics.median(taken["import torch"])
    print("| process | seconds | relative to `import torch` |\n|---|---|---|")
    for name, times in taken.items():
        print(f"| `{name}` | {statistics.median(times):.2f} | {statistics.median(times) / base:.2f} |")
    print(
        f"\n*{platform.machine()} CPU, Python {platform.python_version()}, torch {version('torch')}, "
        f"{time.strftime('%Y-%m-%d')}, medians of {options.runs} runs; `python benchmarks/startup.py`*"
    )


if __name__ == "__main__":
    main()
