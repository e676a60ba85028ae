"""One pass over a loader without gradients: validation, test or prediction.

Every sample counts once: whole batches are dealt out over the ranks, nothing is padded, and there
is no collective inside the loop, so ranks may have different numbers of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from minitrainer.callback import Callback
from minitrainer.data import EvaluationData, move_to_device
from minitrainer.hooks import overriding
from minitrainer.metrics import Flushed, MetricStore
from minitrainer.module import Module
from minitrainer.protocols import Precision, TrainerView


@dataclass(frozen=True, slots=True)
class Stage:
    """A kind of evaluation: the module's step and the callbacks' hooks that belong to it."""

    name: str
    step: Callable[[Module], Callable[[Any, int], Any]]
    on_start: Callable[[Callback], Callable[..., None]]
    on_batch_start: Callable[[Callback], Callable[..., None]]
    on_batch_end: Callable[[Callback], Callable[..., None]]
    on_end: Callable[[Callback], Callable[..., None]]

    def is_written(self, module: Module) -> bool:
        """Return whether the user wrote the step."""
        name = f"{self.name}_step"
        return getattr(type(module), name) is not getattr(Module, name)


VALIDATION = Stage(
    "validation",
    step=lambda module: module.validation_step,
    on_start=lambda callback: callback.on_validation_start,
    on_batch_start=lambda callback: callback.on_validation_batch_start,
    on_batch_end=lambda callback: callback.on_validation_batch_end,
    on_end=lambda callback: callback.on_validation_end,
)
TEST = Stage(
    "test",
    step=lambda module: module.test_step,
    on_start=lambda callback: callback.on_test_start,
    on_batch_start=lambda callback: callback.on_test_batch_start,
    on_batch_end=lambda callback: callback.on_test_batch_end,
    on_end=lambda callback: callback.on_test_end,
)
PREDICTION = Stage(
    "predict",
    step=lambda module: module.predict_step,
    on_start=lambda callback: callback.on_predict_start,
    on_batch_start=lambda callback: callback.on_predict_batch_start,
    on_batch_end=lambda callback: callback.on_predict_batch_end,
    on_end=lambda callback: callback.on_predict_end,
)


def evaluate(
    trainer: TrainerView,
    module: Module,
    stage: Stage,
    data: EvaluationData,
    *,
    callbacks: list[Callback],
    precision: Precision,
    device: torch.device,
    keep_outputs: bool = False,
) -> tuple[list[Flushed], list[tuple[int, Any]]]:
    """Run the stage's step on each batch of this rank; collective at the end only.

    Returns:
        The metrics, equal on all ranks; and with `keep_outputs` pairs of (index of the batch over
        all ranks, output on the CPU) of this rank.
    """
    store = MetricStore(training=False, owner=module)
    step = stage.step(module)
    before = overriding(callbacks, f"on_{stage.name}_batch_start")
    after = overriding(callbacks, f"on_{stage.name}_batch_end")
    kept = []
    with _evaluating(module, store):
        for batch, batch_idx, samples, *_ in data:
            batch = move_to_device(batch, device, non_blocking=True)
            for callback in before:
                stage.on_batch_start(callback)(trainer, module, batch, batch_idx)
            store.samples = samples
            with precision.autocast():
                outputs = step(batch, batch_idx)
            if keep_outputs:
                on_cpu = move_to_device(outputs, torch.device("cpu"), non_blocking=False)
                kept.append((batch_idx, on_cpu))
            for callback in after:
                stage.on_batch_end(callback)(trainer, module, outputs, batch, batch_idx)
        return store.flush_epoch(), kept


@contextmanager
def _evaluating(module: Module, store: MetricStore) -> Iterator[None]:
    """Switch to eval mode and to another metric store; back again whatever happens."""
    was_training = [part for part in module.modules() if part.training]
    sink = module._sink
    module._sink = store
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module._sink = sink
        # Part by part: layers that the user keeps in eval mode (frozen batch norm) stay there.
        for part in was_training:
            part.training = True
