"""Run the notebooks and store their outputs.

    OMP_NUM_THREADS=1 python docs/notebooks/make.py               # all
    OMP_NUM_THREADS=1 python docs/notebooks/make.py tables.ipynb

Each notebook runs in a new kernel and in a temporary folder. Warnings, progress bars, times and other metadata of the
run are not stored, so a notebook changes only where its code, its text or its outputs do.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
SECONDS = 240  # for one notebook


def run(path: Path) -> Any:
    """Run a notebook in a new kernel; an error of a cell is raised."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(book, timeout=SECONDS, kernel_name="python3", record_timing=False)
        client.execute(cwd=folder)
    for cell in book.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = kept(cell.outputs)
    book.metadata = {"kernelspec": book.metadata["kernelspec"], "language_info": {"name": "python"}}
    return book


def kept(outputs: list[Any]) -> list[Any]:
    """One output for all printed text, without progress bars and warnings, and the figures."""
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    found = [nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []
    for output in outputs:
        if "image/png" in output.get("data", {}):
            found.append(nbformat.v4.new_output("display_data", {"image/png": output.data["image/png"]}))
    return found


if __name__ == "__main__":
    for path in [HERE / name for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        nbformat.write(run(path), path)
        print(path.name)
