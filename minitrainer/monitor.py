"""One metric that a callback decides by: when it is new, and which value is better."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from minitrainer.checks import check_choice, check_number
from minitrainer.errors import MonitorError, SettingError

Mode = Literal["min", "max"]

_logger = logging.getLogger(__name__)


class Monitor:
    """Follow one metric through a run.

    A metric of the validation is new after each validation; any other one at the end of each epoch.
    Which of the two it is shows at the first validation: a value that appears or changes between
    its start and its end comes from there.

    Args:
        owner: The name of the callback, for messages.
        name: The metric, as it stands in `trainer.callback_metrics`.
        mode: Whether "min" or "max" is better.
        min_delta: By how much a value must be better to count as such.

    Raises:
        SettingError: An argument makes no sense.
    """

    def __init__(self, owner: str, name: str, mode: Mode, *, min_delta: float = 0.0) -> None:
        if not isinstance(name, str) or not name:
            raise SettingError(
                f"{owner} got monitor={name!r}.", fix="Give the name of a logged metric."
            )
        check_choice(owner, "mode", mode, ("min", "max"))
        check_number(owner, "min_delta", min_delta, at_least=0.0)
        self.name = name
        self.mode = mode
        self.is_of_validation = False
        self._owner = owner
        self._min_delta = min_delta
        self._before: float | None = None
        self._validated = False
        self._warned = False

    def validation_starts(self, metrics: Mapping[str, float]) -> None:
        """Remember the value from before a validation."""
        self._before = metrics.get(self.name)

    def validation_ends(self, metrics: Mapping[str, float]) -> None:
        """Notice whether the validation gave a new value."""
        self._validated = True
        value = metrics.get(self.name)
        if value is not None and not _same(value, self._before):
            self.is_of_validation = True

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether the value beats the best one; NaN and infinities never do."""
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        gain = best - value if self.mode == "min" else value - best
        return gain > self._min_delta

    def check_epoch_end(self, metrics: Mapping[str, float], epoch: int) -> bool:
        """Return whether the metric stands at the end of an epoch.

        Raises:
            MonitorError: It does not, although a validation has run.
        """
        if self.name in metrics:
            return True
        near = difflib.get_close_matches(self.name, metrics, 3, 0.5)
        logged = (
            f"Did you mean {' or '.join(near)}?"
            if near
            else (f"Logged so far: {', '.join(sorted(metrics)) or 'nothing'}.")
        )
        what = f"{self._owner} monitors {self.name!r}, which nobody had logged by the end of epoch "
        if self._validated:
            raise MonitorError(f"{what}{epoch}.", logged, "Log it, or monitor another metric.")
        if not self._warned:
            # The first validation may be due in a later epoch only.
            _logger.warning("[T03] %s%d. %s", what, epoch, logged)
            self._warned = True
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the metric."""
        return {"monitor": self.name, "mode": self.mode, "of_validation": self.is_of_validation}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> bool:
        """Take the state back; return false when it is that of another metric or mode."""
        if state_dict.get("monitor") != self.name or state_dict.get("mode") != self.mode:
            return False
        self.is_of_validation = bool(state_dict.get("of_validation"))
        return True


def _same(value: float, other: float | None) -> bool:
    return value == other or (other is not None and math.isnan(value) and math.isnan(other))
