"""`ModelCheckpoint`: when to save, under which name, and which files to keep."""

from __future__ import annotations

import logging
import math
import string
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from minitrainer import dist
from minitrainer.callback import Callback
from minitrainer.checks import check_whole
from minitrainer.errors import SettingError
from minitrainer.module import Module
from minitrainer.monitor import Monitor
from minitrainer.protocols import TrainerView
from minitrainer.step import SavePoint, StepResult

_logger = logging.getLogger(__name__)

_SUFFIX = ".ckpt"
_LAST = f"last{_SUFFIX}"
# Not allowed in file names on some system or other.
_FORBIDDEN = str.maketrans(dict.fromkeys('/\\:*?"<>|', "_"))


class _Kept(NamedTuple):
    """A file in the folder, and its score if files are chosen by one."""

    name: str
    score: float | None


class ModelCheckpoint(Callback):
    """Save checkpoints every so often, the best ones by a metric, and the last one.

    Without `monitor`, the newest `save_top_k` files are kept. With it, a file is written when the
    metric is new (after a validation, or at the end of an epoch for a metric of the training) and
    among the `save_top_k` best; `every_n_epochs` then lets it look in every n-th epoch only, and
    `every_n_steps` and `every_n_minutes` keep just `last.ckpt` up to date in between. NaN and
    infinities are never among the best. A file that has to go is removed after the new one stands.

    Every decision depends on numbers that are equal on all ranks, so all ranks save together. A
    resumed run goes on with the list of files that its checkpoint knew of; of those, files that are
    not in the folder any more are forgotten.

    Args:
        every_n_steps: Save every so many optimizer steps.
        every_n_epochs: Save at the end of every so many epochs; 1 if no other interval is given.
        every_n_minutes: Save when so many minutes have passed since the last save, by the clock of
            rank 0.
        monitor: The metric to choose files by.
        mode: Whether "min" or "max" is better.
        save_top_k: How many files to keep; -1 keeps all, 0 none but `last.ckpt`.
        save_last: Write `last.ckpt` as well, each time and at the end of the run.
        filename: Name of the files without `.ckpt`: a format string with `epoch`, `step` and names
            of metrics, "epoch={epoch}-step={step}" by default. A metric without a value yet is
            written as nan.
        dirpath: The folder; `checkpoints` in the run directory by default. Without either nothing
            is saved.

    Raises:
        SettingError: An argument makes no sense.
        MonitorError: During fit: nobody logs the metric to monitor.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        every_n_minutes: float | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        filename: str | None = None,
        dirpath: str | Path | None = None,
    ) -> None:
        owner = type(self).__name__
        if every_n_steps is None and every_n_epochs is None and every_n_minutes is None:
            every_n_epochs = 1
        for name, value in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None:
                check_whole(owner, name, value, at_least=1)
        if every_n_minutes is not None and not every_n_minutes > 0:
            raise SettingError(
                f"{owner} got every_n_minutes={every_n_minutes}.", fix="It must be above 0."
            )
        check_whole(owner, "save_top_k", save_top_k, at_least=-1)
        self._every_n_steps = every_n_steps
        self._every_n_epochs = every_n_epochs
        self._every_seconds = None if every_n_minutes is None else 60.0 * every_n_minutes
        self._saved_at = 0.0
        self._monitor = None if monitor is None else Monitor(owner, monitor, mode)
        self._save_top_k = save_top_k
        self._save_last = save_last
        self._template = "epoch={epoch}-step={step}" if filename is None else filename
        _check_template(owner, self._template)
        # Made absolute here: user code may change the working directory before the run.
        self._dirpath = None if dirpath is None else Path(dirpath).absolute()
        self._dir = self._dirpath
        self._kept: list[_Kept] = []
        self._last = ""
        self._saved_step = -1
        self._save_points_since_last = 0

    @property
    def dirpath(self) -> Path | None:
        """The folder that was asked for; None stands for the one in the run directory."""
        return self._dirpath

    @property
    def best_model_path(self) -> str:
        """The best file, or the newest without `monitor`; "" when there is none."""
        best = self._best()
        return "" if best is None else self._path(best.name)

    @property
    def best_model_score(self) -> float | None:
        """The score of the best file."""
        best = self._best()
        return None if best is None else best.score

    @property
    def last_model_path(self) -> str:
        """Where `last.ckpt` is; "" when there is none."""
        return self._path(self._last) if self._last else ""

    # Hooks -------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: TrainerView, module: Module) -> None:
        """Find the folder, and forget files that are not in it."""
        self._dir = self._dirpath
        if self._dir is None and trainer.run_dir is not None:
            self._dir = trainer.run_dir.absolute() / "checkpoints"
        self._save_points_since_last = 0
        self._saved_at = time.monotonic()
        if self._saved_step != trainer.global_step:
            self._saved_step = -1  # that of another run
        if self._kept or self._last:
            self._forget_absent(trainer)

    def on_validation_start(self, trainer: TrainerView, module: Module) -> None:
        """Notice what the validation changes."""
        if self._monitor is not None:
            self._monitor.validation_starts(trainer.callback_metrics)

    def on_validation_end(self, trainer: TrainerView, module: Module) -> None:
        """Notice what the validation has changed."""
        if self._monitor is not None:
            self._monitor.validation_ends(trainer.callback_metrics)

    def on_train_step_end(self, trainer: TrainerView, module: Module, result: StepResult) -> None:
        """Ask all ranks to save when the minutes are over."""
        if (
            self._every_seconds is not None
            and trainer.is_global_zero
            and time.monotonic() - self._saved_at >= self._every_seconds
        ):
            trainer.should_save = True

    def on_save_point(self, trainer: TrainerView, module: Module, point: SavePoint) -> None:
        """Save if it is time to."""
        epoch_end, validated = point.epoch_end, point.validated
        self._save_points_since_last += 1
        monitor, epoch = self._monitor, trainer.current_epoch
        due = self._is_due(trainer.global_step, epoch, epoch_end=epoch_end)
        due = due or (point.asked and self._every_seconds is not None)
        # A step that AMP skipped is no new step.
        due = due and trainer.global_step != self._saved_step
        if monitor is None:
            if due:
                self._save(trainer, None, keep=True)
            return
        metrics = trainer.callback_metrics if validated or epoch_end else {}
        if epoch_end:
            monitor.check_epoch_end(metrics, epoch)
        every = self._every_n_epochs
        chooses = (validated if monitor.is_of_validation else epoch_end) and (
            every is None or (epoch + 1) % every == 0
        )
        score = metrics.get(monitor.name) if chooses else None
        if score is not None:
            self._save(trainer, float(score), keep=math.isfinite(score))
        elif due:
            self._save(trainer, None, keep=False)

    def on_fit_end(self, trainer: TrainerView, module: Module) -> None:
        """Bring `last.ckpt` up to date."""
        if self._save_last and self._save_points_since_last:
            self._save(trainer, None, keep=False)

    def state_dict(self) -> dict[str, Any]:
        """Return which files there are; names are relative to `dirpath`."""
        return {
            "dirpath": "" if self._dir is None else str(self._dir),
            "kept": [[name, score] for name, score in self._kept],
            "best": Path(self.best_model_path).name,
            "last": self._last,
            "saved_step": self._saved_step,
            **({} if self._monitor is None else self._monitor.state_dict()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the list of files back; scores of another metric are of no use."""
        if self._monitor is None:
            same = "monitor" not in state_dict
        else:
            same = self._monitor.load_state_dict(state_dict)
        self._kept = [_Kept(name, score) for name, score in state_dict["kept"] if same]
        self._last = state_dict["last"]
        self._saved_step = state_dict["saved_step"]
        if self._dirpath is None and state_dict["dirpath"]:
            self._dir = Path(state_dict["dirpath"])

    # Decisions ---------------------------------------------------------------------------------

    def _is_due(self, step: int, epoch: int, *, epoch_end: bool) -> bool:
        steps, epochs = self._every_n_steps, self._every_n_epochs
        return (steps is not None and step > 0 and step % steps == 0) or (
            epochs is not None and epoch_end and (epoch + 1) % epochs == 0
        )

    def _save(self, trainer: TrainerView, score: float | None, *, keep: bool) -> None:
        """Save under a new name if the file is to be kept, and as last.

        The list of files is brought up to date first, since it is part of what is saved.
        """
        if self._dir is None:
            return
        names, surplus = [], None
        if keep and self._save_top_k != 0:
            kept, surplus = self._ranked([*self._kept, _Kept("", score)])
            if surplus is None or surplus.name:
                others = {file.name for file in kept}
                new = _Kept(self._new_name(trainer, others), score)
                self._kept = [file if file.name else new for file in kept]
                names.append(new.name)
        if self._save_last:
            self._last = _LAST
            names.append(_LAST)
            self._save_points_since_last = 0
        self._saved_step = trainer.global_step
        self._saved_at = time.monotonic()
        if names:
            trainer.save_checkpoint(*[self._dir / name for name in names])
        if surplus is not None and surplus.name not in ("", *names) and trainer.is_global_zero:
            trainer.checkpoint_io.remove(self._dir / surplus.name)

    def _ranked(self, files: Sequence[_Kept]) -> tuple[list[_Kept], _Kept | None]:
        """Return the files to keep, oldest first, and the one that is too many."""
        if self._save_top_k == -1 or len(files) <= self._save_top_k:
            return list(files), None
        worst = 0
        if self._monitor is not None:
            for index, file in enumerate(files):
                # A newer file that is just as good as the worst one does not push it out.
                if not self._monitor.is_better(_score(file), files[worst].score):
                    worst = index
        return [file for index, file in enumerate(files) if index != worst], files[worst]

    def _best(self) -> _Kept | None:
        best = None
        for file in self._kept:
            if (
                self._monitor is None
                or best is None
                or self._monitor.is_better(_score(file), best.score)
            ):
                best = file
        return best

    # Names -------------------------------------------------------------------------------------

    def _new_name(self, trainer: TrainerView, taken: set[str]) -> str:
        stem = _file_name(
            self._template,
            {
                **trainer.callback_metrics,
                "epoch": trainer.current_epoch,
                "step": trainer.global_step,
            },
        )
        name, version = f"{stem}{_SUFFIX}", 0
        while name in taken:
            version += 1
            name = f"{stem}-v{version}{_SUFFIX}"
        return name

    def _path(self, name: str) -> str:
        return name if self._dir is None else str(self._dir / name)

    def _forget_absent(self, trainer: TrainerView) -> None:
        names = [*(file.name for file in self._kept), self._last or _LAST]
        # Rank 0 looks, and tells the others: they may not see its disk.
        present: list[bool] = dist.broadcast_object(
            [
                self._dir is not None and trainer.checkpoint_io.exists(self._dir / name)
                for name in names
                if trainer.is_global_zero
            ]
        )
        there = {name for name, is_there in zip(names, present, strict=True) if is_there}
        absent = [file.name for file in self._kept if file.name not in there]
        if absent:
            _logger.info("Not in %s any more: %s.", self._dir, ", ".join(absent))
        self._kept = [file for file in self._kept if file.name in there]
        self._last = self._last if self._last in there else ""


class _Formatter(string.Formatter):
    """Take field names as they are: `val/loss` and `val.loss` are names of metrics."""

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str]:
        return kwargs.get(field_name, math.nan), field_name


def _file_name(template: str, values: Mapping[str, Any]) -> str:
    text = _Formatter().vformat(template, (), values)
    text = "".join(char for char in text.translate(_FORBIDDEN) if char.isprintable())
    # A leading dot would hide the file, and is the mark of temporary ones.
    return text.removesuffix(_SUFFIX).strip(" .")


def _check_template(owner: str, template: Any) -> None:
    fix = 'Give a format string like "epoch={epoch}-val_loss={val_loss:.3f}".'
    problem = "" if isinstance(template, str) else "it is not a string"
    if not problem:
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(template)]
            name = _file_name(template, {"epoch": 0, "step": 0})
        except (ValueError, TypeError) as error:
            problem = str(error)
        else:
            if any(field is not None and (not field or field.isdigit()) for field in fields):
                problem = "a field has no name"
            elif name in ("", "last"):
                problem = f"the name of a file would be {name!r}"
    if problem:
        raise SettingError(f"{owner} got filename={template!r}: {problem}.", fix=fix)


def _score(file: _Kept) -> float:
    return math.nan if file.score is None else file.score
