"""A trainer as callbacks see it, without a loop: the tests call the hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minitrainer.callback import Callback
from minitrainer.module import Module
from minitrainer.plugins.checkpoint_io import CheckpointIO
from minitrainer.protocols import TrainerView
from minitrainer.step import SavePoint, StepResult, WindowTotals


class Nothing(Module):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> None:
        return None


@dataclass
class FakeTrainer:
    """Satisfies TrainerView; what callbacks ask of it is recorded."""

    run_dir: Path | None = None
    global_step: int = 0
    current_epoch: int = 0
    max_epochs: int | None = None
    min_epochs: int = 0
    total_steps: int | None = None
    log_every_n_steps: int = 50
    num_training_batches: int | None = None
    num_evaluation_batches: int | None = None
    global_rank: int = 0
    world_size: int = 1
    should_stop: bool = False
    should_save: bool = False
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    callback_metrics: dict[str, float] = field(default_factory=dict)
    shown: dict[str, float] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    device_reads: int = 0
    checkpoint_io: CheckpointIO = field(default_factory=CheckpointIO)

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def progress_metrics(self) -> Mapping[str, float]:
        self.device_reads += 1
        return self.shown

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        self.rows.append((self.global_step, dict(metrics)))

    def save_checkpoint(self, *paths: str | Path) -> None:
        for path in paths:
            self._save_one(path)

    def _save_one(self, path: str | Path) -> None:
        self.saved.append(Path(path).name)
        if self.is_global_zero:
            states = {type(callback).__name__: callback.state_dict() for callback in self.callbacks}
            content = {"step": self.global_step, "callbacks": states}
            self.checkpoint_io.save(content, Path(path))

    # What a loop would do.

    def start(self, *callbacks: Callback, resume: Path | None = None) -> None:
        self.callbacks = list(callbacks)
        if resume is not None:
            checkpoint = self.checkpoint_io.load(resume)
            self.global_step = checkpoint["step"]
            for callback in callbacks:
                callback.load_state_dict(checkpoint["callbacks"][type(callback).__name__])
        for callback in callbacks:
            callback.on_fit_start(self, MODULE)

    def validate(self, **metrics: float) -> None:
        for callback in self.callbacks:
            callback.on_validation_start(self, MODULE)
        self.callback_metrics.update(metrics)
        for callback in self.callbacks:
            callback.on_validation_end(self, MODULE)

    def step(self, *, taken: bool = True) -> None:
        self.global_step += taken
        result = StepResult(taken, False, WindowTotals(1.0, 1.0))
        for callback in self.callbacks:
            callback.on_train_step_end(self, MODULE, result)

    def save_point(self, *, epoch_end: bool = False, validated: bool = False) -> None:
        point = SavePoint(epoch_end, validated, asked=self.should_save)
        self.should_save = False
        for callback in self.callbacks:
            callback.on_save_point(self, MODULE, point)

    def end_epoch(self, *, validated: bool = False, **metrics: float) -> None:
        self.callback_metrics.update(metrics)
        for callback in self.callbacks:
            callback.on_train_epoch_end(self, MODULE)
        self.save_point(epoch_end=True, validated=validated)
        self.current_epoch += 1

    def epoch(self, steps: int = 1, validation: Mapping[str, float] | None = None) -> None:
        """Run an epoch of some steps, with a validation at its end if there are metrics of it."""
        for callback in self.callbacks:
            callback.on_train_epoch_start(self, MODULE)
        for index in range(steps):
            self.step()
            if index < steps - 1:
                self.save_point()
        if validation is not None:
            self.validate(**validation)
        self.end_epoch(validated=validation is not None)

    def end(self) -> None:
        for callback in self.callbacks:
            callback.on_fit_end(self, MODULE)


MODULE = Nothing()
_fits: TrainerView = FakeTrainer()
