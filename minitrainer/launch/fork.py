"""What makes forking local ranks safe: thread pools, CUDA, and who dies with whom."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minitrainer.errors import ForkUnsafeError

_PR_SET_PDEATHSIG = 1
_OMP_PAUSE_SOFT = 1

# What torch says in a forked process that uses what its parent had used. Asking for the number of
# GPUs through torch.cuda.is_available() is enough for the first, a backward pass on a machine
# with GPUs for the second; neither can be seen beforehand without starting CUDA.
_POISONED = (
    "in forked subprocess",
    "in combination with fork-based multiprocessing",
    "CUDA error: initialization error",
)


def fork_problem(*, cuda_initialized: bool = False, message: str = "") -> ForkUnsafeError | None:
    """Return the error to raise when forked ranks cannot work, or None.

    Args:
        cuda_initialized: Whether the process to be forked has a CUDA context.
        message: What a forked rank raised.
    """
    # A loader worker that uses CUDA is another mistake, with its own message.
    poisoned = any(part in message for part in _POISONED) and "DataLoader worker" not in message
    if not cuda_initialized and not poisoned:
        return None
    return ForkUnsafeError(
        "This process has already used CUDA, and local ranks are forked from it.",
        "A forked process can use neither CUDA nor autograd's GPU threads of its parent.",
        "Start the run by `python -m minitrainer fit` or torchrun, or keep everything off the GPU "
        "(torch.cuda.is_available() too) before fit.",
    )


def pause_thread_pools() -> None:
    """End the OpenMP threads of this process; they come back at the next parallel operation.

    A forked process has libgomp's notes about its parent's threads but not the threads, and waits
    for them for ever at its first parallel operation. Measured with 4 threads, convolutions,
    matrix products and backward passes in the parent before and in 2 forked ranks after: without
    this call both hang every time, with it 20 of 20 runs are right. Leaving the ranks with one
    thread each would be safe too, but wastes cores.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    paths = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "gomp" in line}
    for path in paths:
        # There may be several copies, one in each wheel that brings its own.
        library = ctypes.CDLL(path)
        if hasattr(library, "omp_pause_resource_all"):
            library.omp_pause_resource_all(_OMP_PAUSE_SOFT)


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Keep what is garbage now from being collected in processes that are forked meanwhile.

    An object of torch's that joins a thread of its own when it is collected aborts in a forked
    process, which has no such thread ("std::system_error", seen once in a whole test run). Forked
    processes stay frozen; this one is as before afterwards.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def die_with(launcher: int) -> None:
    """Have the kernel end this process when the launcher, its parent, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # It died before the line above took effect.
        os._exit(1)
