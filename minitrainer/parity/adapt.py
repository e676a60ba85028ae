"""The user's module made comparable: in float64, with its own randomness, parts switched off."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from minitrainer.data import derive_seed, seed_everything
from minitrainer.module import Module
from minitrainer.parity.record import Recorder


class Changes(NamedTuple):
    """What a run changes in the user's module, to see what a difference is due to.

    Attributes:
        reseed: Seed the random streams of each training step by this; None leaves them alone.
        no_dropout: Whether dropout layers are off.
        no_batch_norm: Whether batch norm layers normalise by their running statistics.
    """

    reseed: int | None = None
    no_dropout: bool = False
    no_batch_norm: bool = False


def adapt(module: Module, recorder: Recorder, changes: Changes, dtype: torch.dtype) -> None:
    """Convert the module, switch parts of it off, and listen to its steps.

    Args:
        module: The user's module, changed in place.
        recorder: Takes what the module logs.
        changes: What to switch off, and how to seed.
        dtype: float64 converts the module and what comes in; float32 leaves all as it is.
    """
    if dtype == torch.float64:
        module.double()
    switched_off = [
        *(dropout_layers(module) if changes.no_dropout else {}).values(),
        *(batch_norms(module) if changes.no_batch_norm else {}).values(),
    ]
    for layer in switched_off:
        # The trainer leaves parts in eval mode that were so before.
        layer.eval()
    training_step, validation_step, log = module.training_step, module.validation_step, module.log

    def converted_training_step(batch: Any, batch_idx: int) -> Any:
        if changes.reseed is not None:
            stream = ("parity", batch_idx, module.global_rank)
            seed_everything(derive_seed(changes.reseed, *stream))
        return training_step(converted(batch, dtype), batch_idx)

    def converted_validation_step(batch: Any, batch_idx: int) -> Any:
        return validation_step(converted(batch, dtype), batch_idx)

    def heard_log(name: str, value: Any, **options: Any) -> None:
        log(name, value, **options)
        recorder.logged(name, value, sync_dist=options.get("sync_dist", True))

    # In the instance, not in the class: the classes are the user's, and come again in other runs.
    vars(module).update(
        training_step=converted_training_step,
        validation_step=converted_validation_step,
        log=heard_log,
    )


def dropout_layers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers that drop out at random while training, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if layer.training and _dropout_of(layer) > 0
    }


def batch_norms(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the batch norm layers that normalise by the batch, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training
    }


def converted(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with floating tensors in float64, if that is the dtype.

    Goes through lists, tuples, named tuples, mappings and dataclasses; anything else stays.
    """
    if dtype != torch.float64:
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, list | tuple):
        values = [converted(value, dtype) for value in batch]
        make: Any = getattr(type(batch), "_make", type(batch))
        return make(values)
    if isinstance(batch, Mapping):
        clone: Any = copy.copy(batch)
        for key, value in batch.items():
            clone[key] = converted(value, dtype)
        return clone
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        clone = copy.copy(batch)
        for entry in dataclasses.fields(batch):
            value = converted(getattr(batch, entry.name), dtype)
            object.__setattr__(clone, entry.name, value)  # also for frozen ones
        return clone
    return batch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let tensors that user code makes have this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _dropout_of(layer: torch.nn.Module) -> float:
    if isinstance(layer, _DropoutNd):
        return layer.p
    if isinstance(layer, torch.nn.RNNBase | torch.nn.MultiheadAttention):
        return float(layer.dropout)
    return 0.0
