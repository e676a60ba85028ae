"""Batches of any shape: moving them to the device, counting their samples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from minitrainer.errors import BatchSizeError


def move_to_device(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Return the batch with every tensor in it on the device.

    Goes through lists, tuples, named tuples, mappings and dataclasses, and calls `.to(device)`
    of anything else that has it. What has no tensors is returned as it is, and so is the whole
    batch when the device is the CPU and this process has never used another: it lies there
    already. Containers are copied, never changed.

    Args:
        batch: The batch.
        device: Where the tensors shall lie.
        non_blocking: Do not wait for copies from pinned memory.
    """
    if device.type == "cpu" and not torch.cuda.is_initialized():
        return batch
    return _moved(batch, device, non_blocking)


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the size of dimension 0 of its first tensor.

    Without a tensor (or array) that has a dimension: the length of the first list or tuple that
    holds no other one, such as a list of strings. A batch that is a single scalar is one sample.
    A rule of thumb, used only where no sampler tells: a batch of unstacked images would be
    counted by the channels of the first.

    Args:
        batch: Tensors in nested lists, tuples, mappings and dataclasses.

    Raises:
        BatchSizeError: There is nothing in the batch to count by.
    """
    kind = type(batch)
    first = batch[0] if (kind is tuple or kind is list) and batch else batch
    if type(first) is torch.Tensor and first.ndim:
        return first.size(0)
    size = _first_dimension(batch)
    if size is None:
        size = _first_length(batch)
    if size is None and isinstance(batch, torch.Tensor):
        size = 1
    if size is None:
        raise BatchSizeError(
            f"The number of samples of a batch of type {type(batch).__name__} cannot be told.",
            "Losses and metrics are weighted by it, and it holds neither a tensor nor a list.",
            "Put a tensor with the samples along dimension 0 into the batch.",
        )
    return size


def _moved(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    to = getattr(batch, "to", None)
    if callable(to) and not isinstance(batch, type):
        # Some forget to return themselves; those moved in place.
        moved = to(device)
        return batch if moved is None else moved
    if isinstance(batch, Mapping):
        items = {key: _moved(value, device, non_blocking) for key, value in batch.items()}
        return _like_mapping(batch, items)
    if isinstance(batch, list | tuple):
        values = [_moved(value, device, non_blocking) for value in batch]
        return _like_sequence(batch, values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        clone = copy.copy(batch)
        for field in dataclasses.fields(batch):
            value = _moved(getattr(batch, field.name), device, non_blocking)
            # Also for frozen ones, and for fields that the constructor does not take.
            object.__setattr__(clone, field.name, value)
        return clone
    return batch


def _like_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return items
    if isinstance(batch, MutableMapping):
        # A copy keeps what the constructor does not know, such as a default factory.
        clone = copy.copy(batch)
        clone.update(items)
        return clone
    make: Any = type(batch)
    return make(items)


def _like_sequence(batch: Sequence[Any], values: list[Any]) -> Any:
    if type(batch) is list:
        return values
    if isinstance(batch, list):
        clone = copy.copy(batch)
        clone[:] = values
        return clone
    make: Any = getattr(type(batch), "_make", type(batch))
    return make(values)


def _parts(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, list | tuple):
        yield from batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield getattr(batch, field.name)


def _first_dimension(batch: Any) -> int | None:
    if isinstance(batch, PackedSequence):
        # Its data are packed over time; the first step has all sequences.
        return int(batch.batch_sizes[0])
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple):
        return int(shape[0]) if shape else None
    for part in _parts(batch):
        size = _first_dimension(part)
        if size is not None:
            return size
    return None


def _first_length(batch: Any) -> int | None:
    for part in _parts(batch):
        size = _first_length(part)
        if size is not None:
            return size
    return len(batch) if isinstance(batch, list | tuple) and batch else None
