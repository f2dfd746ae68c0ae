"""A sampler whose rows are evaluated by all processes: one leader and its followers.

The rows of a design depend only on (seed, block), so every process can generate any of them. The leader requests
further rows; process r evaluates the r-th part of them and sends what a single process would have kept: the rows of the
head, which are concatenated in order, and sums over all rows, which are added. The statistics are those of a single
process, up to the order of additions. How messages are sent is not decided here but in `process_group`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from smoothhess.curvature.activation_hooks import OtherPathError
from smoothhess.curvature.control_variate import Control
from smoothhess.curvature.frozen_network import NoKinksError
from smoothhess.curvature.one_flip import Expectation, Kinks
from smoothhess.datasets.distributed.process_group import Forms, Processes, forms
from smoothhess.draws.gaussian import Gaussian
from smoothhess.draws.tail_strata import TailStrata
from smoothhess.estimate.hessian_estimate import HessianEstimate
from smoothhess.estimate.statistics import DrawRange, Extension, Rows, Statistics, chain, cut, join
from smoothhess.explainers.choose_control import frozen_model
from smoothhess.explainers.progress import Progress
from smoothhess.explainers.sampler import Sampler
from smoothhess.linalg.low_rank import Known, mean
from smoothhess.model.float_precision import AGREEMENT
from smoothhess.result.interactions import Interactions

# Recoverable errors, and the error that the leader raises for each request: sampling is possible without H₁.
UNFREEZABLE = (NoKinksError, OtherPathError)
RECOVERABLE = {"freeze": NoKinksError, "expect": NoKinksError, "extend": OtherPathError}
T = TypeVar("T")
Found = tuple[dict[str, Tensor], dict[str, Tensor]]  # of one process: pieces to concatenate, and sums


class Report(NamedTuple):
    """The answer of a process to a request of the leader."""

    pieces: Forms
    failure: str = ""  # message of a recoverable error


class Stretch(NamedTuple):
    """Further rows of some examples that all have the same number of rows so far."""

    examples: tuple[int, ...]
    places: tuple[tuple[int, int], ...]  # seed and first row of each example
    seen: int  # rows so far
    rows: int
    check: bool = False  # whether each process checks the model with its first rows

    def share(self, rank: int, count: int) -> range:
        """The rows that a process evaluates; the share of the leader is never empty and never smaller than others.

        >>> [list(Stretch((0,), ((7, 100),), 100, 5).share(rank, 2)) for rank in (0, 1)]
        [[0, 1, 2], [3, 4]]
        """
        return range(-(-self.rows * rank // count), -(-self.rows * (rank + 1) // count))


class Watch:
    """A progress bar that also checks, after every chunk of rows, whether another process has failed."""

    def __init__(self, processes: Processes, bar: Progress | None = None) -> None:
        self.processes, self.bar = processes, bar

    def update(self, rows: int) -> None:
        """Count `rows` more rows, and raise RankError if another process has failed."""
        self.processes.check()
        if self.bar is not None:
            self.bar.update(rows)


def evaluate(sampler: Sampler, stretch: Stretch, processes: Processes, watch: Watch) -> Found:
    """Evaluate the share of this process, with the methods of `Sampler` itself also in the leader."""
    index = torch.tensor(stretch.examples, device=sampler.inputs.device)
    share = stretch.share(processes.process_rank, processes.count)
    places = [DrawRange(seed, start + share.start, start + share.start) for seed, start in stretch.places]
    nothing = Sampler.begin(sampler, [0] * len(sampler.inputs)).select(index)
    part = replace(nothing, stream=tuple((place,) for place in places))
    extension = Sampler.extension(sampler, part, index)
    part = Sampler.add_rows(sampler, extension, len(share), watch, stretch.check)  # type: ignore[arg-type]
    head = cut(part.head, max(part.head_rows - stretch.seen - share.start, 0))
    sums = {name: getattr(part, name) for name in ("even_sum", "value_sum", "square_sum", "stein")}
    if part.skew is not None:
        sums["skew"] = part.skew
    if stretch.seen + stretch.rows > part.head_rows:
        sums["total"] = part.sampled()
    return {f.name: t for f in fields(Rows) if (t := getattr(head, f.name)) is not None}, sums


def appended(
    stats: Statistics, stretch: Stretch, heads: Sequence[Mapping[str, Tensor]], sums: Mapping[str, Tensor], known: Any
) -> Statistics:
    """`stats` with a stretch of rows, from `heads` and `sums` of all processes; `known` was subtracted per row."""
    joined = [Rows(**head) for head in heads if head["odd"].shape[1]]
    total = None
    if "total" in sums:
        total = sums["total"] + stats.sampled() if stretch.seen else sums["total"]
    stream = zip(stats.stream, stretch.places, strict=True)
    return replace(
        stats,
        stream=tuple(chain(*seen, DrawRange(seed, start, start + stretch.rows)) for seen, (seed, start) in stream),
        n=stats.n + stretch.rows,
        head=join([stats.head, *joined] if stretch.seen else joined) if joined else stats.head,
        total=total,
        even_sum=stats.even_sum + sums["even_sum"],
        value_sum=stats.value_sum + sums["value_sum"],
        square_sum=stats.square_sum + sums["square_sum"],
        stein=stats.stein + sums["stein"],
        skew=None if stats.skew is None else stats.skew + sums["skew"],
        known=mean(stats.known, stats.n, known, torch.full_like(stats.n, stretch.rows)),
    )


# --- leader -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Leader(Sampler):
    """The sampler of process 0, with the interface of `Sampler`; `release` must be called last."""

    processes: Processes

    @staticmethod
    def of(sampler: Sampler, processes: Processes) -> Leader:
        """A leader with the fields of `sampler`."""
        return Leader(**{f.name: getattr(sampler, f.name) for f in fields(Sampler)}, processes=processes)

    def request(
        self, name: str, work: Callable[[], Found], given: Mapping[str, Tensor] | None = None, **about: Any
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Run `name` in the followers and `work` here; returns the pieces of all processes, and sums over them."""
        given = given or {}
        self.processes.broadcast_message((name, forms(given), about))
        self.processes.broadcast(given)
        (pieces, sums), failure = _try(name, work, ({}, {}))
        reports: list[Report] = self.processes.exchange(_report(pieces, failure))
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report.failure:
                raise RECOVERABLE[name](f"rank {rank}: {report.failure}")
        others = [self.processes.receive(r.pieces, i, self.inputs.device) for i, r in enumerate(reports) if i]
        return [pieces, *others], self.processes.sum(sums)

    def begin(self, seeds: Sequence[int]) -> Statistics:
        """As in `Sampler`; also sends the control variate to all processes."""
        given, control = {"f(x)": self.unperturbed.value}, self.control
        if control is not None:
            given |= _tensors(control.expected) | {"linear": control.linear, "flip": control.flip}
        if self.strata is not None:
            given |= {"strata.direction": self.strata.direction, "strata.margin": self.strata.margin}
        self.request("begin", lambda: ({}, {}), given)
        return super().begin(seeds)

    def share(self, kinks: Kinks) -> Kinks:
        """The model that was frozen here, after all processes have frozen theirs."""
        self.request("freeze", lambda: ({}, {}))
        return SharedKinks(kinks.network, leader=self)

    def extend(self, extension: Extension, rows: int, bar: Progress, check: bool) -> Statistics:
        """As in `Sampler`, with the rows split over all processes; an exception leaves the extension without rows."""
        stats, index = extension.stats, extension.index
        places = tuple((p.seed, p.start) for p in map(stats.next_row, range(len(stats))))
        stretch = Stretch(tuple(index.tolist()), places, int(stats.n.max()), rows, check)
        if stretch.seen + rows > stats.head_rows:
            stats.refuse_large(stretch.seen + rows, self.inputs[0].numel() if self.grouping is None else None)
        self.add_tails(extension, rows)
        work = partial(evaluate, self, stretch, self.processes, Watch(self.processes, bar))
        heads, sums = self.request("extend", work, stretch=stretch)
        bar.update((rows - len(stretch.share(0, self.processes.count))) * len(index))
        found = appended(stats, stretch, heads, sums, extension.known)
        return replace(found, tails=extension.grown_tails(rows))

    def release(self, result: Interactions) -> Interactions:
        """Send the result to all processes, which ends their loops."""
        given, about = _packed(result)
        self.processes.broadcast_message(("finish", forms(given), about))
        self.processes.broadcast(given)
        return result


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedKinks(Kinks):
    """The frozen network of the leader; all processes compute the closed forms of some examples each."""

    leader: Leader

    def only(self, mask: Tensor) -> Kinks:
        """As in `Kinks`, in all processes."""
        self.leader.request("only", lambda: ({}, {}), {"mask": mask.to(torch.uint8)})
        found = super().only(mask)
        return SharedKinks(found.network, found.selection, leader=self.leader)

    def expectation(
        self, gaussian: Gaussian, layers: bool = False, probes: Tensor | None = None, index: Tensor | None = None
    ) -> Expectation:
        """As in `Kinks`; computed only in the leader if `layers`."""
        if layers:
            return super().expectation(gaussian, layers, probes, index)
        own = partial(Kinks.expectation, self, gaussian, False, probes)
        return self._shared(own, {} if probes is None else {"probes": probes}, index)

    def thin_expectation(
        self, gaussian: Gaussian, probes: Tensor | None, directions: Tensor, index: Tensor | None = None
    ) -> Expectation:
        """As in `Kinks`."""
        own = partial(Kinks.thin_expectation, self, gaussian, probes, directions)
        return self._shared(own, {"directions": directions} | ({} if probes is None else {"probes": probes}), index)

    def _shared(
        self, own: Callable[[Tensor], Expectation], given: Mapping[str, Tensor], index: Tensor | None
    ) -> Expectation:
        everyone = self.network.everyone if index is None else index
        if len(everyone) == 1:  # the closed form of one example is not split
            return own(everyone)

        def work() -> Found:
            return _tensors(own(_part(everyone, self.leader.processes))), {}

        pieces, _ = self.leader.request("expect", work, given, index=tuple(everyone.tolist()))
        return Expectation.cat([_expectation(p) for p in pieces if p])


# --- followers --------------------------------------------------------------------------------------------------------


def follow(sampler: Sampler, processes: Processes) -> Interactions:
    """Execute the requests of the leader until it sends the result, which is returned."""
    follower = Follower(sampler, processes)
    while True:
        name, expected, about = processes.receive_message()
        given = processes.receive_broadcast(expected, sampler.inputs.device)
        if name == "finish":
            return _restored(sampler, given, about)
        following, failure = _try(name, partial(getattr(follower, name), given, **about), (follower, {}, {}))
        follower, pieces, sums = following
        reports: list[Report] = processes.exchange(_report(pieces, failure))
        if not any(report.failure for report in reports):  # otherwise the leader decides how to continue
            processes.send(pieces)
            processes.sum(sums)


@dataclass(frozen=True, eq=False)
class Follower:
    """A process that executes requests; each method is one kind of request.

    It returns the follower for the next request, with the pieces and sums of this process.
    """

    sampler: Sampler
    processes: Processes
    kinks: Kinks | None = None
    checked: bool = False  # whether this process has checked the model with its rows

    def begin(self, given: dict[str, Tensor]) -> Following:
        """Check that the model is the same as in the leader, and use its control variate."""
        own, value = self.sampler.unperturbed.value, given["f(x)"]
        if not torch.allclose(own, value, rtol=AGREEMENT[self.sampler.oracle.precision], atol=1e-6):
            worst = int((own - value).abs().argmax())
            raise ValueError(
                f"f(x) of example {worst} is {float(own[worst]):.6g} on this rank and {float(value[worst]):.6g} on "
                "rank 0: the models differ. Load the same weights on every rank, or initialise them with the same seed."
            )
        control = None
        if "linear" in given:
            assert self.kinks is not None
            control = Control(self.kinks, _expectation(given), given["linear"], given["flip"])
        strata = None
        if "strata.margin" in given:
            strata = TailStrata(given["strata.direction"], given["strata.margin"])
        return replace(self, sampler=replace(self.sampler, control=control, strata=strata)), {}, {}

    def freeze(self, given: dict[str, Tensor]) -> Following:
        """Freeze the model at the inputs."""
        return replace(self, kinks=frozen_model(self.sampler)), {}, {}

    def only(self, given: dict[str, Tensor]) -> Following:
        """Select neurons."""
        assert self.kinks is not None
        return replace(self, kinks=self.kinks.only(given["mask"].bool())), {}, {}

    def expect(self, given: dict[str, Tensor], index: tuple[int, ...]) -> Following:
        """The closed forms of the share of this process of the examples at `index`."""
        assert self.kinks is not None
        chosen = _part(torch.tensor(index, device=self.sampler.inputs.device), self.processes)
        if not len(chosen):
            return self, {}, {}
        gaussian, probes = self.sampler.gaussian, given.get("probes")
        if "directions" in given:
            return self, _tensors(self.kinks.thin_expectation(gaussian, probes, given["directions"], chosen)), {}
        return self, _tensors(self.kinks.expectation(gaussian, False, probes, chosen)), {}

    def extend(self, given: dict[str, Tensor], stretch: Stretch) -> Following:
        """Evaluate the share of this process of the rows; the model is checked with the first rows that it has."""
        share = stretch.share(self.processes.process_rank, self.processes.count)
        check = len(share) > 0 and not self.checked
        found = evaluate(self.sampler, stretch._replace(check=check), self.processes, Watch(self.processes))
        return replace(self, checked=self.checked or check), *found


Following = tuple[Follower, dict[str, Tensor], dict[str, Tensor]]


# --- shared by leader and followers -----------------------------------------------------------------------------------


def _try(name: str, work: Callable[[], T], otherwise: T) -> tuple[T, Exception | None]:
    """The result of `work`; or `otherwise` and an error after which the leader can continue without control variate."""
    try:
        return work(), None
    except UNFREEZABLE as error:
        if name not in RECOVERABLE:
            raise
        return otherwise, error


def _report(pieces: Mapping[str, Tensor], failure: Exception | None) -> Report:
    return Report(forms(pieces), "" if failure is None else str(failure) or type(failure).__name__)


def _part(index: Tensor, processes: Processes) -> Tensor:
    """The examples whose closed form this process computes."""
    return index.tensor_split(processes.count)[processes.process_rank]


def _tensors(expected: Expectation) -> dict[str, Tensor]:
    own = {**expected.hessian.tensors(), "gradient": expected.gradient, "passes": expected.passes}
    others = {"drift": expected.drift, "value": expected.value}
    return own | {name: t for name, t in others.items() if t is not None}


def _expectation(tensors: Mapping[str, Tensor]) -> Expectation:
    known = Known(tensors["known"], tensors.get("known.factor"))
    return Expectation(known, tensors["gradient"], tensors["passes"], (), tensors.get("drift"), tensors.get("value"))


def _packed(result: Interactions) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a result into tensors and other values, without the inputs, the Gaussian and the groups."""
    estimate, stats = result.estimate, result.statistics
    values = {f.name: getattr(result, f.name) for f in fields(result) if f.name not in ("inputs", "estimate")}
    tensors = {name: v for name, v in values.items() if isinstance(v, Tensor)}
    rest = {name: v for name, v in values.items() if name not in tensors}
    tensors |= {f"statistics.{name}": t for name, t in stats.tensors().items()}
    if estimate.no_kinks is not None:
        tensors["no_kinks"] = estimate.no_kinks
    return tensors, {"stats": (stats.design, stats.stream, stats.rank), "shrink": estimate.shrink, "rest": rest}


def _restored(sampler: Sampler, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Interactions:
    """The result that `_packed` has split."""
    prefix, (design, stream, rank) = "statistics.", about["stats"]
    kept = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    own = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
    estimate = HessianEstimate(
        Statistics.from_tensors(design, stream, rank, kept),
        sampler.gaussian,
        sampler.grouping,
        about["shrink"],
        own.pop("no_kinks", None),
    )
    return Interactions(inputs=sampler.inputs, estimate=estimate, **own, **about["rest"])
