"""The library's log lines: rank 0 informs, other ranks only warn, and say who they are."""

from __future__ import annotations

import logging

_NAME = "minitrainer"


class _RankFormatter(logging.Formatter):
    def __init__(self, rank: int, world_size: int) -> None:
        prefix = f"[rank {rank}/{world_size}] " if rank > 0 else ""
        super().__init__(f"{prefix}%(message)s")


def configure_logging(rank: int, world_size: int) -> None:
    """Set level and prefix of the library's logger for this rank.

    A handler is added only where the application has set up no logging of its own.
    """
    logger = logging.getLogger(_NAME)
    if not logger.handlers and not logging.getLogger().handlers:
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False
    for handler in logger.handlers:
        handler.setFormatter(_RankFormatter(rank, world_size))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
