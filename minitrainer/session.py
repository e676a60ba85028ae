"""What surrounds the loop: where it runs, and what callbacks may see and ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from minitrainer import dist, protocols, storage
from minitrainer.agreed import on_rank_0
from minitrainer.callback import Callback
from minitrainer.callbacks import ModelCheckpoint
from minitrainer.errors import CheckpointNotFoundError, LogError
from minitrainer.evaluation import Stage
from minitrainer.launch import Environment, Interrupted, check_devices, run_on_local_ranks
from minitrainer.metrics import Flushed
from minitrainer.module import Module
from minitrainer.resume import WORDS, Wish, folders_of
from minitrainer.run import FitRun, Progress, Run, Sources
from minitrainer.setup import Parts, evaluating, fitting
from minitrainer.snapshot import callback_states, capture, load_callback_states
from minitrainer.step import Ask

_ASKS = {
    (stop, save): Ask(float(stop), float(save)) for stop in (False, True) for save in (False, True)
}


class Session:
    """The part of the trainer that is not the loop; it satisfies `protocols.TrainerView`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._progress = Progress()
        self._run: Run | None = None
        self._fit_run: FitRun | None = None
        self._stopping = False
        self.should_stop = self.should_save = False
        self.recipe: dict[str, Any] | None = None
        """The resolved recipe, plain values; written into the run directory and checkpoints."""

    def take_recipe(self, recipe: dict[str, Any], default_run_dir: Path) -> None:
        """Note what the trainer was built from.

        Args:
            recipe: The resolved recipe, plain values.
            default_run_dir: What directories of runs are named after: NAME of `NAME-TIME`.
        """
        self.recipe = recipe
        self._parts = replace(self._parts, default_run_dir=default_run_dir)

    # What callbacks see ------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps really taken."""
        return self._progress.state.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, from 0; in the hooks of its end still this one."""
        ended = self._fit_run is not None and self._fit_run.at_epoch_end
        return self._progress.state.epoch - int(ended)

    @property
    def max_epochs(self) -> int | None:
        """The limit in epochs."""
        return self._settings.max_epochs

    @property
    def min_epochs(self) -> int:
        """Epochs before a callback may stop the run."""
        return self._settings.min_epochs

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, known before the first; None if nothing limits them."""
        return self._progress.total_steps

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between two rows of step metrics."""
        return self._settings.log_every_n_steps

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of an epoch on one rank; None when unknown."""
        return self._progress.num_training_batches

    @property
    def num_evaluation_batches(self) -> int | None:
        """Batches of this rank in the evaluation that runs; None when unknown."""
        return self._progress.num_evaluation_batches

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return self._environment.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run, absolute; None if nothing is written."""
        return self._progress.run_dir

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the run that is on."""
        return self._progress.optimizers

    @property
    def callback_metrics(self) -> Mapping[str, float]:
        """Newest value of each metric, reduced over ranks."""
        return {name: value for name, (value, _) in self._progress.metrics.values.items()}

    @property
    def progress_metrics(self) -> Mapping[str, float]:
        """Newest values for the progress bar, of this rank; reads the device."""
        shown = dict(self._progress.metrics.in_progress_bar)
        if self._fit_run is not None:
            shown.update(self._fit_run.train_metrics.progress())
        return shown

    @property
    def callbacks(self) -> Sequence[Callback]:
        """The callbacks, the added ones included."""
        return self._parts.callbacks

    @property
    def checkpoint_io(self) -> protocols.CheckpointIO:
        """Where checkpoints are kept."""
        return self._parts.checkpoint_io

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add values to the row of the present global_step."""
        if self._fit_run is not None:
            self._fit_run.rows.add(self.global_step, metrics)

    def save_checkpoint(self, *paths: str | Path) -> None:
        """Save a checkpoint, under several names if need be; call it on all ranks.

        Inside a window it happens at its end.

        Raises:
            CheckpointWriteError: Rank 0 could not write it; raised on all ranks.
        """
        run = self._fit_run
        if run is None:
            raise LogError("save_checkpoint was called outside of fit.", "There is no run to save.")
        if run.in_window:
            run.deferred_saves += map(Path, paths)
            return
        # The row of this step first: a process killed after the save goes on behind it.
        run.rows.flush()
        checkpoint = capture(
            run,
            self._progress.state,
            self._progress.metrics,
            seed=self._settings.seed,
            recipe=self.recipe,
        )

        def write() -> None:
            for path in paths:
                self.checkpoint_io.save(checkpoint, Path(path))

        on_rank_0(write)

    @property
    def _environment(self) -> Environment:
        # Between runs too, and in configure_optimizers: `if trainer.is_global_zero` after fit.
        return Environment.detect() if self._run is None else self._run.environment

    # What the loop asks ------------------------------------------------------------------------

    def _is_done(self) -> bool:
        state, settings = self._progress.state, self._settings
        return (
            self._stopping
            or (settings.max_epochs is not None and state.epoch >= settings.max_epochs)
            or (settings.max_steps is not None and state.global_step >= settings.max_steps)
        )

    def _asked(self, run: Run) -> Ask:
        return _ASKS[self._wants_to_stop(run), self.should_save]

    def _wants_to_stop(self, run: Run) -> bool:
        if run.signals.received is not None:
            return True
        return self.should_stop and self._progress.state.epoch >= self._settings.min_epochs

    def _agree_to_stop(self, run: Run) -> None:
        """Stop at once if a rank wants to; only where ranks communicate anyway."""
        self._stopping = self._stopping or dist.any_rank(self._wants_to_stop(run))

    def _record(
        self, run: Run, flushed: list[Flushed], *, grad_norm: torch.Tensor | None = None
    ) -> None:
        """Take reduced metrics: for callbacks, the progress bar and the row of this step."""
        row = self._progress.metrics.update(flushed)
        if isinstance(run, FitRun):
            if grad_norm is not None:
                row["grad_norm"] = float(grad_norm)
            if run.lr_rule is not None:
                row["lr_factor"] = run.lr_rule.factor(run.global_batch, self.global_step)
            if row:
                run.rows.add(self.global_step, {"epoch": self.current_epoch, **row})

    def _in_order(self, kept: list[tuple[int, Any]]) -> list[Any]:
        """Return the outputs of all ranks in the order of the loader, on every rank."""
        if self.world_size == 1:
            return [output for _, output in kept]
        parts = [storage.loads(part) for part in dist.gather_bytes(storage.dumps(kept))]
        by_index = sorted(chain.from_iterable(parts), key=itemgetter(0))
        return [output for _, output in by_index]

    # Where it runs -----------------------------------------------------------------------------

    @contextmanager
    def _fitting(self, module: Module, sources: Sources, wish: Wish | None) -> Iterator[FitRun]:
        progress = self._restarted()
        with fitting(
            self._parts,
            progress,
            self,
            module=module,
            sources=sources,
            wish=wish,
            recipe=self.recipe,
        ) as run:
            self._run = self._fit_run = run
            try:
                yield run
            finally:
                self._run = self._fit_run = None

    @contextmanager
    def _evaluating(
        self, stage: Stage, module: Module, sources: Sources, wish: Wish | None
    ) -> Iterator[Run]:
        progress = self._restarted()
        with evaluating(
            self._parts,
            progress,
            self,
            stage=stage,
            module=module,
            sources=sources,
            wish=wish,
        ) as run:
            self._run = run
            try:
                yield run
            finally:
                self._run = None

    def _restarted(self) -> Progress:
        self._progress = Progress()
        self._stopping = self.should_stop = self.should_save = False
        return self._progress

    def _wish(self, asked: str | Path | None) -> Wish | None:
        """Understand what the user wants loaded; a path that is not there is an error at once."""
        if asked is None:
            return None
        if str(asked) not in WORDS:
            path = Path(asked)
            # Rank 0's word counts: the others may not see its disk.
            if Environment.detect().rank == 0 and not self.checkpoint_io.exists(path):
                self.checkpoint_io.load(path)  # raises the error that says what is there instead
                raise CheckpointNotFoundError(f"There is no checkpoint at {path}.")
            return Wish(path.absolute())
        keepers = [c for c in self.callbacks if isinstance(c, ModelCheckpoint)]
        folders = folders_of(
            self._progress.run_dir or self._parts.run_dir,
            self._parts.default_run_dir,
            [keeper.dirpath for keeper in keepers if keeper.dirpath is not None],
        )
        best = next((keeper.best_model_path for keeper in keepers), "")
        return Wish(str(asked), folders, best)

    def _starts_ranks(self) -> bool:
        environment = Environment.detect()
        ranks = check_devices(self._parts.accelerator, self._parts.devices, environment)
        return environment.launcher == "none" and ranks > 1

    def _on_local_ranks(self, module: Module, entry: Callable[[], Any]) -> Any:
        """Run the entry on local ranks, and take over what rank 0 has got."""

        def on_rank() -> dict[str, Any]:
            try:
                return self._report(module, entry())
            except Interrupted as interrupted:
                interrupted.result = self._report(module, None)
                raise

        ranks = check_devices(self._parts.accelerator, self._parts.devices, Environment.detect())
        try:
            report = run_on_local_ranks(on_rank, ranks)
        except Interrupted as interrupted:
            if interrupted.result is not None:
                self._adopt(module, interrupted.result)
            raise
        return self._adopt(module, report)

    def _report(self, module: Module, returned: Any) -> dict[str, Any]:
        progress = self._progress
        return {
            "returned": returned,
            "state_dict": module.state_dict(),
            "counters": progress.state.state_dict(),
            "metrics": {name: list(entry) for name, entry in progress.metrics.values.items()},
            "callbacks": callback_states(self._parts.callbacks),
            "run_dir": None if progress.run_dir is None else str(progress.run_dir),
            "total_steps": progress.total_steps,
            "num_training_batches": progress.num_training_batches,
        }

    def _adopt(self, module: Module, report: dict[str, Any]) -> Any:
        progress = self._restarted()
        module.load_state_dict(report["state_dict"])
        progress.state.load_state_dict(report["counters"])
        progress.metrics.values = {name: tuple(e) for name, e in report["metrics"].items()}
        load_callback_states(self._parts.callbacks, report["callbacks"])
        progress.run_dir = None if report["run_dir"] is None else Path(report["run_dir"])
        progress.total_steps = report["total_steps"]
        progress.num_training_batches = report["num_training_batches"]
        return report["returned"]
