"""Which checkpoint a run goes on from, and how every rank gets the same one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minitrainer import dist, storage
from minitrainer.agreed import on_rank_0
from minitrainer.errors import CheckpointNotFoundError, CheckpointUnreadableError
from minitrainer.protocols import CheckpointIO
from minitrainer.rundir import CHECKPOINTS

WORDS = ("auto", "last", "best")
LAST = "last.ckpt"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """What to load, as the user asked for it.

    Attributes:
        what: The absolute path of a checkpoint, or one of `WORDS`.
        folders: Where a word is looked up; the checkpoints of one run.
        best: The best checkpoint as a callback of this trainer knows it, "" if none does.
    """

    what: Path | str
    folders: tuple[Path, ...] = ()
    best: str = ""

    @property
    def starts_anew(self) -> bool:
        """Whether to start from nothing when there is no checkpoint."""
        return self.what == "auto"


def find(wish: Wish | None, checkpoint_io: CheckpointIO) -> Path | None:
    """Return the path of the checkpoint, the same on all ranks; collective.

    `auto` takes the newest one that is whole, and says which ones it skipped; None if there is
    none. `last` takes `last.ckpt`, `best` the best one that the run knew of.

    Raises:
        CheckpointNotFoundError: There is none of that kind.
        CheckpointUnreadableError: It is broken, and it was asked for by name.
    """
    if wish is None:
        return None
    if isinstance(wish.what, Path):
        return wish.what
    kind = {"auto": _newest_whole, "last": _last, "best": _best}[wish.what]
    found = on_rank_0(lambda: str(kind(wish, checkpoint_io) or ""))
    return Path(found) if found else None


def find_some(wish: Wish, checkpoint_io: CheckpointIO) -> Path:
    """Return the path of the checkpoint where there is nothing to start anew; collective.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointUnreadableError: It is broken, and it was asked for by name.
    """
    path = find(wish, checkpoint_io)
    if path is None:
        raise _none_found(wish, "There is no whole checkpoint")
    return path


def read(path: Path, checkpoint_io: CheckpointIO) -> dict[str, Any]:
    """Return the checkpoint, the same on all ranks, on the CPU; collective.

    Each rank reads the file by itself, unless what it sees at the path is not what rank 0 sees
    there: then it gets rank 0's. That is so where machines have disks of their own.

    Raises:
        CheckpointUnreadableError: It is not a whole checkpoint, or would run code.
    """
    seen = dist.gather_objects(_sight(path))
    same = [sight == seen[0] for sight in seen]
    checkpoint = checkpoint_io.load(path) if same[dist.rank()] else {}
    if not all(same):
        payload = storage.dumps(checkpoint) if dist.rank() == 0 else b""
        payload = dist.broadcast_bytes(payload)
        if not same[dist.rank()]:
            checkpoint = storage.loads(payload)
    return checkpoint


def folders_of(run_dir: Path | None, default: Path, others: Sequence[Path]) -> tuple[Path, ...]:
    """Return the folders in which the checkpoints of a run are.

    Args:
        run_dir: The directory of the run; without one, the newest of those that this trainer would
            have made itself is taken.
        default: What these are named after: NAME of `NAME-TIME`.
        others: Folders that callbacks save into besides.
    """
    if run_dir is None:
        runs = [path.parent for path in default.parent.glob(f"{default.name}-*/{CHECKPOINTS}")]
        # By what they hold: a run that has been resumed is newer than its name.
        run_dir = max(runs, key=lambda run: _newest_time(run / CHECKPOINTS), default=None)
    return (*(() if run_dir is None else (run_dir / CHECKPOINTS,)), *others)


def _newest_whole(wish: Wish, checkpoint_io: CheckpointIO) -> Path | None:
    for path in _files(wish.folders):
        try:
            checkpoint_io.verify(path)
        except (CheckpointUnreadableError, CheckpointNotFoundError) as error:
            _logger.warning("[C27] %s is skipped: %s", path, error.what)
        else:
            _logger.info("%-14s %s", "goes on from", path)
            return path
    where = ", ".join(map(str, wish.folders)) or "any run"
    _logger.info("No whole checkpoint in %s: the run starts from nothing.", where)
    return None


def _last(wish: Wish, checkpoint_io: CheckpointIO) -> Path:
    for path in _files(wish.folders):
        if path.name == LAST:
            checkpoint_io.verify(path)
            return path
    raise _none_found(wish, f"There is no {LAST}")


def _best(wish: Wish, checkpoint_io: CheckpointIO) -> Path:
    best = wish.best or next(filter(None, (_best_of(path) for path in _files(wish.folders))), "")
    if not best:
        raise _none_found(wish, "No checkpoint tells which one is the best")
    checkpoint_io.verify(Path(best))
    return Path(best)


def _best_of(path: Path) -> str:
    """Return what the run that wrote this checkpoint took for the best one, "" if nothing."""
    states = storage.read_checkpoint(path).get("callbacks", {})
    for state in states.values():
        if isinstance(state, dict) and state.get("best"):
            return str(path.parent / state["best"])
    return ""


def _files(folders: Sequence[Path]) -> list[Path]:
    """Return the checkpoints in the folders, the newest first."""
    found = {path for folder in folders for path in folder.glob("*.ckpt") if path.is_file()}
    # At one time, `last.ckpt` first: it is the one that is there in each case.
    return sorted(found, key=lambda path: (_time(path), path.name == LAST), reverse=True)


def _newest_time(folder: Path) -> int:
    return max((_time(path) for path in folder.glob("*.ckpt")), default=0)


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _sight(path: Path) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _none_found(wish: Wish, what: str) -> CheckpointNotFoundError:
    where = ", ".join(map(str, wish.folders)) or "any run"
    return CheckpointNotFoundError(
        f"{what} in {where}.",
        fix="Give the path of a checkpoint, or --resume auto to start anew where there is none.",
    )
