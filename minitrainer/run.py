"""What a run consists of: sources of batches, progress, and the objects the loop works with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minitrainer import dist
from minitrainer.data import EvaluationData, TrainingData
from minitrainer.datamodule import DataModule
from minitrainer.errors import LoaderError
from minitrainer.hooks import Hooks
from minitrainer.launch import Environment, StopSignals
from minitrainer.metrics import Flushed, MetricStore
from minitrainer.module import Module
from minitrainer.optimization import Optimization
from minitrainer.plugins import LearningRateRule, ManualStrategy
from minitrainer.protocols import Accumulator, Precision, Strategy
from minitrainer.rows import Rows
from minitrainer.settings import Settings, ValidationClock, total_steps, windows_in
from minitrainer.state import TrainState


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the batches come from, as the user gave it.

    Args:
        train: Training loader.
        evaluation: Loader of the validation, test or prediction.
        datamodule: Or a DataModule that makes them.
    """

    train: Iterable[Any] | None
    evaluation: Iterable[Any] | None
    datamodule: DataModule | None

    @classmethod
    def of(cls, train: Any, evaluation: Any, datamodule: DataModule | None) -> Sources:
        """Sort out what stands where; a DataModule may stand in the place of loaders."""
        if isinstance(train, DataModule) and datamodule is None:
            train, datamodule = None, train
        if isinstance(evaluation, DataModule) and datamodule is None:
            evaluation, datamodule = None, evaluation
        if datamodule is not None and (train is not None or evaluation is not None):
            raise LoaderError(
                "Both loaders and a datamodule were given.", fix="Give one or the other."
            )
        return cls(train, evaluation, datamodule)

    def open(self, stage: str) -> Sources:
        """Prepare and set up the datamodule and ask it for the loaders of the stage."""
        data = self.datamodule
        if data is None:
            return self
        if dist.local_rank() == 0:
            data.prepare_data()
        dist.barrier()
        data.setup(stage)
        evaluation: Callable[[], Iterable[Any] | None] = {
            "fit": data.val_dataloader,
            "validation": data.val_dataloader,
            "test": data.test_dataloader,
            "predict": data.predict_dataloader,
        }[stage]
        train = data.train_dataloader() if stage == "fit" else None
        return Sources(train, evaluation(), data)

    def close(self, stage: str) -> None:
        """Take the datamodule down."""
        if self.datamodule is not None:
            self.datamodule.teardown(stage)


@dataclass(slots=True)
class Metrics:
    """Newest agreed value of each metric, and how often it was updated."""

    values: dict[str, tuple[float, int]] = field(default_factory=dict)
    in_progress_bar: dict[str, float] = field(default_factory=dict)

    def update(self, flushed: list[Flushed]) -> dict[str, float]:
        """Take new values; return those for the loggers, under the names they see."""
        row = {}
        for metric in flushed:
            for name in {metric.name, metric.shown}:
                _, updates = self.values.get(name, (0.0, 0))
                self.values[name] = (metric.value, updates + 1)
            if metric.logger:
                row[metric.shown if metric.synced else f"{metric.shown}@rank0"] = metric.value
            if metric.prog_bar:
                self.in_progress_bar[metric.shown] = metric.value
        return row


@dataclass(slots=True)
class Progress:
    """How far a trainer has got; stands after the run, and is handed over by local ranks."""

    state: TrainState = field(default_factory=TrainState)
    metrics: Metrics = field(default_factory=Metrics)
    run_dir: Path | None = None
    total_steps: int | None = None
    num_training_batches: int | None = None
    num_evaluation_batches: int | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Run:
    """What the loop works with; complete when it is handed out."""

    module: Module
    environment: Environment
    device: torch.device
    strategy: Strategy
    precision: Precision
    signals: StopSignals
    hooks: Hooks
    evaluation_data: EvaluationData | None
    at_epoch_end: bool = False


@dataclass(slots=True, kw_only=True)
class FitRun(Run):
    """What the training loop works with besides."""

    accumulator: Accumulator
    optimization: Optimization
    parameters: list[torch.nn.Parameter]
    train_data: TrainingData
    train_metrics: MetricStore
    clock: ValidationClock
    rows: Rows
    lr_rule: LearningRateRule | None
    global_batch: int
    manual: ManualStrategy | None = None
    steps_have_schedulers: bool = False
    in_window: bool = False
    validated: bool = False
    save_asked: bool = False
    deferred_saves: list[Path] = field(default_factory=list)


def planned_steps(
    settings: Settings, accumulator: Accumulator, num_batches: int | None
) -> int | None:
    """Return the optimizer steps of the whole run, before the first one; None when unknown."""
    if num_batches is None:
        return settings.max_steps
    per_epoch = (
        windows_in(num_batches, accumulator.window_size(epoch))
        for epoch in range(settings.max_epochs or 0)
    )
    return total_steps(settings, per_epoch)
