"""`auto`, `last` and `best`: which checkpoint a run goes on from, the same on all ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import minitrainer as mt
from minitrainer.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
)
from tests.ranks import run_ranks
from tests.toys import Idx, Lin, loader, quiet


class Scored(Lin):
    """Validates to the numbers given, one per epoch."""

    def __init__(self, *scores: float) -> None:
        super().__init__(lr=0.01)
        self.scores = scores

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("score", self.scores[self.current_epoch])


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage()[:5] for r in caplog.records if r.levelno >= logging.WARNING]


def fit(module: Lin, epochs: int, **settings: Any) -> mt.Trainer:
    ckpt_path = settings.pop("ckpt_path", "auto")
    keep = mt.ModelCheckpoint(every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    trainer = quiet(max_epochs=epochs, **{"run_dir": "run", "callbacks": [keep], **settings})
    trainer.fit(module, loader(range(1, 9), batch_size=2, shuffle=True), ckpt_path=ckpt_path)
    return trainer


def test_auto_starts_anew_and_then_goes_on_in_the_same_folder() -> None:
    whole, first, second = Idx(0.01), Idx(0.01), Idx(0.01)
    fit(whole, 3, run_dir="whole")
    trainer = fit(first, 1)
    assert trainer.run_dir == Path("run").absolute()
    trainer = fit(second, 3)
    assert trainer.run_dir == Path("run").absolute()
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.w, whole.w)
    assert [path.name for path in Path().iterdir() if path.name.startswith("run")] == ["run"]


def test_auto_skips_broken_ones_loudly(caplog: pytest.LogCaptureFixture) -> None:
    fit(Lin(0.01), 3)
    for name in ("last.ckpt", "2.ckpt"):
        path = Path("run/checkpoints", name)
        path.write_bytes(path.read_bytes()[:-100])
    module = Idx(0.01)
    with caplog.at_level(logging.INFO, "minitrainer"):
        fit(module, 3)
    assert {entry[0] for entry in module.seen} == {2}
    skipped = [record.getMessage() for record in caplog.records if "[C27]" in record.getMessage()]
    assert len(skipped) == 2
    assert all(any(name in text for text in skipped) for name in ("last.ckpt", "2.ckpt"))
    assert any("goes on from" in text and "1.ckpt" in text for text in caplog.messages)


def test_auto_starts_anew_in_the_folder_where_none_is_whole() -> None:
    fit(Lin(0.01), 1)
    for path in Path("run/checkpoints").glob("*.ckpt"):
        path.write_bytes(b"")
    module = Idx(0.01)
    trainer = fit(module, 1)
    assert trainer.run_dir == Path("run").absolute()
    assert module.seen[0][:2] == (0, 0)
    fit(Lin(0.01), 2, ckpt_path="last")


def test_without_a_run_directory_the_newest_run_of_the_name_is_taken() -> None:
    default = {"run_dir": None, "enable_checkpointing": True}
    older = fit(Lin(0.01), 1, ckpt_path=None, **default).run_dir
    newer = fit(Lin(0.01), 2, ckpt_path=None, **default).run_dir
    assert older is not None
    assert newer is not None
    assert older != newer
    module = Idx(0.01)
    trainer = fit(module, 3, **default)
    assert trainer.run_dir == newer
    assert {entry[0] for entry in module.seen} == {2}
    # What counts is what they hold, not what they are called.
    for path in (older / "checkpoints").iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 60))
    assert fit(Lin(0.01), 3, **default).run_dir == older


def test_last_and_best_are_those_of_the_run() -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no last\.ckpt"):
        fit(Lin(0.01), 1, ckpt_path="last")
    with pytest.raises(CheckpointNotFoundError, match="best"):
        fit(Lin(0.01), 1, ckpt_path="best")
    keep = mt.ModelCheckpoint(monitor="score", save_top_k=-1, filename="{epoch}")
    data = loader(range(4))
    trainer = quiet(max_epochs=3, run_dir="run", callbacks=[keep])
    trainer.fit(Scored(3.0, 1.0, 2.0), data, data)
    for again in (trainer, quiet(run_dir="run")):
        assert again.validate(Scored(7.0, 8.0), data, ckpt_path="best") == {"score": 7.0}
    module = Lin(0.01)
    fit(module, 0, ckpt_path="best", callbacks=[])
    best = torch.load("run/checkpoints/1.ckpt", weights_only=True)
    assert torch.equal(module.w.detach(), best["state_dict"]["w"])
    fit(module, 0, ckpt_path="last", callbacks=[])
    last = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    assert torch.equal(module.w.detach(), last["state_dict"]["w"])


def test_a_broken_one_that_was_asked_for_is_an_error() -> None:
    fit(Lin(0.01), 1)
    Path("run/checkpoints/last.ckpt").write_bytes(b"PK\x03\x04")
    for asked in ("last", "run/checkpoints/last.ckpt"):
        with pytest.raises(CheckpointUnreadableError, match=r"last\.ckpt"):
            fit(Lin(0.01), 2, ckpt_path=asked)


def test_an_evaluation_has_nothing_to_start_anew() -> None:
    with pytest.raises(CheckpointNotFoundError):
        quiet(run_dir="run").validate(Scored(1.0), loader(range(4)), ckpt_path="auto")


def test_ranks_that_do_not_see_the_file_get_it_from_rank_0(tmp_path: Path) -> None:
    """Case B85: rank 1 is on another machine, with a disk of its own."""

    def both() -> list[Any]:
        here = tmp_path / os.environ["RANK"]
        here.mkdir(exist_ok=True)
        os.chdir(here)
        first = fit(Momentum(), 1, ckpt_path=None)
        assert first.is_global_zero == Path("run/checkpoints/last.ckpt").exists()
        if not first.is_global_zero:
            # Another run's file, at the same path.
            Path("run/checkpoints").mkdir(parents=True)
            torch.save({"state_dict": {}}, "run/checkpoints/last.ckpt")
        module = Momentum()
        trainer = fit(module, 2)
        state = [s["momentum_buffer"].item() for s in trainer.optimizers[0].state.values()]
        return [module.w.item(), trainer.global_step, state]

    whole = Momentum()
    fit(whole, 2, run_dir="whole", ckpt_path=None, accumulate=2)
    one, other = run_ranks(both)
    assert one == other
    assert one[0] == pytest.approx(whole.w.item(), abs=1e-6)


class Momentum(Lin):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def test_another_global_batch_and_another_length_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit(Lin(0.01), 1)
    quiet(max_epochs=2, run_dir="run").fit(
        Lin(0.01), loader(range(8), batch_size=4, shuffle=True), ckpt_path="last"
    )
    assert warned(caplog) == ["[C28]"]
    caplog.clear()
    quiet(max_epochs=2, run_dir="run").fit(
        Lin(0.01), loader(range(10), batch_size=2, shuffle=True), ckpt_path="last"
    )
    assert warned(caplog) == ["[C29]"]


def test_a_schedule_that_ends_before_the_run_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Cycle(Lin):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=5, cycle_momentum=False
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    plain = Cycle().configure_optimizers()
    plain["optimizer"].step()
    for _ in range(5):
        plain["lr_scheduler"]["scheduler"].step()
    with pytest.raises(ValueError, match="specified number of total steps"):
        plain["lr_scheduler"]["scheduler"].step()
    quiet(max_epochs=2).fit(Cycle(), loader(range(4)))
    assert warned(caplog) == ["[T36]"]


def test_minutes_are_counted_by_rank_0_and_all_save_together(tmp_path: Path) -> None:
    """A wish to save travels with the gradients: all ranks save at the same step."""

    def rank() -> tuple[list[int], int]:
        saved: list[int] = []

        class Note(mt.Callback):
            def on_save_point(self, trainer: Any, module: Any, point: Any) -> None:
                if point.asked:
                    saved.append(trainer.global_step)

        keep = mt.ModelCheckpoint(every_n_minutes=1e-9, dirpath=tmp_path, save_top_k=0)
        trainer = quiet(max_epochs=1, callbacks=[keep, Note()])
        trainer.fit(Lin(0.01), loader(range(16), batch_size=2))
        return saved, trainer.global_step

    one, other = run_ranks(rank)
    assert one == other
    # The wish of step 1 is heard at the end of step 2, whose save is also what it wished for then.
    assert one == ([2, 4], 4)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["counters"]["global_step"] == 4
    with pytest.raises(mt.MinitrainerError, match="every_n_minutes"):
        mt.ModelCheckpoint(every_n_minutes=0)


def test_a_checkpoint_without_a_run_is_refused() -> None:
    Path("run/checkpoints").mkdir(parents=True)
    torch.save({"state_dict": Lin().state_dict()}, "run/checkpoints/last.ckpt")
    with pytest.raises(CheckpointMismatchError, match="has no counters"):
        fit(Lin(0.01), 1)
