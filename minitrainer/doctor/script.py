"""The examination of a hand-written DDP script; nothing of it is run."""

from __future__ import annotations

import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from minitrainer.doctor.checks import data, launching, leftovers, saving, stepping, sync
from minitrainer.doctor.finding import Finding
from minitrainer.doctor.reading.script import Script
from minitrainer.errors import CommandError

CHECKS: tuple[Callable[[Script], Iterator[Finding]], ...] = (
    launching.local_rank_argument,
    launching.init_before_set_device,
    launching.no_destroy,
    launching.data_parallel,
    launching.environment_variables,
    data.missing_set_epoch,
    data.late_set_epoch,
    data.shuffle_and_sampler,
    data.padded_validation,
    data.divisible_length,
    stepping.missing_no_sync,
    stepping.undivided_loss,
    stepping.double_step,
    stepping.clip_before_unscale,
    stepping.missing_update,
    stepping.kept_graph,
    sync.lonely_collective,
    sync.past_the_wrapper,
    sync.late_sync_batch_norm,
    saving.saving_on_every_rank,
    saving.module_prefix,
    saving.load_without_map_location,
    leftovers.emptied_cache,
    leftovers.deprecated_amp,
)


def examine_file(path: Path) -> list[Finding]:
    """Return the pitfalls that the script in a file walks into, in the order of its lines.

    Raises:
        CommandError: The file cannot be read, or is not Python.
    """
    try:
        with tokenize.open(path) as file:  # in the encoding that the script declares
            text = file.read()
        return examine(str(path), text)
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist.", fix="Give the path of a script.") from None
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from None
    except SyntaxError as error:
        where = f" in line {error.lineno}" if error.lineno else ""
        raise CommandError(
            f"{path} is not Python: {error.msg}{where}.", fix="Give the path of a script."
        ) from None
    except ValueError as error:  # a wrong encoding among others
        raise CommandError(f"{path} is not Python: {error}.") from None
    except (RecursionError, MemoryError):  # the second is how Python's parser says it
        raise CommandError(f"{path} is nested too deeply to be read.") from None


def examine(name: str, text: str) -> list[Finding]:
    """Return the pitfalls that a script walks into, in the order of its lines.

    Args:
        name: What the findings call it.
        text: What it says.

    Raises:
        SyntaxError: It is not Python.
        ValueError: It holds null bytes.
    """
    script = Script(name, text)
    # A function that is called twice is gone through twice.
    found = dict.fromkeys(finding for check in CHECKS for finding in check(script))
    return sorted(found, key=lambda finding: int(finding.place.rpartition(":")[2]))
