"""The base class of everything that observes the loop."""

from __future__ import annotations

from typing import Any

from minitrainer.module import Module
from minitrainer.protocols import TrainerView
from minitrainer.step import SavePoint, StepResult


class Callback:
    """Typed no-op hooks; override the ones you need.

    A callback observes: it may ask to stop (`trainer.should_stop = True`) or save
    (`trainer.save_checkpoint(path)`), never touches gradients, and never opens in one hook what
    it closes in another. Hooks that no callback overrides cost nothing: which callback overrides
    what is worked out once, before the loop.

    The loop, in running order (a test holds this text and the loop together):

        on_fit_start
        for epoch:
            on_train_epoch_start
            for window of micro-batches:
                for micro-batch but the last:
                    on_train_batch_start
                    training_step, backward
                    on_train_batch_end
                on_train_batch_start
                training_step, backward
                [unscale, clip] optimizer step, scheduler step
                on_train_batch_end
                on_train_step_end
                if validation is due:
                    on_validation_start
                    for batch:
                        on_validation_batch_start
                        validation_step
                        on_validation_batch_end
                    on_validation_end
                if the epoch goes on:
                    on_save_point
            on_train_epoch_end
            on_save_point
        on_fit_end

    `test` and `predict` run the part of the evaluation with `test` or `predict` for `validation`.
    A stop asked for on all ranks after validation or at the end of an epoch happens at once; one
    asked for elsewhere on more than one rank happens at the end of the next window, the same one
    everywhere.
    """

    def on_fit_start(self, trainer: TrainerView, module: Module) -> None:
        """Run before the first epoch, after a checkpoint was loaded."""

    def on_fit_end(self, trainer: TrainerView, module: Module) -> None:
        """Run after the last epoch, also when the run was told to stop."""

    def on_train_epoch_start(self, trainer: TrainerView, module: Module) -> None:
        """Run before the first batch of an epoch is fetched."""

    def on_train_epoch_end(self, trainer: TrainerView, module: Module) -> None:
        """Run when the epoch's metrics stand and its schedulers have stepped."""

    def on_train_batch_start(
        self, trainer: TrainerView, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Run before `training_step` of each micro-batch (not of a dry one)."""

    def on_train_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run after each micro-batch; after the last of a window, the step is already counted."""

    def on_train_step_end(self, trainer: TrainerView, module: Module, result: StepResult) -> None:
        """Run once per window, after the optimizer step (`result.taken` tells if it was)."""

    def on_save_point(self, trainer: TrainerView, module: Module, point: SavePoint) -> None:
        """Run where a checkpoint is consistent: between windows, and after an epoch's end.

        Args:
            trainer: The trainer.
            module: The user's module.
            point: What has happened since the last one.
        """

    def on_validation_start(self, trainer: TrainerView, module: Module) -> None:
        """Run before the first validation batch; buffers are equal on all ranks."""

    def on_validation_batch_start(
        self, trainer: TrainerView, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Run before `validation_step`; ranks may have different numbers of batches."""

    def on_validation_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run after `validation_step`; ranks may have different numbers of batches."""

    def on_validation_end(self, trainer: TrainerView, module: Module) -> None:
        """Run when the validation metrics stand, equal on all ranks."""

    def on_test_start(self, trainer: TrainerView, module: Module) -> None:
        """Run before the first test batch."""

    def on_test_batch_start(
        self, trainer: TrainerView, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Run before `test_step`."""

    def on_test_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run after `test_step`."""

    def on_test_end(self, trainer: TrainerView, module: Module) -> None:
        """Run when the test metrics stand."""

    def on_predict_start(self, trainer: TrainerView, module: Module) -> None:
        """Run before the first batch of a prediction."""

    def on_predict_batch_start(
        self, trainer: TrainerView, module: Module, batch: Any, batch_idx: int
    ) -> None:
        """Run before `predict_step`."""

    def on_predict_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run after `predict_step`."""

    def on_predict_end(self, trainer: TrainerView, module: Module) -> None:
        """Run after the last batch of a prediction."""

    def on_exception(self, trainer: TrainerView, module: Module, exception: BaseException) -> None:
        """Run on the rank that raised, before its process ends; no collectives here."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive in a checkpoint: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
