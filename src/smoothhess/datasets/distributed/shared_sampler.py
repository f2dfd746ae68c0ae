"""A sampler whose rows are evaluated by all ranks: the one that leads, and those that follow.

Rows of a design are a function of (seed, block) alone, so any rank can make any of them. The leader asks for further
rows; rank r evaluates the r-th part of them and sends what a single process would have kept: the rows of the head, put
in line in their order, and sums over all rows, which are added up. So the statistics are those of one process, up to
the order in which numbers are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from smoothhess.curvature.control_variate import Control
from smoothhess.curvature.one_flip import Expectation, Kinks, NoKinksError
from smoothhess.datasets.distributed.process_group import Forms, Processes, forms
from smoothhess.draws.gaussian import Gaussian
from smoothhess.estimate.statistics import DrawRange, Rows, Statistics, chain, cut, join
from smoothhess.explainers.sampler import OtherPathError, Sampler
from smoothhess.linalg.low_rank import Known, mean
from smoothhess.linalg.memory import is_out_of_memory
from smoothhess.model.float_precision import AGREEMENT
from smoothhess.result.interactions import Interactions

FREEZING = ((ValueError, RuntimeError, TypeError, IndexError), NoKinksError)  # what may go wrong, and what it means
TROUBLE = {"freeze": FREEZING, "expect": FREEZING, "extend": ((OtherPathError,), OtherPathError)}  # without H₁ it goes
Found = tuple[dict[str, Tensor], dict[str, Tensor]]  # of one rank: pieces that are put in line, and sums


class Report(NamedTuple):
    """What a rank says when it has done what the leader asked for."""

    pieces: Forms
    trouble: str = ""  # that the leader may know a way around


class Stretch(NamedTuple):
    """Further rows of some examples, all of which have seen equally many."""

    examples: tuple[int, ...]
    places: tuple[tuple[int, int], ...]  # seed and first row of each
    seen: int  # rows so far
    rows: int

    def share(self, rank: int, count: int) -> range:
        """The part of the rows that a rank evaluates; the leader's is never empty, nor smaller than others.

        >>> [list(Stretch((0,), ((7, 100),), 100, 5).share(rank, 2)) for rank in (0, 1)]
        [[0, 1, 2], [3, 4]]
        """
        return range(-(-self.rows * rank // count), -(-self.rows * (rank + 1) // count))


class Watch:
    """In the place of a progress bar: between two chunks of rows, asks whether another rank has failed meanwhile."""

    def __init__(self, ranks: Processes, bar: tqdm | None = None) -> None:
        self.ranks, self.bar = ranks, bar

    def update(self, rows: int) -> None:
        """After so many rows."""
        self.ranks.check()
        if self.bar is not None:
            self.bar.update(rows)


def evaluate(sampler: Sampler, blank: Statistics, stretch: Stretch, ranks: Processes, watch: Watch) -> Found:
    """This rank's share of a stretch; `blank` are statistics of nothing."""
    index = torch.tensor(stretch.examples, device=sampler.inputs.device)
    share = stretch.share(ranks.rank, ranks.count)
    places = [DrawRange(seed, start + share.start, start + share.start) for seed, start in stretch.places]
    part = replace(blank.select(index), stream=tuple((place,) for place in places))
    part = Sampler.extend(sampler, part, len(share), index, watch)  # type: ignore[arg-type]
    head = cut(part.head, max(part.head_rows - stretch.seen - share.start, 0))
    sums = {"even_sum": part.even_sum, "value_sum": part.value_sum, "stein": part.stein}
    if part.skew is not None:
        sums["skew"] = part.skew
    if stretch.seen + stretch.rows > part.head_rows:
        sums["total"] = part.sampled()
    return {f.name: t for f in fields(Rows) if (t := getattr(head, f.name)) is not None}, sums


def appended(
    stats: Statistics, stretch: Stretch, heads: Sequence[Mapping[str, Tensor]], sums: Mapping[str, Tensor], known: Any
) -> Statistics:
    """`stats` with a stretch of rows, of which the ranks found `heads` and `sums`; `known` was subtracted from each."""
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
        stein=stats.stein + sums["stein"],
        skew=None if stats.skew is None else stats.skew + sums["skew"],
        known=mean(stats.known, stats.n, known, torch.full_like(stats.n, stretch.rows)),
    )


# --- rank 0 -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Leader(Sampler):
    """A sampler like any other to whoever uses it; `release` must come last."""

    ranks: Processes = None  # type: ignore[assignment]
    blank: Statistics = None  # type: ignore[assignment]

    @staticmethod
    def of(sampler: Sampler, ranks: Processes) -> Leader:
        """In the place of `sampler`."""
        return Leader(**{f.name: getattr(sampler, f.name) for f in fields(Sampler)}, ranks=ranks)

    def ask(
        self, name: str, work: Callable[[], Found], given: Mapping[str, Tensor] | None = None, **about: Any
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Have `name` done by the followers and `work` here; the pieces of all ranks, and the sums over them."""
        given = given or {}
        self.ranks.tell((name, forms(given), about))
        self.ranks.give(given)
        (pieces, sums), trouble = _try(name, work)
        reports: list[Report] = self.ranks.exchange(_report(pieces, trouble))
        if trouble is not None:
            raise trouble
        for rank, report in enumerate(reports):
            if report.trouble:
                raise TROUBLE[name][1](f"rank {rank}: {report.trouble}")
        others = [self.ranks.receive(r.pieces, i, self.inputs.device) for i, r in enumerate(reports) if i]
        return [pieces, *others], self.ranks.sum(sums)

    def begin(self, seeds: Sequence[int]) -> Statistics:
        """As always; everybody gets the control variate."""
        self.blank = super().begin(seeds)
        given, control = {"f(x)": self.blank.value}, self.control
        if control is not None:
            given |= _tensors(control.expected) | {"linear": control.linear, "flip": control.flip}
        passes = None if control is None else control.expected.passes
        self.ask("begin", lambda: ({}, {}), given, seeds=tuple(seeds), passes=passes)
        return self.blank

    def see_kinks(self, most: float) -> Kinks:
        """As always; where the model can be frozen here, everybody freezes it."""
        kinks = super().see_kinks(most)
        self.ask("freeze", lambda: ({}, {}))
        return SharedKinks(**{f.name: getattr(kinks, f.name) for f in fields(Kinks)}, leader=self)

    def extend(self, stats: Statistics, rows: int, index: Tensor, bar: tqdm) -> Statistics:
        """As always, by everybody."""
        places = tuple((p.seed, p.start) for p in map(stats.next_row, range(len(stats))))
        stretch = Stretch(tuple(index.tolist()), places, int(stats.n.max()), rows)
        if stretch.seen + rows > stats.head_rows:
            stats.refuse_large(stretch.seen + rows, self.inputs[0].numel() if self.grouping is None else None)
        work = partial(evaluate, self, self.blank, stretch, self.ranks, Watch(self.ranks, bar))
        heads, sums = self.ask("extend", work, stretch=stretch)
        bar.update((rows - len(stretch.share(0, self.ranks.count))) * len(index))
        known = None if self.control is None else self._group_known(self.control.known(index), index)
        return appended(stats, stretch, heads, sums, known)

    def release(self, result: Interactions) -> Interactions:
        """Give everybody the result, and let them go."""
        given, about = _packed(result)
        self.ranks.tell(("finish", forms(given), about))
        self.ranks.give(given)
        return result


@dataclass(frozen=True, eq=False)
class SharedKinks(Kinks):
    """The frozen network at the leader, whose closed forms are made by all ranks, some examples each."""

    leader: Leader

    def expectation(
        self, gaussian: Gaussian, layers: bool = False, probes: Tensor | None = None, index: Tensor | None = None
    ) -> Expectation:
        """As always; of each layer alone, not shared."""
        if layers:
            return super().expectation(gaussian, layers, probes, index)
        own = partial(Kinks.expectation, self, gaussian, False, probes)
        return self._shared(own, {} if probes is None else {"probes": probes}, index)

    def thin_expectation(
        self, gaussian: Gaussian, probes: Tensor | None, directions: Tensor, index: Tensor | None = None
    ) -> Expectation:
        """As always."""
        own = partial(Kinks.thin_expectation, self, gaussian, probes, directions)
        return self._shared(own, {"directions": directions} | ({} if probes is None else {"probes": probes}), index)

    def _shared(
        self, own: Callable[[Tensor], Expectation], given: Mapping[str, Tensor], index: Tensor | None
    ) -> Expectation:
        everyone = torch.arange(len(self.inputs), device=self.inputs.device) if index is None else index
        if len(everyone) == 1:  # one closed form is not divided
            return own(everyone)
        passes = math.nan

        def work() -> Found:
            nonlocal passes
            expected = own(_part(everyone, self.leader.ranks))
            passes = expected.passes
            return _tensors(expected), {}

        pieces, _ = self.leader.ask("expect", work, given, index=tuple(everyone.tolist()))
        parts = [_expectation(p, passes) for p in pieces if p]
        return Expectation(
            Known.cat([p.hessian for p in parts]),
            torch.cat([p.gradient for p in parts]),
            passes,
            (),
            None if parts[0].drift is None else torch.cat([p.drift for p in parts if p.drift is not None]),
        )


# --- the others -------------------------------------------------------------------------------------------------------


class Follower:
    """Does what the leader asks for, until it gives the result; the methods are what can be asked."""

    def __init__(self, sampler: Sampler, ranks: Processes) -> None:
        self.sampler, self.ranks = sampler, ranks
        self.blank: Statistics | None = None
        self.kinks: Kinks | None = None

    def follow(self) -> Interactions:
        """The leader's result."""
        device = self.sampler.inputs.device
        while True:
            name, expected, about = self.ranks.hear()
            given = self.ranks.take(expected, device)
            if name == "finish":
                return _restored(self.sampler, given, about)
            (pieces, sums), trouble = _try(name, partial(getattr(self, name), given, **about))
            reports: list[Report] = self.ranks.exchange(_report(pieces, trouble))
            if not any(report.trouble for report in reports):  # else the leader decides what comes next
                self.ranks.send(pieces)
                self.ranks.sum(sums)

    def begin(self, given: dict[str, Tensor], seeds: tuple[int, ...], passes: float | None) -> Found:
        """Take over the leader's control variate, after making sure that the model is the same."""
        sampler, value = self.sampler, given.pop("f(x)")
        own, _ = sampler._unperturbed()
        if not torch.allclose(own, value, rtol=AGREEMENT[sampler.oracle.precision], atol=1e-6):
            worst = int((own - value).abs().argmax())
            raise ValueError(
                f"f(x) of example {worst} is {float(own[worst]):.6g} on this rank and {float(value[worst]):.6g} on "
                "rank 0: the models differ. Load the same weights on every rank, or make them from the same seed."
            )
        sampler.control = None
        if passes is not None:
            assert self.kinks is not None
            linear, flip = given.pop("linear"), given.pop("flip")
            sampler.control = Control(self.kinks, _expectation(given, passes), linear, flip)
        self.blank = sampler.begin(seeds)
        return {}, {}

    def freeze(self, given: dict[str, Tensor]) -> Found:
        """Freeze the model at the inputs."""
        self.kinks = self.sampler.see_kinks(math.inf)
        return {}, {}

    def expect(self, given: dict[str, Tensor], index: tuple[int, ...]) -> Found:
        """The closed forms of some of the examples at `index`."""
        assert self.kinks is not None
        chosen = _part(torch.tensor(index, device=self.sampler.inputs.device), self.ranks)
        if not len(chosen):
            return {}, {}
        gaussian, probes = self.sampler.gaussian, given.get("probes")
        if "directions" in given:
            return _tensors(self.kinks.thin_expectation(gaussian, probes, given["directions"], chosen)), {}
        return _tensors(self.kinks.expectation(gaussian, False, probes, chosen)), {}

    def extend(self, given: dict[str, Tensor], stretch: Stretch) -> Found:
        """A share of the rows."""
        assert self.blank is not None
        return evaluate(self.sampler, self.blank, stretch, self.ranks, Watch(self.ranks))


def _try(name: str, work: Callable[[], Found]) -> tuple[Found, Exception | None]:
    """What was found, or the trouble that the leader may know a way around: it can do without a control variate."""
    try:
        return work(), None
    except TROUBLE.get(name, ((), None))[0] as error:
        if is_out_of_memory(error):
            raise
        return ({}, {}), error


def _report(pieces: Mapping[str, Tensor], trouble: Exception | None) -> Report:
    return Report(forms(pieces), "" if trouble is None else str(trouble) or type(trouble).__name__)


def _part(index: Tensor, ranks: Processes) -> Tensor:
    """The examples whose closed form is this rank's to make."""
    return index.tensor_split(ranks.count)[ranks.rank]


def _tensors(expected: Expectation) -> dict[str, Tensor]:
    own = {**expected.hessian.tensors(), "gradient": expected.gradient}
    return own if expected.drift is None else {**own, "drift": expected.drift}


def _expectation(tensors: Mapping[str, Tensor], passes: float) -> Expectation:
    known = Known(tensors["known"], tensors.get("known.factor"))
    return Expectation(known, tensors["gradient"], passes, (), tensors.get("drift"))


_OWN = ("inputs", "statistics", "gaussian", "grouping")  # what every rank has itself, or gets in parts


def _packed(result: Interactions) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A result as tensors and the rest, without what every rank has itself."""
    stats = result.statistics
    values = {f.name: getattr(result, f.name) for f in fields(result) if f.name not in _OWN}
    tensors = {name: v for name, v in values.items() if isinstance(v, Tensor)}
    rest = {name: v for name, v in values.items() if name not in tensors}
    tensors |= {f"statistics.{name}": t for name, t in stats.tensors().items()}
    return tensors, {"stats": (stats.design, stats.stream, stats.rank), "rest": rest}


def _restored(sampler: Sampler, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Interactions:
    prefix, (design, stream, rank) = "statistics.", about["stats"]
    kept = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    return Interactions(
        inputs=sampler.inputs,
        statistics=Statistics.from_tensors(design, stream, rank, kept),
        gaussian=sampler.gaussian,
        grouping=sampler.grouping,
        **{name: t for name, t in tensors.items() if not name.startswith(prefix)},
        **about["rest"],
    )
