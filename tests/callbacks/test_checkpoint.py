"""ModelCheckpoint: when it saves, what it keeps, and what it knows after a resume."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from minitrainer import dist
from minitrainer.callbacks.checkpoint import ModelCheckpoint
from minitrainer.errors import MonitorError, SettingError
from tests.callbacks.view import FakeTrainer
from tests.ranks import run_ranks


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_by_default_the_newest_epoch_and_last_are_kept(tmp_path: Path) -> None:
    trainer, callback = FakeTrainer(run_dir=tmp_path), ModelCheckpoint()
    trainer.start(callback)
    assert (callback.best_model_path, callback.last_model_path) == ("", "")
    assert callback.best_model_score is None
    for _ in range(3):
        trainer.epoch(steps=2)
    trainer.end()
    folder = tmp_path / "checkpoints"
    assert files(folder) == ["epoch=2-step=6.ckpt", "last.ckpt"]
    assert callback.best_model_path == str(folder / "epoch=2-step=6.ckpt")
    assert callback.last_model_path == str(folder / "last.ckpt")
    # Nothing happened after the last epoch, so the end of the run saves nothing again.
    assert trainer.saved == [
        *("epoch=0-step=2.ckpt", "last.ckpt", "epoch=1-step=4.ckpt", "last.ckpt"),
        *("epoch=2-step=6.ckpt", "last.ckpt"),
    ]


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(0, []), (1, [6]), (2, [4, 6]), (-1, [2, 4, 6])],
)
def test_the_newest_k_by_steps_are_kept(tmp_path: Path, top_k: int, expected: list[int]) -> None:
    trainer = FakeTrainer()
    trainer.start(
        ModelCheckpoint(
            every_n_steps=2, save_top_k=top_k, save_last=False, dirpath="here", filename="s{step}"
        )
    )
    trainer.epoch(steps=7)
    trainer.end()
    names = files(tmp_path / "here") if expected else []
    assert names == [f"s{step}.ckpt" for step in expected]


def test_a_step_that_amp_skipped_is_saved_once(tmp_path: Path) -> None:
    trainer = FakeTrainer(run_dir=tmp_path)
    trainer.start(ModelCheckpoint(every_n_steps=2, save_last=False))
    for taken in (False, True, True, False, False, True):
        trainer.step(taken=taken)
        trainer.save_point()
    assert trainer.saved == ["epoch=0-step=2.ckpt"]


def test_last_is_brought_up_to_date_when_the_run_ends_between_two_saves(tmp_path: Path) -> None:
    trainer, callback = FakeTrainer(run_dir=tmp_path), ModelCheckpoint(every_n_steps=2)
    trainer.start(callback)
    for _ in range(3):
        trainer.step()
        trainer.save_point()
    trainer.end()
    assert trainer.saved == ["epoch=0-step=2.ckpt", "last.ckpt", "last.ckpt"]
    assert trainer.checkpoint_io.load(tmp_path / "checkpoints" / "last.ckpt")["step"] == 3
    # Resumed and ended at once: nothing to do.
    again, resumed = FakeTrainer(run_dir=tmp_path), ModelCheckpoint(every_n_steps=2)
    again.start(resumed, resume=tmp_path / "checkpoints" / "last.ckpt")
    again.end()
    assert again.saved == []
    assert resumed.last_model_path == callback.last_model_path


@pytest.mark.parametrize(
    ("mode", "scores", "kept", "best"),
    [
        ("min", [5.0, 4.0, 3.0], [4.0, 3.0], 3.0),
        ("min", [3.0, 4.0, 5.0], [3.0, 4.0], 3.0),
        ("max", [5.0, 4.0, 6.0], [5.0, 6.0], 6.0),
        ("min", [4.0, 4.0, 4.0], [4.0, 4.0], 4.0),
        ("min", [1.0, math.nan, 0.9, 1.0, 1.0], [1.0, 0.9], 0.9),
        ("max", [math.nan, math.inf, -math.inf, 1.0], [1.0], 1.0),
        ("min", [math.nan], [], None),
    ],
)
def test_the_best_k_are_kept_and_nan_is_never_best(
    tmp_path: Path, mode: Any, scores: list[float], kept: list[float], best: float | None
) -> None:
    """Case B114: NaN is never best in top-k."""
    trainer = FakeTrainer(run_dir=tmp_path)
    callback = ModelCheckpoint(
        monitor="val/loss", mode=mode, save_top_k=2, filename="{epoch}-{val/loss:.1f}"
    )
    trainer.start(callback)
    for score in scores:
        trainer.epoch(validation={"val/loss": score})
    trainer.end()
    names = files(tmp_path / "checkpoints")
    assert names[-1] == "last.ckpt"
    assert [float(Path(name).stem.split("-")[1]) for name in names[:-1]] == kept
    assert callback.best_model_score == best
    if best is not None:
        assert callback.best_model_path.endswith(f"-{best}.ckpt")
    # A tie goes to the older file.
    if len(set(scores)) == 1 and kept:
        assert names[:2] == ["0-4.0.ckpt", "1-4.0.ckpt"]


@pytest.mark.parametrize(("then", "kept", "best"), [(3.0, [4.0, 3.0], 3.0), (6.0, [5.0, 4.0], 4.0)])
@pytest.mark.parametrize("resume_from", ["last", "best"])
def test_the_list_of_the_best_survives_a_resume(
    tmp_path: Path, then: float, kept: list[float], best: float, resume_from: str
) -> None:
    """Case B72: k=2, scores 5, 4, resume, 3 (or 6): exactly the right two files remain."""

    def new() -> ModelCheckpoint:
        return ModelCheckpoint(monitor="loss", save_top_k=2, filename="{loss}")

    first, before = FakeTrainer(run_dir=tmp_path), new()
    first.start(before)
    for score in (5.0, 4.0):
        first.epoch(validation={"loss": score})
    first.end()
    path = before.last_model_path if resume_from == "last" else before.best_model_path
    second, after = FakeTrainer(run_dir=tmp_path, current_epoch=2), new()
    second.start(after, resume=Path(path))
    assert after.best_model_path == before.best_model_path
    second.epoch(validation={"loss": then})
    second.end()
    expected = sorted(f"{score}.ckpt" for score in kept)
    assert files(tmp_path / "checkpoints") == [*expected, "last.ckpt"]
    assert after.best_model_score == best
    assert after.best_model_path == str(tmp_path / "checkpoints" / f"{best}.ckpt")


def test_files_that_are_gone_after_a_resume_are_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, before = FakeTrainer(run_dir=tmp_path / "a"), ModelCheckpoint(monitor="loss")
    first.start(before)
    first.epoch(validation={"loss": 1.0})
    second, after = (
        FakeTrainer(run_dir=tmp_path / "b", current_epoch=1),
        ModelCheckpoint(monitor="loss"),
    )
    with caplog.at_level("INFO"):
        second.start(after, resume=tmp_path / "a" / "checkpoints" / "last.ckpt")
    assert "checkpoints any more: epoch=0-step=1.ckpt." in caplog.text
    assert (after.best_model_path, after.last_model_path) == ("", "")
    second.epoch(validation={"loss": 2.0})
    assert after.best_model_score == 2.0
    assert files(tmp_path / "a" / "checkpoints") == ["epoch=0-step=1.ckpt", "last.ckpt"]


def test_scores_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    first = FakeTrainer(run_dir=tmp_path)
    first.start(ModelCheckpoint(monitor="loss"))
    first.epoch(validation={"loss": 0.1})
    second, after = FakeTrainer(run_dir=tmp_path), ModelCheckpoint(monitor="acc", mode="max")
    second.start(after, resume=tmp_path / "checkpoints" / "last.ckpt")
    second.epoch(validation={"acc": 0.05})
    assert after.best_model_score == 0.05


def test_the_state_alone_tells_the_paths(tmp_path: Path) -> None:
    """The process that started local ranks gets the state and no more."""
    trainer, callback = FakeTrainer(run_dir=tmp_path), ModelCheckpoint(monitor="loss")
    trainer.start(callback)
    trainer.epoch(validation={"loss": 1.0})
    parent = ModelCheckpoint(monitor="loss")
    parent.load_state_dict(callback.state_dict())
    assert parent.best_model_path == callback.best_model_path
    assert parent.last_model_path == callback.last_model_path
    assert parent.best_model_score == 1.0
    assert callback.state_dict()["kept"] == [["epoch=0-step=1.ckpt", 1.0]]


def test_the_worse_file_goes_after_the_new_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = FakeTrainer(run_dir=tmp_path)
    trainer.start(ModelCheckpoint(save_last=False, filename="{step}"))
    order: list[str] = []
    save, remove = trainer.checkpoint_io.save, trainer.checkpoint_io.remove
    monkeypatch.setattr(
        trainer.checkpoint_io, "save", lambda c, p: (save(c, p), order.append(f"+{p.stem}"))
    )
    monkeypatch.setattr(
        trainer.checkpoint_io, "remove", lambda p: (remove(p), order.append(f"-{p.stem}"))
    )
    trainer.epoch()
    trainer.epoch()
    assert order == ["+1", "+2", "-1"]


def test_one_name_for_all_is_written_over(tmp_path: Path) -> None:
    trainer, callback = (
        FakeTrainer(run_dir=tmp_path),
        ModelCheckpoint(filename="best", save_last=False),
    )
    trainer.start(callback)
    trainer.epoch()
    trainer.epoch()
    assert files(tmp_path / "checkpoints") == ["best.ckpt"]
    assert trainer.checkpoint_io.load(Path(callback.best_model_path))["step"] == 2


def test_a_name_that_is_taken_gets_a_version(tmp_path: Path) -> None:
    trainer = FakeTrainer(run_dir=tmp_path)
    callback = ModelCheckpoint(filename="m", monitor="loss", save_top_k=2, save_last=False)
    trainer.start(callback)
    for score in (3.0, 2.0, 1.0):
        trainer.epoch(validation={"loss": score})
    assert files(tmp_path / "checkpoints") == ["m-v1.ckpt", "m.ckpt"]
    steps = [
        trainer.checkpoint_io.load(tmp_path / "checkpoints" / n)["step"]
        for n in ("m.ckpt", "m-v1.ckpt")
    ]
    assert sorted(steps) == [2, 3]
    assert trainer.checkpoint_io.load(Path(callback.best_model_path))["step"] == 3


def test_names_are_clean_and_metrics_may_have_any(tmp_path: Path) -> None:
    trainer = FakeTrainer(run_dir=tmp_path)
    trainer.callback_metrics = {"val/loss.all": 0.25, "lr-SGD": 1.0}
    trainer.start(
        ModelCheckpoint(
            filename='..a/b:*?"<>|\\{val/loss.all:.3f} {lr-SGD} {later}.ckpt', save_last=False
        )
    )
    trainer.epoch()
    assert files(tmp_path / "checkpoints") == ["a_b________0.250 1.0 nan.ckpt"]


def test_a_training_metric_is_judged_at_the_end_of_epochs(tmp_path: Path) -> None:
    trainer = FakeTrainer(run_dir=tmp_path)
    callback = ModelCheckpoint(monitor="train_loss", save_top_k=-1, save_last=False)
    trainer.start(callback)
    trainer.step()
    trainer.validate(other=1.0)
    trainer.save_point(validated=True)
    trainer.step()
    trainer.end_epoch(train_loss=2.0)
    trainer.step()
    trainer.validate(other=0.5)
    trainer.save_point(validated=True)
    trainer.step()
    trainer.end_epoch(train_loss=1.0)
    assert trainer.saved == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"]
    assert callback.best_model_score == 1.0


def test_a_validation_metric_is_judged_only_when_a_validation_ran(tmp_path: Path) -> None:
    trainer = FakeTrainer(run_dir=tmp_path)
    trainer.start(ModelCheckpoint(monitor="loss", save_top_k=-1))
    trainer.epoch()
    trainer.epoch(validation={"loss": 2.0})
    trainer.epoch()
    trainer.step()
    trainer.validate(loss=1.0)
    trainer.save_point(validated=True)
    assert [name for name in trainer.saved if name != "last.ckpt"] == [
        "epoch=1-step=2.ckpt",
        "epoch=3-step=4.ckpt",
    ]
    assert trainer.saved.count("last.ckpt") == 4


def test_every_n_epochs_thins_out_the_looks(tmp_path: Path) -> None:
    trainer = FakeTrainer(run_dir=tmp_path)
    trainer.start(ModelCheckpoint(monitor="loss", every_n_epochs=2, save_top_k=-1, save_last=False))
    for score in (4.0, 3.0, 2.0, 1.0):
        trainer.epoch(validation={"loss": score})
    assert trainer.saved == ["epoch=1-step=2.ckpt", "epoch=3-step=4.ckpt"]


def test_with_a_monitor_steps_bring_last_up_to_date(tmp_path: Path) -> None:
    trainer = FakeTrainer(run_dir=tmp_path)
    trainer.start(ModelCheckpoint(monitor="loss", every_n_steps=2))
    trainer.epoch(steps=5, validation={"loss": 1.0})
    assert trainer.saved == ["last.ckpt", "last.ckpt", "epoch=0-step=5.ckpt", "last.ckpt"]


def test_a_metric_that_nobody_logs_is_named(tmp_path: Path) -> None:
    trainer = FakeTrainer(run_dir=tmp_path)
    trainer.start(ModelCheckpoint(monitor="val_los"))
    trainer.epoch()  # the first validation may come later
    with pytest.raises(MonitorError, match=r"'val_los'.*epoch 1.*Did you mean val_loss\?"):
        trainer.epoch(validation={"val_loss": 1.0})


def test_without_a_directory_nothing_is_saved() -> None:
    trainer, callback = FakeTrainer(), ModelCheckpoint()
    trainer.start(callback)
    trainer.epoch()
    trainer.end()
    assert trainer.saved == []
    assert callback.last_model_path == ""


def test_a_relative_folder_is_that_of_the_constructor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B5: user code changes the working directory before fit."""
    callback = ModelCheckpoint(dirpath="out")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer = FakeTrainer()
    trainer.start(callback)
    trainer.epoch()
    assert files(tmp_path / "out") == ["epoch=0-step=1.ckpt", "last.ckpt"]


def test_a_second_run_from_the_start_saves_its_first_steps(tmp_path: Path) -> None:
    callback = ModelCheckpoint(every_n_steps=3)
    for run in ("a", "b"):
        trainer = FakeTrainer(run_dir=tmp_path / run)
        trainer.start(callback)
        trainer.epoch(steps=4)
        trainer.end()
        assert trainer.saved == ["epoch=0-step=3.ckpt", "last.ckpt", "last.ckpt"]
        assert callback.best_model_path == str(tmp_path / run / "checkpoints/epoch=0-step=3.ckpt")


@pytest.mark.parametrize(
    "arguments",
    [
        {"every_n_steps": 0},
        {"every_n_steps": 1.5},
        {"every_n_epochs": -1},
        {"every_n_epochs": True},
        {"save_top_k": -2},
        {"mode": "best", "monitor": "a"},
        {"monitor": ""},
        {"filename": ""},
        {"filename": "{"},
        {"filename": "{}"},
        {"filename": "{0}"},
        {"filename": "{epoch:.2x}"},
        {"filename": "last"},
        {"filename": "///."[3:]},
        {"filename": 3},
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as raised:
        ModelCheckpoint(**arguments)
    assert "ModelCheckpoint got" in str(raised.value)


def test_all_ranks_decide_alike_and_rank_0_alone_touches_the_disk(tmp_path: Path) -> None:
    """Case B5: both ranks report the same best and last path, though only rank 0 has files."""

    def rank() -> tuple[list[str], str, str, list[str]]:
        number = int(os.environ["RANK"])
        folder = tmp_path / f"disk{number}"
        with dist.process_group(torch.device("cpu"), num_ranks=2, timeout=20):
            trainer = FakeTrainer(run_dir=folder, global_rank=number, world_size=2)
            callback = ModelCheckpoint(monitor="loss", save_top_k=2)
            # Of the two files that a checkpoint knew of, rank 0's disk has one.
            (tmp_path / "disk0/checkpoints").mkdir(parents=True, exist_ok=True)
            (tmp_path / "disk0/checkpoints/old.ckpt").touch()
            callback.load_state_dict(
                {
                    **callback.state_dict(),
                    "kept": [["old.ckpt", 2.0], ["gone.ckpt", 1.0]],
                    "last": "last.ckpt",
                }
            )
            trainer.start(callback)
            for score in (5.0, 4.0, 3.0):
                trainer.epoch(validation={"loss": score})
            trainer.end()
        names = [Path(callback.best_model_path).name, Path(callback.last_model_path).name]
        return (
            trainer.saved,
            names[0],
            names[1],
            files(folder / "checkpoints") if not number else [],
        )

    first, second = run_ranks(rank)
    assert first[:3] == second[:3]
    assert first[0] == [
        *("epoch=0-step=1.ckpt", "last.ckpt", "epoch=1-step=2.ckpt", "last.ckpt"),
        *("epoch=2-step=3.ckpt", "last.ckpt"),
    ]
    assert first[1] == "old.ckpt"
    assert first[3] == ["epoch=2-step=3.ckpt", "last.ckpt", "old.ckpt"]
    assert not (tmp_path / "disk1").exists()
