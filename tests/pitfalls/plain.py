"""Plain torch, as a hand-written script uses it, for the halves of proofs in which it falls in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from minitrainer.pitfalls import match


@contextmanager
def plain_group(seconds: float = 20.0) -> Iterator[int]:
    """Hold a gloo group open as scripts do; yield the rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def failure_of(action: Callable[[], object]) -> str:
    """Return the message of the RuntimeError that the action raises, "" if it raises none."""
    try:
        action()
    except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors too
        return str(error)
    return ""


def codes(message: str) -> list[str]:
    """Return the codes of the entries that `explain` finds for a message."""
    return [entry.code for entry in match(message)]


class Weight(torch.nn.Module):
    """One scalar parameter w = 0; the output is the mean of w * x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).mean()


def wrapped_weight() -> tuple[Weight, DistributedDataParallel]:
    """Return the module and DDP around it."""
    module = Weight()
    return module, DistributedDataParallel(module)
