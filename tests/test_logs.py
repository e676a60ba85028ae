"""Log lines and warnings of several ranks: once, and with a name where it matters."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from typing import Any

import torch

from minitrainer import dist
from minitrainer.logs import rank_logging
from tests.ranks import run_ranks


def said_by(world_size: int) -> list[list[str]]:
    """Return what each rank writes to stderr when all warn of the same and rank 1 of more."""

    def rank() -> list[str]:
        number = int(os.environ["RANK"])
        sys.stderr = io.StringIO()
        _bare_loggers()
        warnings.showwarning = _write  # pytest keeps warnings to itself
        with (
            dist.process_group(torch.device("cpu"), num_ranks=world_size, timeout=20),
            rank_logging(number, world_size, dist.first_to_say),
        ):
            logger = logging.getLogger("minitrainer.some.part")
            logger.info("for information")
            for _ in range(2):
                logger.warning("the same for all")
                warnings.warn("python's own", stacklevel=1)
            if number == 1:
                logger.warning("only here")
            dist.barrier()
        return sys.stderr.getvalue().splitlines()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        return run_ranks(rank, world_size)


def _bare_loggers() -> None:
    """Take off what pytest and other tests have put on, so that ours is added."""
    logging.getLogger().handlers.clear()
    logging.getLogger("minitrainer").handlers.clear()


def _write(message: Warning | str, *rest: Any, **settings: Any) -> None:
    sys.stderr.write(f"{message}\n")


def test_a_warning_of_all_ranks_is_shown_once() -> None:
    lines = [line for rank in said_by(3) for line in rank]
    assert sum("the same for all" in line for line in lines) == 1
    assert sum("python's own" in line for line in lines) == 1
    assert "[rank 1/3] only here" in lines
    assert [line for line in lines if "for information" in line] == ["for information"]


def test_everything_is_undone() -> None:
    logger = logging.getLogger("minitrainer")
    before = logger.level, logger.propagate, list(logger.handlers), warnings.showwarning
    with rank_logging(1, 2, lambda text: True):
        assert logger.level == logging.WARNING
        assert warnings.showwarning is not before[3]
    assert (logger.level, logger.propagate, logger.handlers, warnings.showwarning) == before


def test_an_application_with_handlers_of_its_own_keeps_them() -> None:
    own = logging.NullHandler()
    logging.getLogger().addHandler(own)
    before = list(logging.getLogger("minitrainer").handlers)
    try:
        with rank_logging(0, 1, lambda text: True):
            assert logging.getLogger("minitrainer").handlers == before
    finally:
        logging.getLogger().removeHandler(own)
