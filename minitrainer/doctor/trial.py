"""A few steps of a recipe, watched: kind of loss, random numbers, waiting for data."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from minitrainer import dist
from minitrainer.callback import Callback
from minitrainer.data import count_samples, preserved_rng
from minitrainer.data.seeding import PrivateRng
from minitrainer.memory import MemoryEstimate, estimate
from minitrainer.module import Module
from minitrainer.parity.adapt import batch_norms, dropout_layers
from minitrainer.protocols import TrainerView

_REDUCTIONS = 3


class Probe(Callback):
    """Watch the first steps of a run and ask it to stop; put it behind all other callbacks.

    The first batch and the first of an epoch are not timed, as they may start workers and warm up.

    Args:
        steps: Optimizer steps to take.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._batches = 0
        self._idle_since: float | None = None
        self._wait: float | None = None
        self._started = 0.0
        self.waiting = 0.0
        """Seconds that the timed batches were waited for."""
        self.working = 0.0
        """Seconds that the timed batches took on top."""
        self.timed = 0
        """Batches that were timed."""
        self.loss_ratio: float | None = None
        """Loss of a batch over the mean loss of its halves; None if it could not be told."""
        self.draws: dict[str, float] = {}
        """What each global generator would give at the second batch of this rank."""
        self.needed: MemoryEstimate | None = None
        self.total_steps: int | None = None
        self.device = torch.device("cpu")

    def on_fit_start(self, trainer: TrainerView, module: Module) -> None:
        """Take the measure of model and run."""
        optimizers = trainer.optimizers
        self.needed = estimate(module, optimizers[0] if len(optimizers) == 1 else None)
        self.total_steps = trainer.total_steps
        self.device = next((p.device for p in module.parameters()), self.device)

    def on_train_epoch_start(self, trainer: TrainerView, module: Module) -> None:
        """Do not time what comes between two epochs."""
        self._idle_since = None

    def on_train_batch_start(
        self, trainer: TrainerView, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock of the waiting, and look at the loss and the random numbers once."""
        now = time.perf_counter()
        timed = self._idle_since is not None and self._batches > 0
        self._wait = now - (self._idle_since or now) if timed else None
        if trainer.global_step >= self._steps - 1:
            trainer.should_stop = True
        if self._batches == 0 and module.automatic_optimization:
            self.loss_ratio = loss_ratio(module, batch)
        if self._batches == 1:
            self.draws = _draws()
        self._batches += 1
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock of the step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._idle_since = time.perf_counter()
        if self._wait is not None:
            self.waiting += self._wait
            self.working += self._idle_since - self._started
            self.timed += 1


def loss_ratio(module: Module, batch: Any) -> float | None:
    """Return the loss of a batch over the mean of the losses of its halves: 2 for a sum, 1 a mean.

    Dropout is off, and batch norm uses its running statistics. None for a batch of one sample,
    for a step that weights its loss itself, and for one that does not take half a batch.
    """
    number = count_samples(batch)
    half = number // 2
    if not half:
        return None
    try:
        with torch.no_grad(), _quiet(module):
            losses = [
                _loss(module, _part(batch, number, samples))
                for samples in (slice(2 * half), slice(half), slice(half, 2 * half))
            ]
    except Exception:  # noqa: BLE001 the user's step may want whole batches, or gradients
        return None
    whole, first, second = losses
    if whole is None or first is None or second is None or first + second == 0:
        return None
    return 2 * whole / (first + second)


def reduction_seconds(num_bytes: int, device: torch.device) -> float:
    """Return how long the ranks take to add up so many bytes of float32; call it on all ranks."""
    tensor = torch.zeros(max(1, num_bytes // 4), device=device)
    dist.sum_over_ranks(tensor)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_REDUCTIONS):
        dist.sum_over_ranks(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / _REDUCTIONS


@contextmanager
def _quiet(module: Module) -> Iterator[None]:
    """Let steps be run that leave no trace, in the log, in layers and in buffers."""
    layers = [*dropout_layers(module).values(), *batch_norms(module).values()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    for layer in layers:
        layer.eval()
    vars(module)["log"] = _say_nothing
    try:
        yield
    finally:
        del vars(module)["log"]
        for layer in layers:
            layer.train()
        for buffer, before in buffers:
            buffer.copy_(before)


def _say_nothing(*_: Any, **__: Any) -> None:
    """Take the place of `Module.log`."""


def _loss(module: Module, batch: Any) -> float | None:
    with PrivateRng(0):  # the same random numbers for the whole and the halves
        output: Any = module.training_step(batch, 0)
    if isinstance(output, Mapping):
        output = None if output.get("weight") is not None else output["loss"]
    return None if output is None else float(output)


def _draws() -> dict[str, float]:
    with preserved_rng():
        draws = {
            "torch": float(torch.rand((), dtype=torch.float64)),
            "random": random.random(),
        }
        with contextlib.suppress(ImportError):  # torch works without numpy, and so do we
            import numpy as np

            draws["numpy"] = float(np.random.rand())
    return draws


def _part(batch: Any, number: int, samples: slice) -> Any:
    """Return some samples of a batch of `number`; what does not count samples stays whole."""
    if isinstance(batch, torch.Tensor):
        return batch[samples] if batch.ndim and len(batch) == number else batch
    if isinstance(batch, list | tuple):
        columns = any(isinstance(v, torch.Tensor) and v.ndim and len(v) == number for v in batch)
        if len(batch) == number and not columns:
            return batch[samples]
        values = [_part(value, number, samples) for value in batch]
        make: Any = getattr(type(batch), "_make", type(batch))
        return make(values)
    if isinstance(batch, Mapping):
        clone: Any = copy.copy(batch)
        for key, value in batch.items():
            clone[key] = _part(value, number, samples)
        return clone
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [entry.name for entry in dataclasses.fields(batch)]
        parts = {name: _part(getattr(batch, name), number, samples) for name in fields}
        return dataclasses.replace(batch, **parts)
    return batch
