"""Results as files: safetensors for the numbers, JSON for the rest; nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smoothhess.gaussian import Gaussian
from smoothhess.grouping import Grouping
from smoothhess.shrink import Shrunk
from smoothhess.statistics import Segment, Statistics

if TYPE_CHECKING:
    from smoothhess.exact import Exact
    from smoothhess.interactions import Interactions

FORMAT = "smoothhess.interactions"
VERSION = 3
READABLE = ("1", "2", "3")  # 1 had neither denoising nor weights of a control variate, 2 no exact results


def save(result: Interactions, path: str | Path) -> None:
    """Write `result` to `path`, whole or not at all."""
    about, tensors = parts(result)
    metadata = {"format": FORMAT, "version": str(VERSION), "about": json.dumps(about)}
    write_atomically(Path(path), {name: t.cpu().contiguous() for name, t in tensors.items()}, metadata)


def parts(result: Interactions) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What JSON can hold of a result, and its tensors by name; `restore` is the inverse."""
    from smoothhess.exact import Exact

    tensors: dict[str, Tensor] = {"inputs": result.inputs, "n_passes": result.n_passes}
    gaussian: dict[str, Any] = {}
    for name, v in result.gaussian.state().items():
        if isinstance(v, Tensor):
            tensors[f"gaussian.{name}"] = v
        else:
            gaussian[name] = v
    about: dict[str, Any] = {
        "kind": type(result).__name__,
        "gaussian": [type(result.gaussian).__name__, gaussian],
        "estimator_version": result.estimator_version,
        "status": result.status,
        "groups": None if result.grouping is None else result.grouping.count,
    }
    if result.target is not None:
        tensors["target"] = result.target
    if result.grouping is not None:
        grouping = result.grouping
        tensors |= {
            "grouping.mask": grouping.mask,
            "grouping.scales": grouping.scales,
            "grouping.r2": grouping.r2,
        }
        if grouping.direction is not None:
            tensors["grouping.direction"] = grouping.direction
    more_about, more_tensors = _of_derivatives(result) if isinstance(result, Exact) else _of_draws(result)
    return about | more_about, tensors | more_tensors


def _of_derivatives(result: Exact) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What an exact result has beside what all results have."""
    about = {"method": result.method, "note": result.note, "seeds": result.seeds}
    return about, {f"derivatives.{name}": t for name, t in result.derivatives.tensors().items()}


def _of_draws(result: Interactions) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a sampled result has beside what all results have."""
    tensors = {f"statistics.{name}": t for name, t in result.statistics.tensors().items()}
    about = {
        "design": result.design,
        "rank": result.statistics.rank,
        "stream": result.statistics.stream,
        "control": result.control,
        "shrink": result.shrink,
        "unbiased": result.unbiased,
        "control_note": result.control_note,
        "precision": result.precision,
        "tau_probes": result.tau_probes,
        "control_rank": result.control_rank,
    }
    if result.control_weights is not None:
        tensors["control_weights"] = result.control_weights
    if result.precision_error is not None:
        tensors["precision_error"] = result.precision_error
    if result.denoised is not None:
        tensors |= {f"denoised.{name}": getattr(result.denoised, name) for name in ("hessian", "error2", "true2")}
    if result.exactly_zero is not None:
        tensors["exactly_zero"] = result.exactly_zero
    return about, tensors


def write_atomically(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file that is complete the moment it is there."""
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist. Make it first.")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        save_file(tensors, name, metadata)
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are private, an ordinary file is not
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def load(path: str | Path) -> Interactions:
    """The result that was saved to `path`."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}.")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or it is cut short ({error}). Load files written by Interactions.save; "
            "copy it again if it was copied."
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} holds tensors but no smoothhess result. Load files written by Interactions.save.")
    if metadata.get("version") not in READABLE:
        raise ValueError(
            f"{path} has format version {metadata.get('version')}, this smoothhess reads versions "
            f"{' and '.join(READABLE)}. Use the smoothhess that wrote it, or make the result again."
        )
    try:
        return restore(json.loads(metadata["about"]), tensors)
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error} is missing or wrong in it.") from error


def restore(about: dict[str, Any], tensors: dict[str, Tensor]) -> Interactions:
    """A result from what `parts` made of it."""
    from smoothhess.exact import Attribution, Derivatives, Exact
    from smoothhess.interactions import Interactions

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    grouping = None
    if about["groups"] is not None:
        kept = under("grouping.")
        grouping = Grouping(kept["mask"], kept.get("direction"), about["groups"], kept["scales"], kept["r2"])
    kind, numbers = about["gaussian"]
    common: dict[str, Any] = {
        "inputs": tensors["inputs"],
        "gaussian": Gaussian.from_state(kind, {**numbers, **under("gaussian.")}),
        "grouping": grouping,
        "target": tensors.get("target"),
        "n_passes": tensors["n_passes"],
        "status": tuple(about["status"]),
        "estimator_version": about.get("estimator_version", 1),  # files from before there were versions
    }
    if about.get("kind", "Interactions") != "Interactions":
        cls = {"Exact": Exact, "Attribution": Attribution}[about["kind"]]
        derivatives = Derivatives(**{"curvature": None, **under("derivatives.")})
        seeds = tuple(about["seeds"])
        if derivatives.gradient_stderr is None and derivatives.relative_error is None:  # nothing in it was sampled
            del common["estimator_version"]
        return cls(**common, derivatives=derivatives, method=about["method"], note=about["note"], seeds=seeds)
    stream = tuple(tuple(Segment(*s) for s in example) for example in about["stream"])
    return Interactions(
        **common,
        statistics=Statistics.from_tensors(about["design"], stream, about["rank"], under("statistics.")),
        control=about["control"],
        shrink=about["shrink"],
        unbiased=about["unbiased"],
        control_weights=tensors.get("control_weights"),
        control_note=about.get("control_note", ""),
        precision=about.get("precision", "float32"),
        tau_probes=about.get("tau_probes"),
        control_rank=about.get("control_rank"),
        precision_error=tensors.get("precision_error"),
        denoised=_sums(under("denoised.")),
        exactly_zero=tensors.get("exactly_zero"),
    )


def _sums(tensors: dict[str, Tensor]) -> Shrunk | None:
    """Group sums that were served; files of the first estimator do not hold their squared norm."""
    if "hessian" not in tensors:
        return None
    if "true2" not in tensors:
        tensors["true2"] = tensors["hessian"].double().square().sum((-1, -2)) + tensors["error2"]
    return Shrunk(**tensors)
