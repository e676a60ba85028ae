"""The only file that calls torch.distributed; every function is a no-op on one process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias, cast

import torch
import torch.distributed as torch_dist
from torch.distributed.rendezvous import rendezvous

# Gathered objects travel in a packet of this many bytes; longer ones need a second round.
_PACKET = 4096
_HEADER = 8

Group: TypeAlias = "torch_dist.ProcessGroup"
"""A process group of all ranks; None stands for the first one."""


class _Here:
    """Where the ranks meet, for the life of the process, and how many groups there were.

    `place` is what the environment says of the meeting, `store` that of the present group.
    `unfinished` is what to call before the next collective of another kind.
    """

    place: tuple[object, ...] = ()
    meeting: tuple[Any, int, int] | None = None
    store: Any = None
    groups = 0
    inherited: ClassVar[list[Any]] = []
    unfinished: Callable[[], object] | None = None


_here = _Here()


def is_initialized() -> bool:
    """Return whether this process takes part in a process group."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    """Return the rank of this process, 0 when there is no process group."""
    return torch_dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 when there is no process group."""
    return torch_dist.get_world_size() if is_initialized() else 1


def local_rank() -> int:
    """Return the rank of this process among those of its machine, 0 without a process group."""
    return int(os.environ.get("LOCAL_RANK", "0")) if is_initialized() else 0


@contextmanager
def process_group(device: torch.device, *, num_ranks: int, timeout: float) -> Iterator[None]:
    """Hold a process group open: nccl for CUDA, gloo for CPU, none at all for one process.

    The rendezvous is taken from the environment (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE).
    The group is destroyed whatever happens: a process that leaves with a broken gloo group
    aborts with signal 6 and hides its own exit code.

    Args:
        device: The device of this rank; it must be the current device already.
        num_ranks: The number of processes that will join.
        timeout: Seconds after which a collective gives up.
    """
    if num_ranks == 1 or is_initialized():
        yield
        return
    on_cuda = device.type == "cuda"
    limit = timedelta(seconds=timeout)
    store, rank_here, size = _meet(limit)
    torch_dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=_prefixed("group", store),
        rank=rank_here,
        world_size=size,
        device_id=device if on_cuda else None,
        timeout=limit,
    )
    _here.store = _prefixed("said", store)
    try:
        yield
    except BaseException:
        # Destroying an nccl group waits for collectives that the other ranks will never join;
        # the process is about to end anyway.
        if not on_cuda:
            torch_dist.destroy_process_group()
        raise
    finally:
        _here.store = None
    torch_dist.destroy_process_group()


def _meet(limit: timedelta) -> tuple[Any, int, int]:
    """Return the store where the ranks meet, this rank and their number.

    The store is kept for later groups: rank 0 may serve it, and a rank that is quicker than rank
    0 would meet the others at a store that is about to close. Each group has its own names in it;
    all ranks count alike.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    place = (os.getpid(), *(os.environ.get(name) for name in names))
    if _here.meeting is None or _here.place != place:
        # Kept, not dropped: in a forked process the end of an inherited store may abort.
        _here.inherited.append(_here.meeting)
        _here.place, _here.groups = place, 0
        _here.meeting = next(rendezvous("env://", timeout=limit))
    _here.groups += 1
    return _here.meeting


def first_to_say(text: str) -> bool:
    """Return whether no rank has asked for this text before; costs a round trip to the store."""
    if _here.store is None:
        return True
    try:
        return bool(_here.store.add(text, 1) == 1)
    except RuntimeError:
        # The rank that holds the store is gone: better said twice than not at all.
        return True


def call_before_others(finish: Callable[[], object] | None) -> None:
    """Call this once before the next collective, `sum_over_ranks` excepted; None forgets it.

    For a series of sums whose end the ranks have not told each other: it costs nothing where
    another series follows, and elsewhere no rank begins something else than the others do.
    """
    _here.unfinished = finish


def barrier() -> None:
    """Wait until every rank has arrived."""
    if world_size() > 1:
        _finish()
        torch_dist.barrier()


def broadcast_tensors(tensors: Sequence[torch.Tensor], source: int = 0) -> None:
    """Overwrite the tensors, in place, by those of rank `source`."""
    if world_size() == 1:
        return
    _finish()
    works = [torch_dist.broadcast(tensor, source, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()


@contextmanager
def second_group(*, timeout: float) -> Iterator[Group]:
    """Hold another process group of all ranks open, for collectives with an order of their own.

    Among the collectives of one group all ranks must keep the same order. Call it on all ranks.

    Args:
        timeout: Seconds after which a collective gives up.
    """
    group = cast(Group, torch_dist.new_group(timeout=timedelta(seconds=timeout)))
    yield group
    # Not after an exception: the end of the first group takes this one along.
    torch_dist.destroy_process_group(group)


def open_host_group(*, timeout: float) -> Group:
    """Return a gloo group of all ranks, for numbers that never leave the hosts.

    Call it on all ranks, and `close_group` at the end.

    Args:
        timeout: Seconds after which a collective gives up.
    """
    limit = timedelta(seconds=timeout)
    return cast(Group, torch_dist.new_group(timeout=limit, backend="gloo"))


def close_group(group: Group) -> None:
    """End a group that was opened; the end of the first group would take it along too."""
    if is_initialized():
        torch_dist.destroy_process_group(group)


def sum_over_ranks(tensor: torch.Tensor, group: Group | None = None) -> None:
    """Overwrite the tensor, in place, by its sum over the ranks."""
    if world_size() > 1:
        torch_dist.all_reduce(tensor, group=group)


@torch.no_grad()
def average_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite the tensors, in place, by their means over the ranks, in one collective.

    Added up in float64, and equal on all ranks afterwards.
    """
    if world_size() == 1 or not tensors:
        return
    _finish()
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    sum_over_ranks(flat)
    flat /= world_size()
    means = flat.split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank.

    Args:
        value: Anything JSON can hold (NaN and infinities included); nothing is ever unpickled.
    """
    if world_size() == 1:
        return [value]
    return [json.loads(payload) for payload in gather_bytes(json.dumps(value).encode())]


def gather_bytes(payload: bytes) -> list[bytes]:
    """Return the byte strings of all ranks, in rank order, on every rank.

    One collective for up to `_PACKET` bytes, a second one for what is longer.
    """
    if world_size() == 1:
        return [payload]
    _finish()
    header = len(payload).to_bytes(_HEADER, "little")
    heads = _all_gather(header + payload[:_PACKET], _HEADER + _PACKET)
    lengths = [int.from_bytes(head[:_HEADER], "little") for head in heads]
    parts = [head[_HEADER:] for head in heads]
    if max(lengths) > _PACKET:
        tails = _all_gather(payload[_PACKET:], max(lengths) - _PACKET)
        parts = [part + tail for part, tail in zip(parts, tails, strict=True)]
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def broadcast_bytes(payload: bytes) -> bytes:
    """Return rank 0's byte string, of any length, on every rank."""
    if world_size() == 1:
        return payload
    length = broadcast_object(len(payload))
    content = torch.empty(length, dtype=torch.uint8)
    if rank() == 0 and length:
        content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if torch_dist.get_backend() == "nccl":
        content = content.to(torch.device("cuda", torch.cuda.current_device()))
    broadcast_tensors([content])
    return content.cpu().numpy().tobytes()


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank; JSON-able values only."""
    return gather_objects(value)[0]


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on at least one rank."""
    return any(gather_objects(flag))


def _finish() -> None:
    finish, _here.unfinished = _here.unfinished, None
    if finish is not None:
        finish()


def _prefixed(name: str, store: Any) -> Any:
    return torch_dist.PrefixStore(f"{name}{_here.groups}", store)  # type: ignore[attr-defined]


def _all_gather(content: bytes, room: int) -> list[bytes]:
    on_cuda = torch_dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    mine = torch.zeros(room, dtype=torch.uint8)
    if content:
        mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    theirs = torch.empty(world_size(), room, dtype=torch.uint8, device=device)
    torch_dist.all_gather(list(theirs.unbind()), mine.to(device))
    return [bytes(row.tolist()) for row in theirs.cpu()]
