"""What the loggers get: one row per global_step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minitrainer.protocols import Logger


class Rows:
    """Gather everything logged at one global_step, and hand it to the loggers once.

    The last step of an epoch has step metrics, validation metrics and epoch metrics; a logger
    that saw the step three times would drop two of the rows, or fail.

    Args:
        loggers: Where rows go; empty on other ranks than 0.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = loggers
        self._step = 0
        self._row: dict[str, float] = {}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the row of this global_step."""
        if step != self._step:
            self.flush()
            self._step = step
        self._row.update(metrics)

    def flush(self) -> None:
        """Hand over the row that is being gathered."""
        if self._row:
            for logger in self._loggers:
                logger.log_metrics(self._row, self._step)
            self._row = {}
