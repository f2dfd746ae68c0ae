"""What the processes of one job say to each other, and how they fail: together, in the words of the one that failed.

Small messages travel over gloo, on a group of connections made for one job, whatever the backend of the tensors. A
process that dies closes its connections, so the others hear of it at once; one that is slow is waited for. A process
that fails with an exception first writes its words on the *board*, the key-value store of the group, then closes its
connections: whoever waits for it looks at the board, and whoever works looks there from time to time.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from smoothhess.datasets.job_settings import differences

MEETING = timedelta(minutes=5)  # for the connections to be made: all ranks are there when it begins
PATIENCE = timedelta(days=300)  # a slow process is waited for; a dead one is noticed by its closed connections
GRACE = 2.0  # seconds that a failing process stays, so that the others can still read why
STEP = 0.02  # seconds between two looks
FAILED, HEARD, HERE = "failed", "heard", "here"  # places on the board


class RankError(Exception):
    """Another process of the job failed; `rank` says which, `reason` why.

    >>> raise RankError(3, "failed with ValueError: the model's output is NaN.")
    Traceback (most recent call last):
    smoothhess.datasets.distributed.process_group.RankError: rank 3 failed with ValueError: the model's output is NaN.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank, self.reason = rank, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError, (self.rank, self.reason)


class Form(NamedTuple):
    """What a receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


Forms = dict[str, Form]


def forms(tensors: Mapping[str, Tensor]) -> Forms:
    """Of each tensor."""
    return {name: Form(tuple(t.shape), t.dtype, t.device.type == "cpu") for name, t in tensors.items()}


def is_alone(group: dist.ProcessGroup | None) -> bool:
    """Whether there is nobody to share the work with; raises where others were started but cannot be reached.

    >>> is_alone(None)
    True
    """
    if not dist.is_available() or not dist.is_initialized():
        started = os.environ.get("WORLD_SIZE", "1")
        if "RANK" in os.environ and started != "1":
            raise ValueError(
                f"{started} processes were started, but each would do the whole work alone. Call "
                "torch.distributed.init_process_group() at the top of the script."
            )
        return True
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not part of the group. Call it on the ranks of the group alone.")
    return dist.get_world_size(group) == 1


@contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[Processes]:
    """The processes of a group for the length of one job: they leave together, or fail together."""
    ranks = Processes(group)
    try:
        yield ranks
        ranks.exchange(None)  # what was sent has arrived, and nobody is waited for any more
    except BaseException as error:
        ranks.fail(error)
        raise
    finally:
        ranks.close()


class Processes:
    """The processes of a group; number 0 leads."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = dist.group.WORLD if group is None else group
        assert self.group is not None
        self.rank, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.fast = "cuda:nccl" in dist.get_backend_config(self.group)  # whether tensors can go from GPU to GPU
        # A store outlives processes that are started again, and so does what they wrote: no two jobs share a name.
        name = [os.urandom(8).hex()]
        dist.broadcast_object_list(name, group=self.group, group_src=0)
        self.readable = True  # the board
        self.board = dist.distributed_c10d.PrefixStore(f"smoothhess-{name[0]}", self.group.get_group_store())
        self.wire: Any = dist.ProcessGroupGloo(self.board, self.rank, self.count, MEETING)
        self.wire.set_timeout(PATIENCE)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that decides."""
        return self.rank == 0

    # --- words ----------------------------------------------------------------------------------------------------

    def exchange(self, message: Any) -> list[Any]:
        """The messages of all ranks, in their order."""
        said = _bytes(message)
        sizes = [torch.empty(1, dtype=torch.long) for _ in range(self.count)]
        self._wait(lambda wire: wire.allgather(sizes, torch.tensor([len(said)])))
        padded = said.new_zeros(int(max(sizes)))
        padded[: len(said)] = said
        found = [torch.empty_like(padded) for _ in sizes]
        self._wait(lambda wire: wire.allgather(found, padded))
        return [pickle.loads(text[:n].numpy().tobytes()) for text, n in zip(found, sizes, strict=True)]

    def tell(self, message: Any) -> None:
        """From the leader to all others."""
        said = _bytes(message)
        self._wait(lambda wire: wire.broadcast(torch.tensor([len(said)]), 0))
        self._wait(lambda wire: wire.broadcast(said, 0))

    def hear(self) -> Any:
        """What the leader tells."""
        size = torch.empty(1, dtype=torch.long)
        self._wait(lambda wire: wire.broadcast(size, 0))
        heard = torch.empty(int(size), dtype=torch.uint8)
        self._wait(lambda wire: wire.broadcast(heard, 0))
        return pickle.loads(heard.numpy().tobytes())

    # --- tensors --------------------------------------------------------------------------------------------------

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        """From the leader to all others."""
        for tensor in tensors.values():
            self._broadcast(tensor)

    def take(self, expected: Forms, device: torch.device) -> dict[str, Tensor]:
        """What the leader gives."""
        return {name: self._broadcast(_empty(form, device)) for name, form in expected.items()}

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """To the leader."""
        for tensor in tensors.values():
            self._move(
                tensor,
                lambda t: dist.send(t, group=self.group, group_dst=0),
                lambda wire, t: wire.send([t], 0, 0),
            )

    def receive(self, expected: Forms, rank: int, device: torch.device) -> dict[str, Tensor]:
        """What one of the others sends to the leader."""
        return {
            name: self._move(
                _empty(form, device),
                lambda t: dist.recv(t, group=self.group, group_src=rank),
                lambda wire, t: wire.recv([t], rank, 0),
            )
            for name, form in expected.items()
        }

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over all ranks, at the leader; what was given is spent."""
        return {
            name: self._move(
                tensor,
                lambda t: dist.reduce(t, group=self.group, group_dst=0),
                lambda wire, t: wire.reduce(t, 0),
            )
            for name, tensor in tensors.items()
        }

    def _broadcast(self, tensor: Tensor) -> Tensor:
        return self._move(
            tensor,
            lambda t: dist.broadcast(t, group=self.group, group_src=0),
            lambda wire, t: wire.broadcast(t, 0),
        )

    def _move(self, tensor: Tensor, by_nccl: Callable[[Tensor], Any], by_gloo: Callable[[Any, Tensor], Any]) -> Tensor:
        """Over nccl where the tensor is on a GPU and the group has it, else over gloo and the CPU."""
        if tensor.numel() == 0:
            return tensor
        if tensor.is_cuda and self.fast:
            moved = tensor.contiguous()
            self._talk(lambda: by_nccl(moved))
            return moved
        moved = tensor.cpu().contiguous()
        self._wait(lambda wire: by_gloo(wire, moved))
        return moved.to(tensor.device)

    # --- failing --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise where another rank has failed meanwhile; a short question, for the middle of long work."""
        if self._look(lambda: self.board.check([FAILED]), True):
            raise self._told()

    def fail(self, error: BaseException) -> None:
        """Let the others know, and give them a moment to hear it."""
        told = error if isinstance(error, RankError) else RankError(self.rank, f"failed with {_words(error)}")
        self._look(lambda: self.board.compare_set(FAILED, "", json.dumps([told.rank, told.reason])), None)
        self.close()
        self._look(lambda: self.board.add(HEARD, 1), 0)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and self._look(lambda: self.board.add(HEARD, 0), self.count) < self.count:
            time.sleep(STEP)

    def close(self) -> None:
        """Give the connections back; whoever waits at the other end hears it."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.shutdown()

    def _wait(self, talk: Callable[[Any], Any]) -> None:
        self._talk(lambda: talk(self.wire).wait())

    def _talk(self, talk: Callable[[], Any]) -> None:
        try:
            talk()
        except RuntimeError as error:
            raise self._told() from error

    def _told(self) -> RankError:
        """What the board says about the failure; without a word, who does not answer any more."""
        others = [r for r in range(self.count) if r != self.rank]
        deadline = time.monotonic() + GRACE
        self._look(lambda: self.board.set(f"{HERE}{self.rank}", ""), None)
        while others and self.readable and time.monotonic() < deadline:
            if self._look(lambda: self.board.check([FAILED]), False):
                return RankError(*json.loads(self.board.get(FAILED)))
            others = [r for r in others if not self._look(lambda r=r: self.board.check([f"{HERE}{r}"]), False)]
            time.sleep(STEP)
        if not others or not self.readable:  # the board is kept by the leader, or by the program that started it
            others = [0]
        also = f" (nor do ranks {', '.join(map(str, others[1:]))})" if others[1:] else ""
        reason = f"does not answer: it was killed, or its connection is lost{also}. See its own output."
        return RankError(others[0], reason)

    def _look(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """An answer of the board, which is gone for good when the process that keeps it is."""
        try:
            return question() if self.readable else otherwise
        except RuntimeError:
            self.readable = False
            return otherwise


def same_everywhere(ranks: Processes, about: Mapping[str, Any]) -> None:
    """Raise, on every rank, where the ranks were not asked for the same thing; `about` is as JSON can hold it."""
    everyone: Sequence[dict[str, Any]] = ranks.exchange(dict(about))
    for rank, other in enumerate(everyone):
        if found := differences(everyone[0], other):
            raise ValueError(
                f"all ranks share one job and must be asked for the same, but rank 0 has {'; '.join(found)} as rank "
                f"{rank} has. Make it from the same seed and files, or send it with torch.distributed.broadcast."
            )


def _bytes(message: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)


def _empty(form: Form, device: torch.device) -> Tensor:
    return torch.empty(form.shape, dtype=form.dtype, device="cpu" if form.on_cpu else device)


def _words(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
