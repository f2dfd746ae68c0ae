"""The settings of `smoothhess explain`, and the checks of them that need no file.

Checks that need an opened file (sizes, columns, class names) belong to the module that reads the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
    max_calls: int = 20_000
    out: Path = Path("smoothhess-explanation")
    device: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Validate the options.

        Raises:
            ValueError: If an option is out of range, or two options exclude each other.
        """
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
        if self.tol is not None and not self.tol > 0:
            raise ValueError(f"--tol must be positive, got {self.tol:g}.")
        for word, number in (("--calls", self.calls), ("--max-calls", self.max_calls)):
            if number is not None and (number < 2 or number % 2):
                raise ValueError(
                    f"{word} must be even and at least 2, as each direction is used twice (±), got {number}."
                )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be between 0 and 2³² − 1, got {self.seed}.")
        if not self.inputs and not self.tokens:
            raise ValueError(
                "pass --input, at least one image, .csv or .npy file, or --tokens, a .npy file of token ids."
            )
        self._check_texts()

    def _check_texts(self) -> None:
        """Validate the options of texts, and that they are not combined with those of other inputs."""
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
