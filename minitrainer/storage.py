"""The only file that calls torch.save and torch.load.

A file is whole or absent: it is written under a temporary name, flushed to the disk and renamed.
It holds tensors and plain containers only, so that reading it never runs code.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import io
import os
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from minitrainer.errors import (
    CheckpointNotFoundError,
    CheckpointUnreadableError,
    CheckpointWriteError,
)
from minitrainer.plain import plain

__all__ = [
    "dumps",
    "loads",
    "plain",
    "read_checkpoint",
    "read_file",
    "remove_file",
    "write_file",
]

# What the readers of torch and zipfile raise on damaged files (each was seen, one flipped bit
# each): their own errors and whatever the damaged bytes happen to do to Python.
_READ_ERRORS = (
    *(RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, struct.error, EOFError, OSError),
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError),
    MemoryError,
)

# A whole path has been through Path() perhaps, which leaves one slash of two.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}[^/]")
_TEMPORARY = re.compile(r"\..+\.tmp\d+")


# Writing ---------------------------------------------------------------------------------------


def write_file(content: Any, path: Path) -> None:
    """Write the content, made plain, to the path: whole, or not at all.

    The file is written beside the path under a name like `.last.ckpt.tmp4711`, flushed to the disk
    and renamed. Whatever happens before that, the file that was there before stays. Temporary
    files that a killed process left in the folder are removed.

    Args:
        content: Tensors and containers; `plain` is applied to them.
        path: Where to write; the folder is made if need be.

    Raises:
        CheckpointContentError: Something in the content has no plain form.
        CheckpointWriteError: The file could not be written.
    """
    content = plain(content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_strays(path.parent)
        temporary = path.parent / f".{path.name}.tmp{os.getpid()}"
        try:
            with temporary.open("wb") as file:
                _lock(file.fileno())
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        raise _write_error(path, error) from error


def remove_file(path: Path) -> None:
    """Delete the file if it is there.

    Raises:
        CheckpointWriteError: It is there and cannot be deleted.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointWriteError(
            f"{path} could not be deleted: {error.strerror}.",
            "It makes room for a newer checkpoint.",
            "Make the folder writable.",
        ) from error


def dumps(value: Any) -> bytes:
    """Return the value, made plain, as bytes for `loads` on another rank.

    Raises:
        CheckpointContentError: Something in it has no plain form.
    """
    buffer = io.BytesIO()
    torch.save(plain(value), buffer)
    return buffer.getvalue()


def _lock(descriptor: int) -> None:
    # Marks the file as being written: the kernel lets go of the lock when the process dies.
    # Some network file systems have no locks; there, strays stay.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_strays(folder: Path) -> None:
    for path in folder.glob(".*.tmp*"):
        if _TEMPORARY.fullmatch(path.name):
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _sync_folder(folder: Path) -> None:
    # Makes the new name survive a power cut. The file stands already: a file system that cannot
    # do this is no reason to fail.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_error(path: Path, error: BaseException) -> CheckpointWriteError:
    # torch's writer hides the error of the file behind one about its own position.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    full = cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = cause.strerror if cause is not None and cause.strerror else _one_line(error)
    return CheckpointWriteError(
        f"{path} could not be written: {reason}.",
        "The file that was there before, if any, is untouched.",
        "Free space on the disk, or choose another folder."
        if full
        else "Make the folder writable, or choose another one.",
    )


# Reading ---------------------------------------------------------------------------------------


def read_file(path: Path, *, mmap: bool = False) -> Any:
    """Read what `write_file` (or `torch.save`) wrote, onto the CPU, without running any code.

    The checksums in the file are verified first, because torch does not: a flipped bit would go
    into the weights unnoticed. That costs about half of the reading itself. (The old format, from
    before torch 1.6, has none.)

    Args:
        path: A local file.
        mmap: Leave the tensors on the disk until they are used, and do not verify checksums:
            opening takes about a millisecond whatever the size.

    Raises:
        CheckpointNotFoundError: There is no such file, or the path is an address.
        CheckpointUnreadableError: It is not a whole file of torch's, or would run code.
    """
    path = Path(path)
    if not os.path.isfile(path):  # unlike the method of Path, false for any odd path
        raise _not_a_file(path)
    with _as_unreadable(path):
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        if is_zip and not mmap:
            _verify(path)
        with warnings.catch_warnings():
            # Garbage gets warnings about its supposed pickle protocol on the way to its error.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint: one of ours, one of Lightning's, or a bare state_dict.

    A bare state_dict comes back as `{"state_dict": ...}`; Lightning's `hyper_parameters` come back
    as `hyperparameters`.

    Raises:
        CheckpointNotFoundError: There is no such file, or the path is an address.
        CheckpointUnreadableError: It is not a whole checkpoint, or would run code.
    """
    content = read_file(path)
    if not isinstance(content, Mapping):
        raise CheckpointUnreadableError(
            f"{path} holds a {type(content).__name__}.",
            "A checkpoint is a dictionary.",
            "Give the path of a checkpoint, or of a saved state_dict.",
        )
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return {"state_dict": content}
    checkpoint = dict(content)
    if "hyper_parameters" in checkpoint:
        checkpoint.setdefault("hyperparameters", checkpoint.pop("hyper_parameters"))
    return checkpoint


def loads(content: bytes) -> Any:
    """Return what `dumps` was given, on the CPU; runs no code."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _not_a_file(path: Path) -> CheckpointNotFoundError | CheckpointUnreadableError:
    if os.path.exists(path):
        kind = "a folder" if os.path.isdir(path) else "not a regular file"
        return CheckpointUnreadableError(
            f"{path} is {kind}.", "A checkpoint is one file.", "Give the path of the file."
        )
    if _ADDRESS.match(str(path)):
        return CheckpointNotFoundError(
            f"{path} is an address, not a file.",
            "Nothing is fetched over the network.",
            "Download the file first and give its local path.",
        )
    folder = path.parent
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    why = f"There is no such folder; {folder.absolute()} is the last part that exists."
    if folder == path.parent:
        with suppress(OSError):
            names = [name for name in os.listdir(folder) if not name.startswith(".")]
            near = difflib.get_close_matches(path.name, names, 1, 0.5)
            why = f"The nearest name in its folder is {near[0]}." if near else "No name is near it."
    return CheckpointNotFoundError(f"{path} does not exist.", why, "Correct the path.")


def _verify(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            # torch stores its records uncompressed, and reads one that a flipped bit marks as a
            # folder (0x10) as zeros.
            if record.compress_type != zipfile.ZIP_STORED or record.external_attr & 0x10:
                raise zipfile.BadZipFile(f"{record.filename} is not a stored record")
        name = archive.testzip()
    if name is not None:
        raise zipfile.BadZipFile(f"the checksum of {name} is wrong")


@contextmanager
def _as_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise CheckpointUnreadableError(
            f"{path} may not be read by this user.", fix="Change its permissions."
        ) from error
    except _READ_ERRORS as error:
        names = _unsafe_globals(path, error)
        if names:
            raise CheckpointUnreadableError(
                f"{path} refers to {', '.join(names)}.",
                "Loading that would run code from the file, so nothing of it was loaded.",
                "Save tensors and plain containers only; if you trust the file, load it with "
                "torch.load(path, weights_only=False) once and save its state_dict alone.",
            ) from None
        raise CheckpointUnreadableError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as a checkpoint: "
            f"{type(error).__name__}: {_one_line(error)}.",
            "It is cut off, damaged, or not a checkpoint at all.",
            "Use another checkpoint of the run.",
        ) from error


def _unsafe_globals(path: Path, error: BaseException) -> list[str]:
    if not isinstance(error, pickle.UnpicklingError):
        return []
    with suppress(*_READ_ERRORS):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if names:
            return sorted(names)
    # The old format of torch.save cannot be looked through; the message names the first one.
    return re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]


def _one_line(error: BaseException) -> str:
    first = " ".join(str(error).split()).split(". ")[0] or "no further word"
    return first[:160].rstrip(" .")
