"""torch._dynamo stays away while nothing is compiled, and is the real one when it is wanted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_FIT = """
import sys
import torch
from torch.utils.data import DataLoader
import minitrainer as mt

class Toy(mt.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("imported", float("torch._dynamo.eval_frame" in sys.modules))
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

if __name__ == "__main__":
    loader = DataLoader(torch.ones(4, 2), batch_size=1)
    trainer = mt.Trainer(max_epochs=1, devices=int(sys.argv[1]), accelerator="cpu", dry_run=True)
    trainer.fit(Toy(), loader, loader)
    assert trainer.callback_metrics["imported"] == 0.0, "a rank has imported it"
    assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
    assert not [f for f in sys.meta_path if type(f).__module__.startswith("minitrainer")]
    print("done")
"""

_BEHIND = """
import sys
import torch
from minitrainer import dynamo

parameter = torch.nn.Parameter(torch.ones(1))
untouched = torch.optim.Optimizer.zero_grad.__wrapped__

def steps():
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.zero_grad()
    parameter.sum().backward()
    optimizer.step()

with dynamo.deferred():
    steps()
    stand_in = torch._dynamo
    assert stand_in is sys.modules["torch._dynamo"] and not hasattr(type(stand_in), "compile")
    assert "__dynamo_disable" in vars(untouched)
    assumed = torch._dynamo.utils.get_optimize_ddp_mode()
    {touch}
    real = sys.modules["torch._dynamo"]
    assert real is not stand_in and torch._dynamo is real and real.__file__
    assert sys.modules["torch._dynamo.config"] is real.config
    # What asked the stand-in asks again, and what was kept of it goes on to the real one.
    assert "__dynamo_disable" not in vars(untouched)
    steps()
    assert vars(untouched)["__dynamo_disable"] is not untouched
    assert stand_in.utils.counters is real.utils.counters
    assert stand_in.explain is real.explain
    assert stand_in.disable(steps, wrapping=False) is not steps
    assert assumed == real.utils.get_optimize_ddp_mode()
assert sys.modules["torch._dynamo"] is real
with dynamo.deferred():
    assert sys.modules["torch._dynamo"] is real
print("done")
"""


def _run(script: str, *arguments: str, folder: Path) -> None:
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("done\n")


@pytest.mark.parametrize("num_ranks", ["1", "2"])
def test_a_run_without_a_compiler_does_not_import_it(num_ranks: str, tmp_path: Path) -> None:
    _run(_FIT, num_ranks, folder=tmp_path)


@pytest.mark.parametrize(
    "touch",
    [
        "assert torch.compile(lambda x: x + 1, backend='eager')(parameter).item() > 1",
        "import torch._dynamo.config; torch._dynamo.config.cache_size_limit",
        "torch.compiler.disable(steps)",
    ],
)
def test_whoever_wants_it_gets_the_real_one(touch: str, tmp_path: Path) -> None:
    touch = touch.replace(".item() > 1", ".item() > 1")
    _run(_BEHIND.replace("{touch}", touch), folder=tmp_path)
