"""Digests of samples, so that they can be told apart whatever the dataset is."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from minitrainer.data import count_samples

_DIGEST_BYTES = 8
_IGNORED_LABEL = -100


def sample_digests(batch: Any) -> list[str]:
    """Return a digest of each sample of a batch, equal for equal samples in whatever batch.

    All tensors and lists whose first dimension counts the samples take part. What a batch is padded
    with depends on the samples around, so zeros (and -100, the label that torch ignores) at the
    end of a sample do not count; other padding does, and makes samples look different.

    Args:
        batch: What the loader yields.
    """
    number = count_samples(batch)
    parts = [part for part in _parts(batch) if len(part) == number]
    return [_digest([part[at] for part in parts]) for at in range(number)]


def item_digest(item: Any) -> str:
    """Return a digest of one item of a dataset."""
    return _digest(list(_leaves(item)))


def _digest(values: list[Any]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for value in values:
        digest.update(_bytes(value))
        digest.update(b"|")
    return digest.hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return _tensor_bytes(value.detach().cpu().contiguous()).rstrip(b"\0")
    if hasattr(value, "tobytes"):  # arrays and images
        return bytes(value.tobytes()).rstrip(b"\0")
    tells_the_address: Any = object.__repr__
    if type(value).__repr__ is tells_the_address:
        return type(value).__qualname__.encode()
    return repr(value).encode()


def _tensor_bytes(value: torch.Tensor) -> bytes:
    if not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
        value = value.masked_fill(value == _IGNORED_LABEL, 0)
    value = value.resolve_conj().resolve_neg()
    return ctypes.string_at(value.data_ptr(), value.numel() * value.element_size())


def _parts(batch: Any) -> Iterator[Any]:
    """Yield what may be indexed by sample: tensors with dimensions, arrays, and lists of leaves."""
    if hasattr(batch, "ndim"):
        if batch.ndim:
            yield batch
    elif isinstance(batch, list | tuple) and batch and not any(_is_container(v) for v in batch):
        if getattr(batch[0], "ndim", 0):
            for part in batch:
                yield from _parts(part)
        else:
            yield batch
    else:
        for part in _inside(batch):
            yield from _parts(part)


def _leaves(item: Any) -> Iterator[Any]:
    if _is_container(item):
        for part in _inside(item):
            yield from _leaves(part)
    else:
        yield item


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, entry.name) for entry in dataclasses.fields(value)]
    return []
