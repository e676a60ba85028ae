"""What rank 0 does for all, and its failure as one error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minitrainer import dist
from minitrainer.errors import MinitrainerError, error_class


def on_rank_0(work: Callable[[], Any]) -> Any:
    """Do the work on rank 0 and return its result on every rank; collective.

    Args:
        work: Called on rank 0 only; what it returns is told to the others as JSON.

    Raises:
        MinitrainerError: The one that rank 0 raised, of the same class and with the same words.
    """
    told: dict[str, Any] = {}
    mine: MinitrainerError | None = None
    if dist.rank() == 0:
        try:
            told = {"result": work()}
        except MinitrainerError as error:
            mine = error
            told = {"code": error.code, "sentences": [error.what, error.why, error.fix]}
    told = dist.broadcast_object(told)
    if mine is not None:
        raise mine
    if "code" in told:
        raise error_class(told["code"])(*told["sentences"])
    return told["result"]
