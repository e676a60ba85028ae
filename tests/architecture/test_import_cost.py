"""Importing everything public costs torch, omegaconf and tqdm, and no more."""

from __future__ import annotations

import subprocess
import sys

# Each of these costs tenths of a second, some more than a second.
COSTLY = (
    *("torchvision", "torch._dynamo", "torch._inductor", "sympy"),
    *("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher"),
    *("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor"),
    *("torch.utils.tensorboard", "torch.distributed.algorithms", "pandas", "matplotlib"),
)


def test_importing_all_public_names_imports_nothing_costly() -> None:
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from minitrainer import *\n"
        "assert Trainer and Module\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    added = run.stdout.split()
    assert "minitrainer.trainer" in added
    costly = [name for name in added if name.startswith(COSTLY)]
    assert not costly
