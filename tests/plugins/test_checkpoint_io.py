"""CheckpointIO: the storage behind the protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minitrainer import protocols
from minitrainer.errors import (
    CheckpointContentError,
    CheckpointNotFoundError,
    CheckpointWriteError,
)
from minitrainer.plugins.checkpoint_io import CheckpointIO


def test_a_checkpoint_comes_back_and_goes(tmp_path: Path) -> None:
    """Case B79: what is written loads with weights_only=True."""
    path = tmp_path / "folder" / "a.ckpt"
    checkpoints: protocols.CheckpointIO = CheckpointIO()
    assert isinstance(checkpoints, protocols.CheckpointIO)
    assert not checkpoints.exists(path)
    checkpoints.save({"state_dict": {"w": torch.ones(2)}, "path": Path("x")}, path)
    assert checkpoints.exists(path)
    assert not checkpoints.exists(path.parent)
    assert torch.load(path, weights_only=True)["path"] == "x"
    assert torch.equal(checkpoints.load(path)["state_dict"]["w"], torch.ones(2))
    checkpoints.remove(path)
    checkpoints.remove(path)
    assert not checkpoints.exists(path)
    with pytest.raises(CheckpointNotFoundError):
        checkpoints.load(path)


def test_what_goes_wrong_is_ours(tmp_path: Path) -> None:
    checkpoints = CheckpointIO()
    with pytest.raises(CheckpointContentError):
        checkpoints.save({"a": object()}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointWriteError, match="could not be written"):
        checkpoints.save({"a": 1}, tmp_path)
    with pytest.raises(CheckpointWriteError, match="could not be deleted"):
        checkpoints.remove(tmp_path)
