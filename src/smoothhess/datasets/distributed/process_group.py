"""Communication between the processes of one job, and propagation of failures to all of them.

Small messages are sent over gloo connections that are opened for one job, independent of the backend used for tensors.
A process that dies closes its connections, so the other processes notice it immediately; there is no timeout for slow
processes. A process that raises an exception first writes the error message to the key-value store of the group, then
closes its connections. Processes that wait for it read the message there; processes that compute poll for it.
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

CONNECT_TIMEOUT = timedelta(minutes=5)  # to open the connections: all processes have started by then
PATIENCE = timedelta(days=300)  # slow processes do not time out; dead ones close their connections
GRACE = 2.0  # seconds that a failing process waits, so that the others can read the reason
POLL_SECONDS = 0.02  # interval between two queries
FAILED, RECEIVED, HERE = "failed", "received", "here"  # keys in the key-value store


class RankError(Exception):
    """Raised when another process of the job failed.

    Args:
        rank: rank of the process that failed; kept as an attribute.
        reason: the error of that process as text; kept as an attribute.

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
    """Shape, dtype and placement of a tensor, which the receiver needs in advance."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


Forms = dict[str, Form]


def forms(tensors: Mapping[str, Tensor]) -> Forms:
    """The form of each tensor."""
    return {name: Form(tuple(t.shape), t.dtype, t.device.type == "cpu") for name, t in tensors.items()}


def is_single_process(group: dist.ProcessGroup | None) -> bool:
    """Whether there is no group or only one process; raises ValueError if the process group was not initialised.

    >>> is_single_process(None)
    True
    """
    if not dist.is_available() or not dist.is_initialized():
        started = os.environ.get("WORLD_SIZE", "1")
        if "RANK" in os.environ and started != "1":
            raise ValueError(
                f"{started} processes were started, but each would do all of the work. Call "
                "torch.distributed.init_process_group() at the top of the script."
            )
        return True
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not part of the group. Call it only on the ranks of the group.")
    return dist.get_world_size(group) == 1


@contextmanager
def connected(group: dist.ProcessGroup | None) -> Iterator[Processes]:
    """Connect the processes of a group for one job; all of them finish, or all of them raise."""
    processes = Processes(group)
    try:
        yield processes
        processes.exchange(None)  # a barrier: all messages have arrived
    except BaseException as error:
        processes.fail(error)
        raise
    finally:
        processes.close()


class Processes:
    """The processes of a group; process 0 is the leader."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = dist.group.WORLD if group is None else group
        assert self.group is not None
        self.process_rank, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.fast = "cuda:nccl" in dist.get_backend_config(self.group)  # whether tensors can be sent between GPUs
        # The key-value store may outlive restarted processes: each job uses a unique prefix.
        name = [os.urandom(8).hex()]
        dist.broadcast_object_list(name, group=self.group, group_src=0)
        self.readable = True  # whether the key-value store can be reached
        self.key_values = dist.distributed_c10d.PrefixStore(f"smoothhess-{name[0]}", self.group.get_group_store())
        self.connections: Any = dist.ProcessGroupGloo(self.key_values, self.process_rank, self.count, CONNECT_TIMEOUT)
        self.connections.set_timeout(PATIENCE)

    @property
    def is_leader(self) -> bool:
        """Whether this process is the leader."""
        return self.process_rank == 0

    # --- messages -------------------------------------------------------------------------------------------------

    def exchange(self, message: Any) -> list[Any]:
        """Gather the messages of all processes, ordered by rank."""
        payload = _bytes(message)
        sizes = [torch.empty(1, dtype=torch.long) for _ in range(self.count)]
        self._wait(lambda connections: connections.allgather(sizes, torch.tensor([len(payload)])))
        padded = payload.new_zeros(int(max(sizes)))
        padded[: len(payload)] = payload
        found = [torch.empty_like(padded) for _ in sizes]
        self._wait(lambda connections: connections.allgather(found, padded))
        return [pickle.loads(text[:n].numpy().tobytes()) for text, n in zip(found, sizes, strict=True)]

    def broadcast_message(self, message: Any) -> None:
        """Send a message from the leader to all other processes."""
        payload = _bytes(message)
        self._wait(lambda connections: connections.broadcast(torch.tensor([len(payload)]), 0))
        self._wait(lambda connections: connections.broadcast(payload, 0))

    def receive_message(self) -> Any:
        """Receive the message of the leader."""
        size = torch.empty(1, dtype=torch.long)
        self._wait(lambda connections: connections.broadcast(size, 0))
        payload = torch.empty(int(size), dtype=torch.uint8)
        self._wait(lambda connections: connections.broadcast(payload, 0))
        return pickle.loads(payload.numpy().tobytes())

    # --- tensors --------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors from the leader to all other processes."""
        for tensor in tensors.values():
            self._broadcast(tensor)

    def receive_broadcast(self, expected: Forms, device: torch.device) -> dict[str, Tensor]:
        """Receive tensors from the leader."""
        return {name: self._broadcast(_empty(form, device)) for name, form in expected.items()}

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors to the leader."""
        for tensor in tensors.values():
            self._move(
                tensor,
                lambda t: dist.send(t, group=self.group, group_dst=0),
                lambda connections, t: connections.send([t], 0, 0),
            )

    def receive(self, expected: Forms, rank: int, device: torch.device) -> dict[str, Tensor]:
        """Receive, in the leader, the tensors of one process."""
        return {
            name: self._move(
                _empty(form, device),
                lambda t: dist.recv(t, group=self.group, group_src=rank),
                lambda connections, t: connections.recv([t], rank, 0),
            )
            for name, form in expected.items()
        }

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over all processes, valid in the leader; the arguments may be overwritten."""
        return {
            name: self._move(
                tensor,
                lambda t: dist.reduce(t, group=self.group, group_dst=0),
                lambda connections, t: connections.reduce(t, 0),
            )
            for name, tensor in tensors.items()
        }

    def _broadcast(self, tensor: Tensor) -> Tensor:
        return self._move(
            tensor,
            lambda t: dist.broadcast(t, group=self.group, group_src=0),
            lambda connections, t: connections.broadcast(t, 0),
        )

    def _move(self, tensor: Tensor, by_nccl: Callable[[Tensor], Any], by_gloo: Callable[[Any, Tensor], Any]) -> Tensor:
        """Use nccl for a GPU tensor if the group supports it, otherwise gloo on the CPU."""
        if tensor.numel() == 0:
            return tensor
        if tensor.is_cuda and self.fast:
            moved = tensor.contiguous()
            self._communicate(lambda: by_nccl(moved))
            return moved
        moved = tensor.cpu().contiguous()
        self._wait(lambda connections: by_gloo(connections, moved))
        return moved.to(tensor.device)

    # --- failures -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RankError if another process has failed; cheap enough to be called during long computations."""
        if self._query(lambda: self.key_values.check([FAILED]), True):
            raise self._failure()

    def fail(self, error: BaseException) -> None:
        """Report an error to the other processes, and wait up to GRACE seconds until they have read it."""
        failure = (
            error if isinstance(error, RankError) else RankError(self.process_rank, f"failed with {_describe(error)}")
        )
        self._query(lambda: self.key_values.compare_set(FAILED, "", json.dumps([failure.rank, failure.reason])), None)
        self.close()
        self._query(lambda: self.key_values.add(RECEIVED, 1), 0)
        deadline = time.monotonic() + GRACE
        while (
            time.monotonic() < deadline
            and self._query(lambda: self.key_values.add(RECEIVED, 0), self.count) < self.count
        ):
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Close the connections; processes that wait for this one raise an error."""
        connections, self.connections = self.connections, None
        if connections is not None:
            connections.shutdown()

    def _wait(self, operation: Callable[[Any], Any]) -> None:
        self._communicate(lambda: operation(self.connections).wait())

    def _communicate(self, operation: Callable[[], Any]) -> None:
        try:
            operation()
        except RuntimeError as error:
            raise self._failure() from error

    def _failure(self) -> RankError:
        """The reported error; without a report, an error that names the processes that do not answer."""
        others = [r for r in range(self.count) if r != self.process_rank]
        deadline = time.monotonic() + GRACE
        self._query(lambda: self.key_values.set(f"{HERE}{self.process_rank}", ""), None)
        while others and self.readable and time.monotonic() < deadline:
            if self._query(lambda: self.key_values.check([FAILED]), False):
                return RankError(*json.loads(self.key_values.get(FAILED)))
            others = [r for r in others if not self._query(lambda r=r: self.key_values.check([f"{HERE}{r}"]), False)]
            time.sleep(POLL_SECONDS)
        if not others or not self.readable:  # the leader, or the program that started it, hosts the key-value store
            others = [0]
        also = f" (nor do ranks {', '.join(map(str, others[1:]))})" if others[1:] else ""
        reason = f"does not answer: it was killed, or its connection is lost{also}. See its own output."
        return RankError(others[0], reason)

    def _query(self, query: Callable[[], Any], otherwise: Any) -> Any:
        """Query the key-value store; `otherwise` once it cannot be reached any more."""
        try:
            return query() if self.readable else otherwise
        except RuntimeError:
            self.readable = False
            return otherwise


def check_same_arguments(processes: Processes, about: Mapping[str, Any]) -> None:
    """Raise ValueError in every process if the arguments differ between processes; `about` holds JSON values."""
    everyone: Sequence[dict[str, Any]] = processes.exchange(dict(about))
    for rank, other in enumerate(everyone):
        if found := differences(everyone[0], other):
            raise ValueError(
                f"all ranks share one job and need the same arguments, but rank 0 has {'; '.join(found)} as rank "
                f"{rank} has. Make it from the same seed and files, or send it with torch.distributed.broadcast."
            )


def _bytes(message: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)


def _empty(form: Form, device: torch.device) -> Tensor:
    return torch.empty(form.shape, dtype=form.dtype, device="cpu" if form.on_cpu else device)


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
