"""How the ranks tell the launcher what became of them: one small file each."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import Signals
from typing import Literal

from minitrainer.errors import MinitrainerError, RankFailedError, RecipeError, error_class

# What gloo and NCCL say to a rank whose peer is gone.
_PEER_GONE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|caused pair closure"
    r"|NCCL communicator was aborted|ncclRemoteError|remote process exited"
)


@dataclass(frozen=True)
class Report:
    """The end of one rank in its own words.

    `state` is "done", "stopped" (told to by a signal, and left in good order) or "failed".
    `arguments` build the error again when it was one of ours, with this catalogue `code`.
    `consequence` tells that the rank only noticed the death of another one. `trace` does not
    repeat what `text` says. `time` is of the clock that all processes of a machine share.
    """

    rank: int
    state: Literal["done", "stopped", "failed"]
    time: float = field(default_factory=time.monotonic)
    signal: int | None = None
    code: str | None = None
    arguments: Sequence[str] = ()
    text: str = ""
    trace: str = ""
    consequence: bool = False

    def error(self) -> MinitrainerError:
        """Return what to raise in the launcher."""
        failed = RankFailedError(f"Rank {self.rank} raised {self.text}.", self.trace)
        if self.code is None:
            return failed
        error = error_class(self.code)(*self.arguments)
        # A usage error says all by itself; of another one, the place in the rank matters too.
        error.__cause__ = failed if error.exit_code == 1 else None
        error.__suppress_context__ = True
        return error


def failure(error: BaseException, rank: int) -> Report:
    """Describe an exception that ended a rank."""
    lines = str(error).splitlines() or [""]
    name = type(error).__qualname__
    frames = error.__traceback__
    while frames and Path(frames.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        # Our own frames, which lead to the user's function.
        frames = frames.tb_next
    parts = traceback.format_exception(type(error), error, frames)
    said = traceback.format_exception_only(error)
    if len(lines) == len(said) == 1:
        parts = parts[: -len(said)]
    arguments: Sequence[str] = ()
    if isinstance(error, RecipeError):
        arguments = error.problems
    elif isinstance(error, MinitrainerError):
        arguments = (error.what, error.why, error.fix)
    return Report(
        rank,
        "failed",
        signal=Signals.SIGINT if isinstance(error, KeyboardInterrupt) else None,
        code=error.code if isinstance(error, MinitrainerError) else None,
        arguments=arguments,
        text=f"{name}: {lines[0]}".rstrip(" :."),
        trace="".join(parts).rstrip(),
        consequence=_is_consequence(error),
    )


def write_report(report: Report, directory: Path) -> None:
    """Write the report: whole, or not at all."""
    path = _path(directory, report.rank)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(report)))
    temporary.replace(path)


def read_report(directory: Path, rank: int) -> Report | None:
    """Return the report of a rank, None when it has not written any."""
    path = _path(directory, rank)
    return Report(**json.loads(path.read_text())) if path.exists() else None


def died(rank: int, exit_code: int) -> RankFailedError:
    """Return the error for a rank that ended without a word.

    Args:
        rank: The rank.
        exit_code: Its exit code, or minus the number of the signal that killed it.
    """
    if exit_code >= 0:
        return RankFailedError(
            f"Rank {rank} left with exit code {exit_code}.",
            "Something in it ended the process before the run was over.",
            "Look for os._exit in the code that it runs.",
        )
    if exit_code == -Signals.SIGKILL:
        return RankFailedError(
            f"Rank {rank} was killed by SIGKILL.",
            "When nobody did it by hand, the machine was out of memory.",
            "Look into the kernel's log; smaller batches and fewer loader workers need less.",
        )
    return RankFailedError(
        f"Rank {rank} was killed by {_signal_name(-exit_code)}.",
        "It had no time to say why.",
        "If native code crashed, the Python frames where it did are on stderr.",
    )


def first_cause(
    failures: Sequence[Report], death: RankFailedError | None, death_time: float
) -> MinitrainerError:
    """Return the error that made the others happen: the earliest that blames no peer.

    Args:
        failures: Reports of ranks that failed.
        death: The error for a rank that ended without a report, if there is one.
        death_time: When that was noticed, by the clock of the reports.
    """
    found: list[tuple[bool, float, Report | None]] = [
        (report.consequence, report.time, report) for report in failures
    ]
    if death is not None:
        found.append((False, death_time, None))
    report = min(found, key=lambda cause: cause[:2])[2]
    if report is not None:
        return report.error()
    assert death is not None
    return death


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.json"


def _is_consequence(error: BaseException) -> bool:
    # Of a chain, the first link counts: whatever was raised while it was being handled.
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)) is not None


def _signal_name(number: int) -> str:
    known = {signal.value: signal.name for signal in Signals}
    return known.get(number, f"signal {number}")
