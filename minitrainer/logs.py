"""The library's log lines, and everybody's warnings, from several ranks to one terminal.

Rank 0 informs, the others only warn and say who they are. What several ranks warn of is shown
once, by the rank that says it first.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_NAME = "minitrainer"


@contextmanager
def rank_logging(rank: int, world_size: int, first_to_say: Callable[[str], bool]) -> Iterator[None]:
    """Set up the library's logger and Python's warnings for this rank; undo it at the end.

    A handler is added only where the application has set up no logging of its own.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        first_to_say: Returns whether no rank has said this text before.
    """
    logger = logging.getLogger(_NAME)
    level, propagate = logger.level, logger.propagate
    handler: logging.Handler | None = None
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{_prefix(rank, world_size)}%(message)s"))
        handler.addFilter(_Once(first_to_say))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    try:
        if world_size == 1:
            yield
        else:
            with _warnings_once(_prefix(rank, world_size), first_to_say):
                yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        if handler is not None:
            logger.removeHandler(handler)


class _Once(logging.Filter):
    """Lets a warning pass that no rank has given before; errors and information always."""

    def __init__(self, first_to_say: Callable[[str], bool]) -> None:
        super().__init__()
        self._first_to_say = first_to_say
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        if text in self._said:
            return False
        self._said.add(text)
        return self._first_to_say(text)


@contextmanager
def _warnings_once(prefix: str, first_to_say: Callable[[str], bool]) -> Iterator[None]:
    show = warnings.showwarning

    def show_once(  # noqa: PLR0917 - the signature is Python's
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if first_to_say(f"{category.__name__}: {message}"):
            if prefix:
                (file or sys.stderr).write(prefix)
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_once
    try:
        yield
    finally:
        warnings.showwarning = show


def _prefix(rank: int, world_size: int) -> str:
    return f"[rank {rank}/{world_size}] " if rank > 0 else ""
