"""Every test starts alike: in a folder of its own, seeded, with one thread.

The limit of each test is pytest-timeout's, see setup.cfg.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

# Before torch is imported anywhere: its thread pools read it once.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
import torch._dynamo  # by every rank's first optimizer otherwise, each time anew

REPOSITORY = Path(__file__).resolve().parent.parent

# What the launcher of the tests itself may have left; a test that wants one of these sets it.
_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)


@pytest.fixture(autouse=True)
def _start_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [*_LAUNCHER_VARIABLES, *(n for n in os.environ if n.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)
    # Processes that a test starts find the package from any folder, installed or not.
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), *([path] if path else [])]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def repository() -> Path:
    """Return the root of the working tree."""
    return REPOSITORY
