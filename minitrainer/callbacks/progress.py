"""`ProgressBar`: a bar on a terminal, plain lines elsewhere, on rank 0 only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, TextIO

from tqdm import tqdm

from minitrainer.callback import Callback
from minitrainer.checks import check_number, check_whole
from minitrainer.module import Module
from minitrainer.protocols import TrainerView

# Seconds between two looks at whether a line is due, and until the first line where the number of
# batches is unknown; from there on the gaps double, so that a long epoch gets few lines too.
_LOOK = 1.0
_FIRST_LINE = 5.0

# What stands behind the bar; called with whether the pass over the loader has ended.
_Text = Callable[[bool], str]


class ProgressBar(Callback):
    """Show how far the run is, and the newest value of metrics logged with `prog_bar=True`.

    On a terminal it is a tqdm bar for each epoch and a passing one for each validation. Elsewhere
    (a file, a pipe, a notebook, no TERM) it is plain lines without carriage returns: at most
    `lines_per_epoch` in an epoch, never more than one per second but for the one at its end, and
    one for each validation. All of it goes to stderr. With the environment variable TQDM_DISABLE
    set, nothing is shown.

    Metrics are read from the device when something is shown, and at no other time.

    Args:
        refresh_seconds: Seconds between two changes of the bar.
        lines_per_epoch: Lines per epoch where there is no terminal.

    Raises:
        SettingError: An argument makes no sense.
    """

    def __init__(self, *, refresh_seconds: float = 0.2, lines_per_epoch: int = 10) -> None:
        check_number(type(self).__name__, "refresh_seconds", refresh_seconds, at_least=0.0)
        check_whole(type(self).__name__, "lines_per_epoch", lines_per_epoch, at_least=1)
        self._refresh_seconds = refresh_seconds
        self._lines_per_epoch = lines_per_epoch
        self._training = self._evaluation = _Display()
        self._before: Mapping[str, float] = {}
        self._of_evaluation: set[str] = set()

    # Training ----------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: TrainerView, module: Module) -> None:
        """Start the epoch's bar."""
        self._training = self._new_display(
            trainer,
            f"Epoch {trainer.current_epoch}",
            trainer.num_training_batches,
            text=lambda _: _text({"step": trainer.global_step, **trainer.progress_metrics}),
            lines=self._lines_per_epoch,
        )

    def on_train_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show progress if it is time to."""
        self._training.advance(batch_idx + 1)

    def on_train_epoch_end(self, trainer: TrainerView, module: Module) -> None:
        """End the epoch's bar."""
        self._training.end()

    def on_fit_end(self, trainer: TrainerView, module: Module) -> None:
        """End the bar of an epoch that was cut short."""
        self._training.end()

    def on_exception(self, trainer: TrainerView, module: Module, exception: BaseException) -> None:
        """Leave the cursor on a line of its own, for the traceback."""
        self._evaluation.leave()
        self._training.leave()

    # Evaluation --------------------------------------------------------------------------------

    def on_validation_start(self, trainer: TrainerView, module: Module) -> None:
        """Start the validation's bar."""
        self._start_evaluation(trainer, "Validation", lines=1)

    def on_validation_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show progress if it is time to."""
        self._evaluation.advance(self._evaluation.count + 1)

    def on_validation_end(self, trainer: TrainerView, module: Module) -> None:
        """End the validation's bar; a line shows the metrics."""
        self._evaluation.end()

    def on_test_start(self, trainer: TrainerView, module: Module) -> None:
        """Start the test's bar."""
        self._start_evaluation(trainer, "Test", lines=self._lines_per_epoch)

    def on_test_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show progress if it is time to."""
        self._evaluation.advance(self._evaluation.count + 1)

    def on_test_end(self, trainer: TrainerView, module: Module) -> None:
        """End the test's bar; a line shows the metrics."""
        self._evaluation.end()

    def on_predict_start(self, trainer: TrainerView, module: Module) -> None:
        """Start the prediction's bar."""
        self._start_evaluation(trainer, "Prediction", lines=self._lines_per_epoch)

    def on_predict_batch_end(
        self, trainer: TrainerView, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show progress if it is time to."""
        self._evaluation.advance(self._evaluation.count + 1)

    def on_predict_end(self, trainer: TrainerView, module: Module) -> None:
        """End the prediction's bar."""
        self._evaluation.end()

    # Displays ----------------------------------------------------------------------------------

    def _start_evaluation(self, trainer: TrainerView, title: str, *, lines: int) -> None:
        self._before = dict(trainer.callback_metrics)
        self._evaluation = self._new_display(
            trainer,
            title,
            trainer.num_evaluation_batches,
            text=lambda ended: _text(self._changed(trainer.callback_metrics)) if ended else "",
            lines=lines,
            passing=title == "Validation",
        )

    def _changed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that an evaluation has changed, now or before: they are its own."""
        self._of_evaluation.update(
            name for name, value in metrics.items() if self._before.get(name) != value
        )
        return {name: value for name, value in metrics.items() if name in self._of_evaluation}

    def _new_display(
        self,
        trainer: TrainerView,
        title: str,
        total: int | None,
        *,
        text: _Text,
        lines: int,
        passing: bool = False,
    ) -> _Display:
        stream = sys.stderr
        if not trainer.is_global_zero or stream is None or os.environ.get("TQDM_DISABLE"):
            return _Display()
        if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            return _Bar(title, total, text, self._refresh_seconds, stream, passing=passing)
        return _Lines(title, total, text, lines, stream)


class _Display:
    """What shows one pass over a loader. This one shows nothing, as on the other ranks."""

    count = 0
    """Batches of this pass; fewer than `done` after a resume in the middle of an epoch."""

    def advance(self, done: int) -> None:
        """Take note that a batch is done, the `done`th of the epoch."""

    def end(self) -> None:
        """Show the last state, once."""

    def leave(self) -> None:
        """Leave it as it stands."""


class _Shown(_Display):
    def __init__(self, interval: float) -> None:
        self.count = self.done = 0
        self._interval = interval
        self._started = monotonic()
        self._next_look = self._started + interval
        self._ended = False

    def advance(self, done: int) -> None:
        self.count += 1
        self.done = done
        # This is all that most batches cost.
        if monotonic() >= self._next_look:
            self.look()
            self._next_look = monotonic() + self._interval

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self.finish()

    def look(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


class _Tqdm(tqdm):  # type: ignore[type-arg]
    # No thread that watches the bars: it would be copied into forked workers half way.
    monitor_interval = 0


class _Bar(_Shown):
    def __init__(
        self,
        title: str,
        total: int | None,
        text: _Text,
        interval: float,
        stream: TextIO,
        *,
        passing: bool,
    ) -> None:
        super().__init__(interval)
        self._text = text
        # Terminals of no width exist (`script`, CI); tqdm would show nothing there.
        has_width = os.get_terminal_size(stream.fileno()).columns > 0
        self._bar = _Tqdm(
            total=total,
            desc=title,
            file=stream,
            leave=not passing,
            dynamic_ncols=has_width,
            ncols=None if has_width else 80,
            mininterval=0,
            unit="batch",
        )

    def look(self) -> None:
        self._update()
        self._bar.refresh()

    def finish(self) -> None:
        self._update()
        self._bar.close()

    def leave(self) -> None:
        if not self._ended:
            self._ended = True
            self._bar.close()

    def _update(self) -> None:
        self._bar.initial = self.done - self.count
        self._bar.n = self.done
        self._bar.set_postfix_str(self._text(self._ended), refresh=False)


class _Lines(_Shown):
    def __init__(
        self, title: str, total: int | None, text: _Text, lines: int, stream: TextIO
    ) -> None:
        super().__init__(_LOOK)
        self._title = title
        self._total = total
        self._text = text
        self._lines = lines
        self._stream = stream
        self._parts = 0
        self._next_line = self._started + _FIRST_LINE

    def look(self) -> None:
        if self._total:
            # The last part is the line of the end.
            parts = min(self.done * self._lines // self._total, self._lines - 1)
            if parts > self._parts:
                self._parts = parts
                self._print()
        elif self._lines > 1 and (now := monotonic()) >= self._next_line:
            self._next_line = now + (now - self._started)
            self._print()

    def finish(self) -> None:
        self._print()

    def _print(self) -> None:
        total = "" if self._total is None else f"/{self._total}"
        rate = self.count / max(monotonic() - self._started, 1e-9)
        parts = [
            self._title,
            f"{self.done}{total} batches",
            f"{rate:.4g} batches/s",
            self._text(self._ended),
        ]
        # One write per line: lines of several processes do not mix.
        self._stream.write(" | ".join(part for part in parts if part) + "\n")
        self._stream.flush()


def _text(metrics: Mapping[str, float]) -> str:
    return " ".join(
        f"{name}={value}" if isinstance(value, int) else f"{name}={value:.4g}"
        for name, value in metrics.items()
    )
