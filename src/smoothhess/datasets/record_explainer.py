"""An explainer with its options, applied to packs of records.

SmoothHess, neurons and user functions have the same interface here. How records are batched and stored is not decided
in this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.datasets.disk_budget import Sizes
from smoothhess.datasets.job_settings import SILENT, described, fingerprint
from smoothhess.datasets.record_batches import Pack
from smoothhess.draws.designs import find_design
from smoothhess.draws.gaussian import Gaussian
from smoothhess.evaluate.global_interactions import LEAST_CALLS, MOST_CALLS, Explain
from smoothhess.explainers.options import Options
from smoothhess.explainers.smooth_hess import NeuronSmoothHess, SmoothHess
from smoothhess.model.float_precision import AGREEMENT, check_precision
from smoothhess.model.gradients import Oracle
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed, modules_behind
from smoothhess.result.exact import StoredResult
from smoothhess.result.result import Result
from smoothhess.result.segments import group_names

_NEURON = ("neuron_selector", "attribute_to_neuron_input")


@dataclass(frozen=True, eq=False)
class CheckedExplainer:
    """An explainer of one of several processes, and functions that may raise because of another process."""

    explainer: SmoothHess | NeuronSmoothHess | Explain
    check: Callable[[], None]  # called before each pack of records
    agree: Callable[[dict[str, Any]], None]  # called with values that all processes must share; waits for all of them


@dataclass(frozen=True, eq=False)
class Question:
    """An explainer and its options, the same for all records."""

    explainer: SmoothHess | Explain
    options: Options  # the seed is replaced by one per record; for a function, only feature_mask is used
    about: dict[str, Any]  # the same as JSON values, for the settings of a store
    check: Callable[[], None] | None = None  # as in CheckedExplainer
    agree: Callable[[dict[str, Any]], None] | None = None
    given: frozenset[str] = frozenset()  # options of the user: a subclass may have other defaults for the rest

    @staticmethod
    def make(explainer: Any, options: dict[str, Any], columns: Sequence[str] | None = None) -> Question:
        """Validate the explainer and the options of the user; `columns` are the names of the features of a table."""
        if isinstance(explainer, CheckedExplainer):
            made = Question.make(explainer.explainer, options, columns)
            return replace(made, check=explainer.check, agree=explainer.agree)
        options = dict(options)
        mask = options.pop("feature_mask", None)
        names = columns if mask is None else group_names(mask)
        mask = None if mask is None else torch.as_tensor(mask)
        about: dict[str, Any] = {"explainer": type(explainer).__name__}
        if isinstance(explainer, NeuronSmoothHess):
            if "neuron_selector" not in options:
                raise ValueError("NeuronSmoothHess needs the neuron to explain. Pass neuron_selector=…")
            neuron = {name: options.pop(name) for name in _NEURON if name in options}
            about |= {name: described(v) for name, v in neuron.items()} | {"layer": _layer_name(explainer)}
            explainer = explainer.for_neuron(neuron["neuron_selector"], neuron.get("attribute_to_neuron_input", False))
        if isinstance(explainer, SmoothHess):
            if options.get("names") is None and names is not None:
                options["names"] = names
            unknown = sorted(options.keys() - {f.name for f in fields(Options)})
            if unknown:
                raise TypeError(f"SmoothHess.attribute has no option {', '.join(map(repr, unknown))}.")
            chosen = Options(**options, feature_mask=mask)
            about["model"] = fingerprint(explainer.forward_func)
            about |= {name: described(v) for name, v in chosen.arguments().items() if name not in (*SILENT, "seed")}
            return Question(explainer, chosen, about, given=frozenset(options))
        if isinstance(explainer, nn.Module) or not callable(explainer):
            raise TypeError(
                "explainer must be SmoothHess(model), NeuronSmoothHess(model, layer) or a function (inputs, target, "
                f"seeds) → Interactions, got {type(explainer).__name__}."
            )
        if options:
            raise ValueError(
                f"{', '.join(sorted(options))} cannot be passed on to a function. Set the options inside it: lambda x, "
                "target, seeds: …"
            )
        about |= {"model": fingerprint(explainer), "feature_mask": described(mask)}
        function: Any = explainer
        return Question(function, Options(feature_mask=mask), about)

    @property
    def is_function(self) -> bool:
        """Whether the explainer is a function of the user, whose records may be token ids."""
        return not isinstance(self.explainer, SmoothHess)

    @property
    def forward_func(self) -> Callable[..., Any]:
        """The model, or the user function."""
        return self.explainer.forward_func if isinstance(self.explainer, SmoothHess) else self.explainer

    def device(self, inputs: Tensor) -> torch.device:
        """The device of the model if all its parameters share one, otherwise the device of the inputs."""
        devices = {p.device for m in modules_behind(self.forward_func) for p in m.parameters()}
        return devices.pop() if len(devices) == 1 else inputs.device

    def sizes(self, inputs: Tensor) -> Sizes:
        """Sizes that all records share; raises ValueError for options that fit no record."""
        shape, d = tuple(inputs.shape[1:]), inputs[0].numel()
        features, mask = d, self.options.feature_mask
        if mask is not None:
            if mask.ndim >= inputs.ndim and len(mask) != 1:
                raise ValueError(
                    f"feature_mask must have the shape of one input, {shape}: all records have the same groups, got "
                    f"{tuple(mask.shape)}."
                )
            features = int(mask.max()) + 1
        if not isinstance(self.explainer, SmoothHess):
            return Sizes(d, features, d, inputs.element_size(), None, 0)
        options = self.options
        rank = Gaussian.ensure(sigma=options.sigma, radius=options.radius, gaussian=options.gaussian, d=d).rank(d)
        rows = None if options.n_calls is None else options.rows(rank)
        return Sizes(d, features, rank, inputs.element_size(), rows, options.rows(rank))

    def explain(self, pack: Pack, seeds: list[int]) -> Result:
        """Explain the records of a pack; `seeds` has one seed per record."""
        if self.check is not None:
            self.check()
        if isinstance(self.explainer, SmoothHess):
            return self._attribute(pack, {"seed": seeds})
        if pack.args is not None:
            raise ValueError("additional_forward_args cannot be passed on to a function. Use them inside it.")
        result = self.explainer(pack.inputs, pack.target, seeds)
        if not isinstance(result, Result) or len(result) != len(pack):
            raise ValueError(
                f"the explainer must return Interactions of its {len(pack)} inputs, got "
                f"{f'{len(result)} examples' if isinstance(result, Result) else type(result).__name__}."
            )
        mask = self.options.feature_mask
        return result if mask is None else result.groups(mask)

    def again(self, pack: Pack, first: Result, drawn: list[int], seeds: list[int], calls: int) -> Any:
        """A second, independent estimate for the summary; None where the first is not random."""
        if isinstance(first, StoredResult) and first.seeds != tuple(drawn):
            return None
        if not isinstance(self.explainer, SmoothHess):
            return self.explain(pack, seeds)
        fixed = {"n_calls": calls, "tol": Options.tol, "max_calls": None}  # not those of the first one
        return self._attribute(pack, {"seed": seeds, "shrink": False, **fixed})

    def _attribute(self, pack: Pack, own: dict[str, Any]) -> Result:
        """Explain a pack with the options of the user, and those that the job sets."""
        assert isinstance(self.explainer, SmoothHess)
        chosen = {name: v for name, v in self.options.arguments().items() if name in self.given}
        options = {**chosen, "feature_mask": self.options.feature_mask, **own}
        return self.explainer.attribute(pack.inputs, pack.target, pack.forward_args, **options)

    def second_calls(self, d: int) -> int:
        """Calls of the second estimate: few, complete blocks, and no more than the first has."""
        block = 2 * find_design("orthogonal").block_rows(d)
        calls = min(block * math.ceil(LEAST_CALLS / 2 / block), MOST_CALLS // 2)
        return min(calls, int(self.options.n_calls or calls))

    def output(self, pack: Pack) -> float | None:
        """f(x) of the only record of a pack; None for a user function, whose model is not accessible."""
        if not isinstance(self.explainer, SmoothHess):
            return None
        precision = check_precision(self.options.precision, pack.inputs.device, pack.inputs.dtype)
        oracle = Oracle(self.forward_func, pack.inputs, pack.target, pack.forward_args, 1, precision)
        with borrowed(self.forward_func, pack.inputs.device):
            return float(oracle.values(pack.inputs, torch.zeros(1, dtype=torch.long, device=pack.inputs.device)))

    @property
    def agreement(self) -> float:
        """Relative tolerance for f(x) of the same record in two runs."""
        return AGREEMENT[self.options.precision]

    def predicted(self, pack: Pack) -> list[tuple[int, ...]]:
        """Index of the largest output of each record."""
        if not isinstance(self.explainer, SmoothHess):
            raise ValueError('target="predicted" needs SmoothHess(model). Pass a function of the batch instead.')
        rows = self.options.internal_batch_size
        call = ModelCall(self.explainer.forward_func, pack.inputs, "predicted", pack.forward_args, rows)
        return [(c,) for c in call.target.tolist()]


def _layer_name(explainer: NeuronSmoothHess) -> str:
    if isinstance(explainer.layer, str):
        return explainer.layer
    for module in modules_behind(explainer.forward_func):
        for name, layer in module.named_modules():
            if layer is explainer.layer:
                return name
    return type(explainer.layer).__name__
