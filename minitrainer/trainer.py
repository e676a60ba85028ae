"""`Trainer`: the loop, readable from top to bottom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from minitrainer import protocols
from minitrainer.callback import Callback
from minitrainer.callbacks import ModelCheckpoint, ProgressBar
from minitrainer.data import EvaluationData, move_to_device
from minitrainer.datamodule import DataModule
from minitrainer.evaluation import PREDICTION, TEST, VALIDATION, Stage, evaluate
from minitrainer.ledger import log_coverage
from minitrainer.loggers import CSVLogger
from minitrainer.module import Module
from minitrainer.plugins import (
    Accumulator,
    AMPPlugin,
    CheckpointIO,
    LearningRateRule,
    ManualStrategy,
)
from minitrainer.run import FitRun, Run, Sources
from minitrainer.session import Session
from minitrainer.settings import Settings
from minitrainer.setup import Parts
from minitrainer.step import Ask, MicroBatch, SavePoint, StepOutput, StepResult, WindowTotals

_NOTHING_ASKED = Ask()


class Trainer(Session):
    """Train, validate, test and predict on one rank or many; the result is the same.

    Args:
        accelerator: "auto" takes CUDA where there is one.
        devices: Ranks to start on this machine; None is one, or what torchrun or SLURM started.
        strategy: How ranks share the model; by default `DDPStrategy` on several ranks.
        sync_batchnorm: Take the statistics of batch norm layers over all ranks (see
            `plugins/batchnorm.py`). Layers of `torch.nn.SyncBatchNorm` do so in any case.
        precision: "fp32", "bf16", "fp16", or a plugin.
        accumulate: Micro-batches per optimizer step: a number, a mapping from the epoch where a
            number begins to the number, or an accumulator.
        max_epochs: Epochs; one if neither this nor `max_steps` is given.
        max_steps: Optimizer steps.
        min_epochs: Epochs before a callback may stop the run.
        lr_rule: How the learning rate follows the size of the global batch; by default not at all.
        gradient_clip_norm: Clip the norm of the gradient of a window to this.
        gradient_clip_value: Clip each element of it to plus or minus this.
        limit_train_batches: Batches per epoch and rank: a number, or a fraction of all.
        limit_val_batches: The same for a validation.
        limit_test_batches: The same for `test`.
        limit_predict_batches: The same for `predict`.
        val_check_interval: A whole number of optimizer steps, counted through the epochs; or a
            fraction of an epoch, 1.0 being its end.
        check_val_every_n_epoch: Validate in every so many epochs only; None lets an interval in
            steps be longer than an epoch.
        log_every_n_steps: Optimizer steps between two rows of step metrics.
        seed: All randomness follows from it.
        run_dir: Directory of the run; by default `runs/NAME-TIME`.
        callbacks: Observers; a `ModelCheckpoint` and a `ProgressBar` are added if there is none.
        loggers: Where metrics go; by default a `CSVLogger`.
        checkpoint_io: Where checkpoints are kept.
        enable_progress_bar: Whether to add a progress bar.
        enable_checkpointing: Whether to add a `ModelCheckpoint`.
        dry_run: Two steps and two batches of each evaluation, nothing written.

    Raises:
        SettingError: A value makes no sense.
        PrecisionError: The precision is unknown.
    """

    def __init__(
        self,
        *,
        accelerator: Literal["auto", "cpu", "cuda"] = "auto",
        devices: int | None = None,
        strategy: protocols.Strategy | None = None,
        sync_batchnorm: bool = False,
        precision: Literal["fp32", "bf16", "fp16"] | protocols.Precision = "fp32",
        accumulate: int | Mapping[int, int] | protocols.Accumulator = 1,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        min_epochs: int = 0,
        lr_rule: LearningRateRule | None = None,
        gradient_clip_norm: float | None = None,
        gradient_clip_value: float | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        val_check_interval: int | float = 1.0,
        check_val_every_n_epoch: int | None = 1,
        log_every_n_steps: int = 50,
        seed: int = 0,
        run_dir: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[protocols.Logger] | None = None,
        checkpoint_io: protocols.CheckpointIO | None = None,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        dry_run: bool = False,
    ) -> None:
        settings = Settings(
            max_epochs=max_epochs,
            max_steps=max_steps,
            min_epochs=min_epochs,
            gradient_clip_norm=gradient_clip_norm,
            gradient_clip_value=gradient_clip_value,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            limit_predict_batches=limit_predict_batches,
            val_check_interval=val_check_interval,
            check_val_every_n_epoch=check_val_every_n_epoch,
            log_every_n_steps=log_every_n_steps,
            seed=seed,
        ).resolved()
        if isinstance(accumulate, (int, Mapping)):
            accumulate = Accumulator(accumulate)
        writes = not dry_run and (
            enable_checkpointing or loggers is None or len(loggers) > 0 or run_dir is not None
        )
        added: list[Callback] = []
        if enable_checkpointing and not dry_run and not _has(callbacks, ModelCheckpoint):
            added.append(ModelCheckpoint())
        if enable_progress_bar and not _has(callbacks, ProgressBar):
            added.append(ProgressBar())
        super().__init__(
            Parts(
                settings=settings.for_dry_run(accumulate.window_size(0)) if dry_run else settings,
                accelerator=accelerator,
                devices=devices,
                strategy=strategy,
                sync_batchnorm=sync_batchnorm,
                precision=AMPPlugin(precision) if isinstance(precision, str) else precision,
                accumulator=accumulate,
                callbacks=[*callbacks, *added],
                loggers=() if dry_run else [CSVLogger()] if loggers is None else list(loggers),
                lr_rule=lr_rule,
                checkpoint_io=CheckpointIO() if checkpoint_io is None else checkpoint_io,
                run_dir=None if run_dir is None else Path(run_dir).absolute(),
                default_run_dir=Path.cwd() / "runs" / "run",
                writes=writes,
            )
        )

    # The four entries --------------------------------------------------------------------------

    def fit(
        self,
        module: Module,
        train_dataloaders: Iterable[Any] | DataModule | None = None,
        val_dataloaders: Iterable[Any] | None = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train the module; afterwards it holds the trained weights, also on several ranks.

        Args:
            module: What to train.
            train_dataloaders: A loader (any iterable of batches), or a DataModule.
            val_dataloaders: A loader for validation, if wanted.
            datamodule: Makes the loaders.
            ckpt_path: A checkpoint to go on from: its path; "auto" for the newest whole one of this
                run, or none if there is none; "last" or "best" of this run. The run is that in
                `run_dir`; without one, the newest of those that this trainer would have named.

        Raises:
            Interrupted: The run was told to stop by a signal; it has stopped at a window border.
        """
        sources = Sources.of(train_dataloaders, val_dataloaders, datamodule)
        wish = self._wish(ckpt_path)
        if self._starts_ranks():
            entry = partial(self.fit, module, train_dataloaders, val_dataloaders, datamodule)
            self._on_local_ranks(module, lambda: entry(ckpt_path))
            return
        with self._fitting(module, sources, wish) as run:
            for callback in run.hooks.fit_start:
                callback.on_fit_start(self, module)
            while not self._is_done():
                self._fit_epoch(run)
            run.rows.flush()
            run.strategy.sync_buffers()
            for callback in run.hooks.fit_end:
                callback.on_fit_end(self, module)
            run.signals.raise_if_received()

    def validate(
        self,
        module: Module,
        dataloaders: Iterable[Any] | DataModule | None = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> dict[str, float]:
        """Run `validation_step` on each batch once; return the metrics."""
        self._evaluate(VALIDATION, module, Sources.of(None, dataloaders, datamodule), ckpt_path)
        return dict(self.callback_metrics)

    def test(
        self,
        module: Module,
        dataloaders: Iterable[Any] | DataModule | None = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> dict[str, float]:
        """Run `test_step` on each batch once; return the metrics."""
        self._evaluate(TEST, module, Sources.of(None, dataloaders, datamodule), ckpt_path)
        return dict(self.callback_metrics)

    def predict(
        self,
        module: Module,
        dataloaders: Iterable[Any] | DataModule | None = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> list[Any]:
        """Run `predict_step` on each batch once; return the outputs in the loader's order."""
        sources = Sources.of(None, dataloaders, datamodule)
        return self._evaluate(PREDICTION, module, sources, ckpt_path)

    # The loop ----------------------------------------------------------------------------------

    def _fit_epoch(self, run: FitRun) -> None:
        state, module, epoch = self._progress.state, run.module, self._progress.state.epoch
        run.at_epoch_end = False
        for callback in run.hooks.train_epoch_start:
            callback.on_train_epoch_start(self, module)
        data = run.train_data.epoch(
            epoch, samples_seen=state.samples_seen, batch_idx=state.batch_idx
        )
        ended = False
        for window in run.accumulator.windows(data, epoch, run.environment.world_size):
            result = self._train_step(run, window)
            if data.num_batches is None and result.totals.samples == 0:
                break  # every rank has run dry
            ended = window.is_last
            if run.evaluation_data is not None and run.clock.is_due(
                epoch=epoch,
                window_idx=state.window_idx,
                global_step=state.global_step,
                taken=result.taken,
                epoch_end=ended,
            ):
                self._validate(run)
            if ended:
                break
            if run.hooks.save_point or run.deferred_saves:
                self._save_point(run, epoch_end=False)
            if self._is_done():
                self._record(run, run.train_metrics.flush_epoch())
                return
        if not ended and run.clock.at_epoch_end(epoch):
            self._validate(run)
        self._end_epoch(run)

    def _train_step(self, run: FitRun, window: protocols.Window) -> StepResult:
        state, module, hooks, store = self._progress.state, run.module, run.hooks, run.train_metrics
        strategy, precision, device = run.strategy, run.precision, run.device
        weight, samples = 0.0, 0
        store.next_window()
        run.in_window = True
        for micro_batch in window:
            if not micro_batch.dry:
                batch = move_to_device(micro_batch.batch, device, non_blocking=True)
                if batch is not micro_batch.batch:
                    micro_batch = micro_batch._replace(batch=batch)
                for callback in hooks.train_batch_start:
                    callback.on_train_batch_start(self, module, batch, micro_batch.batch_idx)
            store.samples = micro_batch.samples
            ask = self._asked(run) if micro_batch.sync else _NOTHING_ASKED
            with precision.autocast():
                output = strategy.training_step(micro_batch, ask)
            if output.loss is not None:
                precision.backward(output.loss)
            weight += output.weight
            samples += micro_batch.samples
            state.batch_idx += 1
            if hooks.train_batch_end and not micro_batch.sync:
                self._end_micro_batch(run, micro_batch, output)
        totals = strategy.agree(WindowTotals(weight, float(samples), *ask))
        result = self._optimizer_step(run, window.expected_weight, totals)
        state.window_idx += 1
        state.samples_seen += int(totals.samples)
        run.in_window = False
        self._stopping = self._stopping or totals.stop > 0
        run.save_asked = run.save_asked or totals.save > 0
        if hooks.train_batch_end:
            self._end_micro_batch(run, micro_batch, output)
        if result.taken and state.global_step % self.log_every_n_steps == 0:
            self._record(run, store.flush_step(), grad_norm=result.grad_norm)
        for callback in hooks.train_step_end:
            callback.on_train_step_end(self, module, result)
        return result

    def _end_micro_batch(self, run: FitRun, micro_batch: MicroBatch, output: StepOutput) -> None:
        if micro_batch.dry:
            return
        for callback in run.hooks.train_batch_end:
            callback.on_train_batch_end(
                self, run.module, output.outputs, micro_batch.batch, micro_batch.batch_idx
            )

    def _optimizer_step(
        self, run: FitRun, expected_weight: float, totals: WindowTotals
    ) -> StepResult:
        if run.manual is not None:
            return self._count_manual_steps(run.manual, totals)
        optimizer, parameters, settings = (
            run.optimization.optimizer,
            run.parameters,
            self._settings,
        )
        taken, norm = False, None
        if totals.weight != 0:
            run.precision.unscale(optimizer)
            if totals.weight != expected_weight:
                # The losses were weighted for another total: some batch was skipped, or weighs
                # something that nobody could know before.
                torch._foreach_mul_(
                    [p.grad for p in parameters if p.grad is not None],
                    expected_weight / totals.weight,
                )
            if settings.gradient_clip_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(parameters, settings.gradient_clip_norm)
            if settings.gradient_clip_value is not None:
                torch.nn.utils.clip_grad_value_(parameters, settings.gradient_clip_value)
            if run.lr_rule is None:
                taken = run.precision.step(optimizer)
            else:
                step = self._progress.state.global_step
                with run.lr_rule.applied(optimizer, run.global_batch, step):
                    taken = run.precision.step(optimizer)
            if taken:
                self._progress.state.global_step += 1
                if run.steps_have_schedulers:
                    run.optimization.step_schedulers(
                        "step", self._progress.state.global_step, self._progress.metrics.values
                    )
            else:
                self._progress.state.skipped_steps += 1
        for parameter in parameters:
            parameter.grad = None
        return StepResult(taken, totals.weight == 0, totals, norm)

    def _count_manual_steps(self, manual: ManualStrategy, totals: WindowTotals) -> StepResult:
        """Count what `training_step` has stepped itself: once, however many optimizers."""
        self._progress.state.global_step += int(manual.taken > 0)
        self._progress.state.skipped_steps += manual.skipped
        return StepResult(manual.taken > 0, totals.weight == 0, totals)

    def _end_epoch(self, run: FitRun) -> None:
        self._record(run, run.train_metrics.flush_epoch())
        log_coverage(run)
        self._progress.state.start_next_epoch()
        run.at_epoch_end = True
        run.optimization.step_schedulers(
            "epoch", self._progress.state.epoch, self._progress.metrics.values
        )
        for callback in run.hooks.train_epoch_end:
            callback.on_train_epoch_end(self, run.module)
        self._agree_to_stop(run)
        self._save_point(run, epoch_end=True)
        run.at_epoch_end = False

    def _validate(self, run: FitRun) -> None:
        if run.evaluation_data is None:
            return
        self._run_stage(run, VALIDATION, run.evaluation_data)
        run.validated = True
        run.optimization.check_monitors(self._progress.metrics.values)
        self._agree_to_stop(run)

    def _save_point(self, run: FitRun, *, epoch_end: bool) -> None:
        deferred, run.deferred_saves = run.deferred_saves, []
        point = SavePoint(epoch_end, run.validated, run.save_asked)
        if run.save_asked:
            self.should_save = False
        run.validated = run.save_asked = False
        if deferred:
            self.save_checkpoint(*deferred)
        for callback in run.hooks.save_point:
            callback.on_save_point(self, run.module, point)

    # Evaluation --------------------------------------------------------------------------------

    def _evaluate(
        self, stage: Stage, module: Module, sources: Sources, ckpt_path: str | Path | None
    ) -> list[Any]:
        wish = self._wish(ckpt_path)
        if self._starts_ranks():
            found: list[Any] = self._on_local_ranks(
                module, lambda: self._evaluate(stage, module, sources, ckpt_path)
            )
            return found
        with self._evaluating(stage, module, sources, wish) as run:
            assert run.evaluation_data is not None
            outputs = self._run_stage(run, stage, run.evaluation_data)
            run.signals.raise_if_received()
        return outputs

    def _run_stage(self, run: Run, stage: Stage, data: EvaluationData) -> list[Any]:
        run.strategy.sync_buffers()
        for callback in run.hooks.callbacks:
            stage.on_start(callback)(self, run.module)
        flushed, kept = evaluate(
            self,
            run.module,
            stage,
            data,
            callbacks=run.hooks.callbacks,
            precision=run.precision,
            device=run.device,
            keep_outputs=stage is PREDICTION,
        )
        self._record(run, flushed)
        for callback in run.hooks.callbacks:
            stage.on_end(callback)(self, run.module)
        return self._in_order(kept)


def _has(callbacks: Sequence[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)
