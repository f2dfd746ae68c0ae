"""The settings of `smoothhess explain`, and the checks of them that need neither torch nor the content of a file.

Checks of contents (sizes, columns, class names) belong to the module that reads the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smoothhess.cli.explain.option_values import parse_numbers, parse_rows, parse_size

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
TABLES = (".csv", ".tsv")
NUMBERS = (".npy", ".txt", ".csv")  # files of --mean and --std
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin")
SEGMENTS = re.compile(r"\s*(none|slic(:.*)?|(grid|window|mask):.+|columns(:.*)?)\s*")


@dataclass(frozen=True)
class Settings:
    """The options of the command line; see `smoothhess explain --help`."""

    model: str
    inputs: Sequence[Path] = ()
    tokens: Sequence[Path] = ()
    names: Sequence[Path] = ()
    layer: str | None = None
    baseline: str = "mean"
    weights: Path | None = None
    output: str | None = None
    target: str | None = None
    classes: Path | None = None
    radius: float | None = None
    sigma: float | None = None
    segments: str | None = None
    segments_noise: str = "pixels"
    step: float | None = None
    mean: Sequence[str] | None = None
    std: Sequence[str] | None = None
    size: str | None = None
    rows: str | None = None
    drop: Sequence[str] = ()
    standardize: bool = True
    batched: bool | None = None
    tol: float | None = None
    calls: int | None = None
    max_calls: int | None = None
    out: Path = Path("smoothhess-explanation")
    device: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Validate the options and look for the files.

        Raises:
            ValueError: If an option is out of range, two options exclude each other, or a file cannot be opened.
            FileNotFoundError: If a file does not exist.
        """
        self._check_numbers()
        self._check_texts()
        self._check_words()
        self._check_model()
        for option, path in self._files():
            _check_file(option, path)

    def _check_numbers(self) -> None:
        if self.radius is not None and self.sigma is not None:
            raise ValueError("pass --radius or --sigma, not both: radius = sigma · √(number of features).")
        if self.radius is None and self.sigma is None:
            raise ValueError(
                "the scale of the noise is missing: pass --sigma, the standard deviation of the noise in each feature "
                "(for example 0.25 of a column's standard deviation, 0.1 of a pixel's range), or --radius, the length "
                "of the noise vector."
            )
        for word, number in (("--radius", self.radius), ("--sigma", self.sigma), ("--step", self.step)):
            if number is not None and not 0 < number < float("inf"):
                raise ValueError(f"{word} must be a positive number, got {number:g}.")
        if self.segments_noise not in ("pixels", "segments"):
            raise ValueError(f"--segments-noise must be pixels or segments, got {self.segments_noise!r}.")
        if self.tol is not None and self.calls is not None:
            raise ValueError("pass --tol (the relative error to reach) or --calls (a fixed number of calls), not both.")
        if self.tol is not None and not 0 < self.tol < 1:
            raise ValueError(f"--tol must lie between 0 and 1, it is a relative error, got {self.tol:g}.")
        for word, number in (("--calls", self.calls), ("--max-calls", self.max_calls)):
            if number is not None and (number < 2 or number % 2):
                raise ValueError(
                    f"{word} must be even and at least 2, as each direction is used twice (±), got {number}."
                )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be between 0 and 2³² − 1, got {self.seed}.")

    def _check_texts(self) -> None:
        """Validate the options of texts, and that they are not combined with those of other inputs."""
        if not self.inputs and not self.tokens:
            raise ValueError(
                "pass --input, at least one image, .csv or .npy file, or --tokens, a .npy file of token ids."
            )
        own = {
            "--names": self.names,
            "--layer": self.layer,
            "--baseline": self.baseline if self.baseline != "mean" else None,
        }
        if not self.tokens:
            if given := [word for word, value in own.items() if value]:
                raise ValueError(f"{given[0]} is for texts: pass --tokens ids.npy as well, or omit it.")
            return
        others = {
            "--input": self.inputs,
            "--segments": self.segments,
            "--step": self.step,
            "--mean": self.mean,
            "--std": self.std,
            "--size": self.size,
            "--rows": self.rows,
            "--drop": self.drop,
            "--batched or --single": self.batched is not None,
            "--no-standardize": not self.standardize,
            "--segments-noise": self.segments_noise != "pixels",
        }
        if given := [word for word, value in others.items() if value]:
            raise ValueError(f"{given[0]} cannot be combined with --tokens. Omit one of them.")
        if Path(self.model).suffix == ".pt2":
            raise ValueError(
                "--tokens need a network whose embedding layer can be replaced, and an export (.pt2) has no layers. "
                "Pass --model file.py:factory, with --weights."
            )
        if self.layer is None:
            raise ValueError(
                "--tokens need --layer, the name of the embedding of the tokens in the network, such as "
                "transformer.wte (named_modules)."
            )
        if self.baseline not in ("mean", "zero") and not self.baseline.isdecimal():
            raise ValueError(f"--baseline must be mean, zero or a token id, got {self.baseline!r}.")

    def _check_words(self) -> None:
        if self.size is not None:
            parse_size(self.size)
        if self.rows is not None:
            parse_rows(self.rows)
        for option, words in (("--mean", self.mean), ("--std", self.std)):
            if words and numbers_file(words) is None:
                parse_numbers(words, option)
        if self.segments is not None and not SEGMENTS.fullmatch(self.segments):
            raise ValueError(
                "--segments must be slic:50, grid:14, grid:7x14, columns:groups.json, window:0.5s, window:20, "
                f"mask:file or none, got {self.segments!r}."
            )
        for path in self.inputs:
            ending = path.suffix.lower()
            if ending not in (*IMAGES, *TABLES, ".npy") and not path.expanduser().is_dir():
                raise ValueError(
                    f"--input {path}: expected an image (.png, .jpg, …), a .csv or a .npy file, got "
                    f"{ending or 'no ending'}."
                )

    def _check_model(self) -> None:
        path = Path(self.model)
        if path.suffix == ".pt2" and self.weights is not None:
            raise ValueError(
                "--weights are for --model pkg.module:factory: an export contains its weights. Omit --weights."
            )
        file, _, name = self.model.rpartition(":")
        if path.suffix not in (".pt2", *PICKLES) and not (file and name):
            module = path.suffix == ".py" or (path.suffix and not path.is_file())
            hint = f" For a module, name the network as well: {self.model}:factory." if module else ""
            raise ValueError(
                "--model must be file.pt2 (torch.export), pkg.module:factory or file.py:factory, got "
                f"{self.model}.{hint}"
            )

    def _files(self) -> Iterator[tuple[str, Path]]:
        """The files that the options name, with the option."""
        path, module = Path(self.model), self.model.rpartition(":")[0]
        if path.suffix in (".pt2", *PICKLES):
            yield "--model", path.expanduser()
        elif module.endswith(".py"):
            yield "--model", Path(module).expanduser()
        for option, paths in (("--input", self.inputs), ("--tokens", self.tokens), ("--names", self.names)):
            yield from ((option, path.expanduser()) for path in paths)
        for option, given in (("--weights", self.weights), ("--classes", self.classes)):
            if given is not None:
                yield option, given.expanduser()
        for option, words in (("--mean", self.mean), ("--std", self.std)):
            if words and (file := numbers_file(words)) is not None:
                yield option, file
        kind, _, rest = (self.segments or "").strip().partition(":")
        if kind in ("mask", "columns") and rest:
            yield f"--segments {kind}:", Path(rest)


def numbers_file(words: Sequence[str]) -> Path | None:
    """The file that --mean or --std names; None if the words are numbers."""
    path = Path(words[0])
    return path if len(words) == 1 and path.suffix in NUMBERS else None


def _check_file(option: str, path: Path) -> None:
    if not path.is_file():
        what = "is a folder: pass its files" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{option} {path} {what}.")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be opened: {error.strerror}.") from error
