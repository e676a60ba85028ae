"""Where checkpoints are kept: one file each, in a folder.

Pitfall: a run killed while it saves leaves a truncated file in place of the last good one, and a
file from elsewhere runs code when it is loaded.
Fix: a file is written beside its place, flushed and renamed, so it is whole or absent; it holds
plain values only, and reading accepts nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minitrainer import storage


class CheckpointIO:
    """Keep checkpoints as files on a local or shared file system."""

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write the checkpoint: whole, or not at all. Called on rank 0 only.

        Raises:
            CheckpointContentError: It holds something that has no plain form.
            CheckpointWriteError: The disk is full, the folder cannot be written, and so on.
        """
        storage.write_file(checkpoint, path)

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint, a bare state_dict or a Lightning file onto the CPU.

        Raises:
            CheckpointNotFoundError: There is no such file.
            CheckpointUnreadableError: It is not a whole checkpoint, or would run code.
        """
        return storage.read_checkpoint(path)

    def verify(self, path: Path) -> None:
        """Read the whole file and check it.

        Raises:
            CheckpointNotFoundError: There is no such file.
            CheckpointUnreadableError: It is not a whole checkpoint, or would run code.
        """
        storage.read_checkpoint(path)

    def remove(self, path: Path) -> None:
        """Delete the file if it is there. Called on rank 0 only.

        Raises:
            CheckpointWriteError: It cannot be deleted.
        """
        storage.remove_file(path)

    def exists(self, path: Path) -> bool:
        """Return whether there is a file at the path."""
        return path.is_file()
