"""Files of results: tensors in safetensors format, everything else as JSON; pickle is not used.

This module reads, writes and checks files and holds the fields that all kinds of results share. The record of a kind of
result is made by its method `parts` and read by the function that `restorer` registers, both in the module of the kind.
Stores of many results are in `smoothhess.datasets.store`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smoothhess.draws.designs import find_design
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.grouping import Grouping
from smoothhess.estimate.hessian_estimate import HessianEstimate
from smoothhess.estimate.shrinkage import Shrunk
from smoothhess.estimate.statistics import DrawRange, Statistics
from smoothhess.model.atomic_write import atomic_write
from smoothhess.model.input_parts import place_parts
from smoothhess.model.targets import check_entries
from smoothhess.model.tensor_hash import check_tensor, checksums_of, with_checksums
from smoothhess.result.derivatives import Derivatives
from smoothhess.result.tensor_schema import check_tensors, naming

FORMAT = "smoothhess.interactions"
VERSION = 3
REMEDY = "Repeat the copy if the file was copied, or compute it again."
READABLE = ("1", "2", "3")  # 1 has neither denoising nor weights of a control variate, 2 has no exact results


class Parts(NamedTuple):
    """A result as plain data."""

    about: dict[str, Any]  # values that JSON can represent
    tensors: dict[str, Tensor]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with a prefix, by their names without the prefix."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


_RESTORE: dict[str, Callable[[Parts], Any]] = {}


def restorer(kind: str) -> Callable[[Callable[[Parts], Any]], Callable[[Parts], Any]]:
    """Decorator that registers the function which makes a result of this kind from its parts."""

    def register(function: Callable[[Parts], Any]) -> Callable[[Parts], Any]:
        _RESTORE[kind] = function
        return function

    return register


def restore(parts: Parts) -> Any:
    """The result that the parts describe; damaged parts raise ValueError or an error that `naming` converts."""
    _check_parts(parts)
    return _RESTORE[parts.about.get("kind", "Interactions")](parts)


def save(parts: Parts, path: str | Path) -> None:
    """Write the parts of a result to `path`, atomically."""
    metadata = {"format": FORMAT, "version": str(VERSION), "about": json.dumps(parts.about)}
    write_atomically(Path(path), {name: t.cpu().contiguous() for name, t in parts.tensors.items()}, metadata)


def write_atomically(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with checksums to a temporary name and rename it: `path` never holds a partial file."""
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, with_checksums(tensors, metadata))


def read_checked(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file of `write_atomically`, compared with their checksums.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a complete safetensors file, or has changed since it was written.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}.")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or it is truncated ({error}). Load files written by smoothhess; repeat "
            "the copy if the file was copied."
        ) from error
    with naming(path, REMEDY):
        checksums = checksums_of(metadata)
        if checksums is not None and checksums.keys() != tensors.keys():
            raise ValueError("its tensors are not those that were written")
        return metadata, {name: check_tensor(name, tensor, checksums) for name, tensor in tensors.items()}


def load(path: str | Path) -> Any:
    """The result that was saved to `path`."""
    path = Path(path)
    metadata, tensors = read_checked(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} holds tensors but no smoothhess result. Load files written by Interactions.save.")
    if metadata.get("version") not in READABLE:
        raise ValueError(
            f"{path} has format version {metadata.get('version')}, this smoothhess reads versions "
            f"{' and '.join(READABLE)}. Use the version of smoothhess that wrote it, or compute the result again."
        )
    with naming(path, REMEDY):
        return restore(Parts(json.loads(metadata["about"]), tensors))


def common_parts(result: Any) -> Parts:
    """The parts that all kinds of results have: inputs, Gaussian, groups, target, total work."""
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
    if result.names is not None:
        about["names"] = result.names
    for name in ("classes", "unit", "predicted", "feature_kind"):
        if value := getattr(result, name):
            about[name] = value
    if result.input_parts is not None:
        about["input_parts"] = [[part.name, part.shape] for part in result.input_parts]
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
    return Parts(about, tensors)


# dtype and dimensions of every tensor: B examples of d features, k coordinates (groups or `rank`), m rows of the head
_TABLE = {
    "inputs": "real B *",
    "n_passes": "float64 B",
    "target": "int64 B *",
    "gaussian.sigma": "real d",
    "gaussian.moving": "int64 rank",
    "gaussian.covariance": "real d d",
    "gaussian.root": "real d d",
    "gaussian.basis": "real s d",
    "gaussian.sigmas": "real s",
    "gaussian.mask": "int64 d",
    "gaussian.sizes": "int64 s",
    "grouping.mask": "int64 B? d",
    "grouping.direction": "real B? d",
    "grouping.scales": "float64 B? k",
    "grouping.r2": "real B",
    "control_weights": "real B 2",
    "precision_error": "real B",
    "no_kinks": "bool B",
    "exactly_zero": "bool B",
    "denoised.hessian": "real B k k",
    "denoised.error2": "real B",
    "denoised.true2": "real B",
    "statistics.n": "int64 B",
    "statistics.total": "float64 B k k",
    "statistics.even_sum": "float64 B k",
    "statistics.value_sum": "float64 B",
    "statistics.square_sum": "float64 B",
    "statistics.value": "real B",
    "statistics.own_values": "bool B",
    "statistics.gradient": "real B k",
    "statistics.stein": "float64 B moments 3",
    "statistics.skew": "real B rank *",
    "statistics.known": "real B c c",
    "statistics.known.factor": "real B c k",
    "statistics.drift": "real B r k",
    "statistics.drift_norm2": "real B",
    "statistics.rare.direction": "real B neurons k",
    "statistics.rare.margin": "float64 B neurons",
    "statistics.rare.jump": "float64 B neurons",
    "statistics.rare.complete": "bool B",
    "statistics.tails.direction": "real B strata rank",
    "statistics.tails.margin": "float64 B strata",
    "statistics.tails.score": "real B couples 2 k",
    "statistics.tails.odd": "real B couples 2 k",
    "statistics.tails.even": "real B couples k",
    "statistics.tails.value": "real B couples",
    "statistics.tails.n": "int64 B",
    "statistics.tails.stored": "int64 B",
    "statistics.tails.share": "float64 B",
    "statistics.tails.hessian": "float64 B k k",
    "statistics.tails.even_mean": "float64 B k",
    "statistics.tails.value_mean": "float64 B",
    "statistics.gram": "real B? k k",
    "statistics.head.weight": "real B? m",
    "statistics.head.score": "real B? m k",
    "statistics.head.odd": "real B m k",
    "statistics.head.even": "real B m k",
    "statistics.head.value_even": "real B m",
    "statistics.head.energy": "real B m",
    "statistics.head.along": "real B m",
    "statistics.head.across": "real B m",
    "derivatives.output": "real B",
    "derivatives.value": "real B",
    "derivatives.gradient": "real B k",
    "derivatives.curvature": "real B k k",
    "derivatives.n_calls": "int64 B",
    "derivatives.value_stderr": "real B",
    "derivatives.gradient_stderr": "real B k",
    "derivatives.relative_error": "real B",
}
_ALIKE = ("inputs", "statistics.gradient", "statistics.value", "statistics.head.score", "statistics.head.odd")


def _check_parts(parts: Parts) -> None:
    """Raise ValueError if tensors and values of a result do not fit each other."""
    about, tensors = parts
    inputs = tensors["inputs"]
    if inputs.ndim < 2 or not inputs.numel():
        raise ValueError(f"expected inputs (B, …), got {tuple(inputs.shape)}")
    sizes = {"2": 2, "3": 3, "B": len(inputs), "d": inputs[0].numel()}
    if about["groups"] is not None:
        sizes["k"] = int(about["groups"])
    if "rank" in about:
        sizes["rank"] = int(about["rank"])
        sizes.setdefault("k", sizes["rank"])
    elif about["groups"] is None:
        sizes["k"] = sizes["d"]
    sizes |= {} if "statistics.known.factor" in tensors else {"c": sizes["k"]}
    check_tensors(tensors, _TABLE, sizes)
    if len({tensors[name].dtype for name in _ALIKE if name in tensors}) > 1:
        raise ValueError(f"expected one dtype in {', '.join(_ALIKE)}")
    if "target" in tensors:
        check_entries(tensors["target"])
    rows, n = tensors.get("statistics.head.odd"), tensors.get("statistics.n")
    if n is not None and bool((n < 1).any()):
        raise ValueError(f"expected positive numbers of rows in 'statistics.n', got {int(n.min())}")
    if rows is not None and n is not None and "statistics.total" not in tensors and int(n.max()) > rows.shape[1]:
        raise ValueError(f"'statistics.total' of {int(n.max())} rows is missing: the head has {rows.shape[1]}")
    if about["groups"] is not None and "statistics.skew" in tensors and "statistics.gram" not in tensors:
        raise ValueError("'statistics.gram' of the groups is missing")
    if "input_parts" in about and place_parts(about["input_parts"])[-1].features.stop != sizes["d"]:
        raise ValueError(f"expected 'input_parts' of {sizes['d']} features")
    for name in ("status", "stream", "seeds", "names"):
        if name in about and len(about[name]) != len(inputs):
            raise ValueError(f"expected {len(inputs)} entries of {name!r}, got {len(about[name])}")
    if not all(isinstance(reason, str) for reason in about.get("status", ())):
        raise ValueError(f"expected texts in 'status', got {about['status']!r:.100}")
    if "design" in about:
        find_design(about["design"])
    for name in ("method", "note", "precision", "feature_kind", "unit"):
        if name in about and not isinstance(about[name], str):
            raise ValueError(f"expected {name!r} as text, got {type(about[name]).__name__}")


def _numbers_of(parts: Parts) -> tuple[Gaussian, Grouping | None]:
    """The Gaussian and the groups of `common_parts`."""
    grouping = None
    if parts.about["groups"] is not None:
        kept = parts.under("grouping.")
        grouping = Grouping(kept["mask"], kept.get("direction"), parts.about["groups"], kept["scales"], kept["r2"])
    kind, numbers = parts.about["gaussian"]
    return Gaussian.from_state(kind, {**numbers, **parts.under("gaussian.")}), grouping


def _common_fields(parts: Parts) -> dict[str, Any]:
    """The fields that all kinds of results have, by name."""
    about, tensors = parts
    return {
        "inputs": tensors["inputs"],
        "target": tensors.get("target"),
        "n_passes": tensors["n_passes"],
        "status": tuple(about["status"]),
        "estimator_version": about.get("estimator_version", 1),  # files written before version numbers
        "names": tuple(tuple(map(str, names)) for names in about["names"]) if "names" in about else None,
        "classes": tuple(map(str, about["classes"])) if "classes" in about else None,
        "unit": about.get("unit", ""),
        "predicted": bool(about.get("predicted", False)),
        "feature_kind": about.get("feature_kind", ""),  # older files have none
        "input_parts": place_parts(about["input_parts"]) if "input_parts" in about else None,
    }


def sampled_parts(result: Any) -> Parts:
    """An `Interactions` as plain data."""
    about, tensors = common_parts(result)
    statistics, estimate = result.statistics, result.estimate
    tensors |= {f"statistics.{name}": t for name, t in statistics.tensors().items()}
    about |= {"design": statistics.design, "rank": statistics.rank, "stream": statistics.stream}
    about |= {name: getattr(result, name) for name in _SETTINGS} | {"shrink": estimate.shrink}
    if estimate.sums is not None:
        tensors |= {f"denoised.{name}": getattr(estimate.sums, name) for name in ("hessian", "error2", "true2")}
    optional = {name: getattr(result, name) for name in ("control_weights", "precision_error")}
    optional["no_kinks"] = estimate.no_kinks
    return Parts(about, tensors | {name: t for name, t in optional.items() if t is not None})


def sampled_fields(parts: Parts) -> dict[str, Any]:
    """The inverse of `sampled_parts`: the fields of an `Interactions` by name."""
    about, tensors = parts
    stream = tuple(tuple(DrawRange(*s) for s in example) for example in about["stream"])
    statistics = Statistics.from_tensors(about["design"], stream, about["rank"], parts.under("statistics."))
    no_kinks = tensors.get("no_kinks", tensors.get("exactly_zero"))  # its former name
    sums = _sums(parts.under("denoised."))
    gaussian, grouping = _numbers_of(parts)
    if gaussian.rank(tensors["inputs"][0].numel()) != about["rank"]:
        raise ValueError(f"expected draws of the Gaussian's dimension, got rank {about['rank']}")
    estimate = HessianEstimate(statistics, gaussian, grouping, about["shrink"], no_kinks, sums)
    settings = {name: about[name] for name in _SETTINGS if name in about}  # older files lack some of them
    weights, error = tensors.get("control_weights"), tensors.get("precision_error")
    own = {"estimate": estimate, "control_weights": weights, "precision_error": error}
    return _common_fields(parts) | settings | own


_SETTINGS = ("control", "unbiased", "control_note", "precision", "tau_probes", "control_rank")


def _sums(tensors: dict[str, Tensor]) -> Shrunk | None:
    """Denoised group sums of a file; files of estimator version 1 do not hold their squared norm."""
    if "hessian" not in tensors:
        return None
    if "true2" not in tensors:
        tensors["true2"] = tensors["hessian"].double().square().sum((-1, -2)) + tensors["error2"]
    return Shrunk(**tensors)


def stored_parts(result: Any) -> Parts:
    """An `Exact` or `Attribution` as plain data."""
    about, tensors = common_parts(result)
    about |= {"method": result.method, "note": result.note, "seeds": result.seeds}
    return Parts(about, tensors | {f"derivatives.{name}": t for name, t in result.derivatives.tensors().items()})


def stored_fields(parts: Parts) -> dict[str, Any]:
    """The inverse of `stored_parts`: the fields of an `Exact` or `Attribution` by name."""
    about, common = parts.about, _common_fields(parts)
    gaussian, grouping = _numbers_of(parts)
    tensors: dict[str, Any] = {"curvature": None, **parts.under("derivatives.")}
    derivatives = Derivatives(**tensors, gaussian=gaussian, grouping=grouping)
    if derivatives.gradient_stderr is None and derivatives.relative_error is None:  # no part of it was sampled
        del common["estimator_version"]
    own = {"derivatives": derivatives, "method": about["method"], "note": about["note"], "seeds": tuple(about["seeds"])}
    return common | own
