"""Ctrl-C and preemption inside a rank: the loop ends at the next step instead of in its middle."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


class Interrupted(KeyboardInterrupt):
    """The run was told to stop by a signal and has stopped in good order.

    Args:
        received: The signal, SIGINT or SIGTERM.
        result: What the run would have returned, as far as it got; None when there is nothing.
    """

    def __init__(self, received: signal.Signals, result: Any = None) -> None:
        super().__init__(f"Stopped by {received.name}.")
        self.signal = received
        self.result = result


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a request that the loop looks at once per step.

    `received` is that first signal, None before. A second SIGINT raises KeyboardInterrupt at once.
    A handler of the user's own is called as well. Leaving the context puts all handlers back as
    they were. Outside the main thread, where Python allows no handlers, nothing is done.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Handler] = {}
        self._interrupts = 0
        self._owner = 0

    def __enter__(self) -> Self:
        self._owner = os.getpid()
        self._previous = install(self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        reinstall(self._previous)

    def raise_if_received(self) -> None:
        """Say how a run ended that a signal has stopped in good order.

        Raises:
            Interrupted: A signal was received.
        """
        if self.received is not None:
            raise Interrupted(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        got = signal.Signals(number)
        if os.getpid() != self._owner:
            # A loader worker, forked while the handlers were in place. Ctrl-C at a terminal reaches
            # it too, but its rank still needs its batches to finish the step.
            if got is signal.SIGTERM:
                signal.signal(got, signal.SIG_DFL)
                os.kill(os.getpid(), got)
            return
        if self.received is None:
            self.received = got
        call_own(self._previous[got], number, frame)
        if got is signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt


def install(handler: Handler) -> dict[signal.Signals, Handler]:
    """Install a handler for SIGINT and SIGTERM and return those that it replaces.

    Empty outside the main thread. A handler that was not installed from Python is left in place,
    because it could not be put back.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    stop = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in stop}
    previous = {number: old for number, old in previous.items() if old is not None}
    for number in previous:
        signal.signal(number, handler)
    return dict(previous)


def reinstall(previous: dict[signal.Signals, Handler]) -> None:
    """Put handlers back that `install` returned."""
    for number, handler in previous.items():
        signal.signal(number, handler)


def call_own(handler: Handler, number: int, frame: FrameType | None) -> None:
    """Call a handler that the user has installed; Python's own and numbers are not called."""
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, frame)
