"""Storage: a file is whole or absent, and reading one runs no code and raises what it should."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import resource
import signal
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from minitrainer import storage
from minitrainer.errors import (
    CheckpointContentError,
    CheckpointNotFoundError,
    CheckpointUnreadableError,
    CheckpointWriteError,
    UsageError,
)
from minitrainer.storage import read_checkpoint, read_file, write_file

CONTENT = {"state_dict": {"w": torch.arange(60.0)}, "epoch": 3, "more": [1, ("a", b"x")]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed_while(run: Callable[[], None], ready: Callable[[], bool]) -> None:
    """Run in a forked process and kill it as soon as `ready`."""
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    deadline = time.monotonic() + 20
    while not ready() and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


# Writing ---------------------------------------------------------------------------------------


def test_any_config_can_be_written_and_loads_with_weights_only(tmp_path: Path) -> None:
    """Case B79: list and nested dict configs, Path and np.float64, a numpy or tensor score."""
    recipe = OmegaConf.create({"sizes": [1, 2], "net": {"width": 3, "layers": [{"n": 1}]}})
    write_file(
        {
            "recipe": recipe,
            "hyperparameters": {"root": Path("data/x"), "lr": np.float64(0.1), "net": recipe.net},
            "callbacks": {
                "score": np.float32(0.25),
                "array": np.ones(2),
                "best": torch.tensor(2.0),
            },
        },
        tmp_path / "a.ckpt",
    )
    got = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert got["recipe"] == {"sizes": [1, 2], "net": {"width": 3, "layers": [{"n": 1}]}}
    assert got["hyperparameters"] == {
        "root": "data/x",
        "lr": 0.1,
        "net": {"width": 3, "layers": [{"n": 1}]},
    }
    assert type(got["hyperparameters"]["lr"]) is float
    assert got["callbacks"]["score"] == 0.25
    assert torch.equal(got["callbacks"]["array"], torch.ones(2, dtype=torch.float64))


def test_plain_torch_falls_in() -> None:
    """Case B79: each of the four raw types alone makes plain torch refuse its own file."""
    for value in (OmegaConf.create({"a": 1}), Path("p"), np.float64(1), np.ones(2)):
        torch.save({"value": value}, "raw.pt")
        with pytest.raises(pickle.UnpicklingError):
            torch.load("raw.pt", weights_only=True)


def test_the_folder_is_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_file(CONTENT, tmp_path / "a" / "b" / "c.ckpt")
    assert names(tmp_path / "a" / "b") == ["c.ckpt"]
    assert torch.equal(
        read_file(tmp_path / "a" / "b" / "c.ckpt")["state_dict"]["w"], CONTENT["state_dict"]["w"]
    )  # type: ignore[index]


def test_file_and_folder_are_flushed_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        seen.append((Path(target).name, (tmp_path / "a.ckpt").exists()))

    monkeypatch.setattr(storage.os, "fsync", fsync)
    write_file(CONTENT, tmp_path / "a.ckpt")
    assert seen == [(f".a.ckpt.tmp{os.getpid()}", False), (tmp_path.name, True)]


@pytest.mark.parametrize("moment", ["writing", "flushing"])
def test_a_kill_leaves_the_old_file_and_the_next_write_cleans_up(
    tmp_path: Path, moment: str
) -> None:
    """Case B75: SIGKILL in the write; the previous file still loads, the stray goes later."""
    path = tmp_path / "last.ckpt"
    write_file({"step": 1}, path)
    mark = tmp_path / "mark"

    def write_slowly() -> None:
        def wait(*_: object) -> None:
            mark.touch()
            time.sleep(60)

        if moment == "flushing":
            os.fsync = wait
            write_file({"step": 2, "w": torch.zeros(1000)}, path)
            return
        save = torch.save

        def save_half(content: Any, file: Any) -> None:
            save(content, file)
            file.truncate(file.tell() // 2)
            wait()

        torch.save = save_half
        write_file({"step": 2, "w": torch.zeros(1000)}, path)

    killed_while(write_slowly, mark.exists)
    strays = [name for name in names(tmp_path) if ".tmp" in name]
    assert len(strays) == 1
    assert strays[0].startswith(".last.ckpt.tmp")
    assert read_checkpoint(path) == {"step": 1}
    write_file({"step": 3}, path)
    assert names(tmp_path) == ["last.ckpt", "mark"]
    assert read_checkpoint(path) == {"step": 3}


def test_a_kill_at_any_moment_of_a_big_write_is_harmless(tmp_path: Path) -> None:
    """Case B75, with no slow file: the kill falls where it falls."""
    path = tmp_path / "last.ckpt"
    write_file({"step": 0}, path)
    content = {"step": 1, "w": torch.zeros(2_000_000)}

    def write_for_ever() -> None:
        while True:
            write_file(content, path)

    for milliseconds in (5, 11, 17):
        started = time.monotonic()
        killed_while(write_for_ever, lambda: time.monotonic() > started + milliseconds / 1000)  # noqa: B023
        assert read_checkpoint(path)["step"] in (0, 1)


def test_the_file_being_written_by_a_living_process_is_no_stray(tmp_path: Path) -> None:
    mark, go = tmp_path / "mark", tmp_path / "go"

    def write_slowly() -> None:
        def wait(_: int) -> None:
            mark.touch()
            while not go.exists():
                time.sleep(0.002)

        os.fsync = wait
        write_file({"step": 1}, tmp_path / "slow.ckpt")

    process = multiprocessing.get_context("fork").Process(target=write_slowly)
    process.start()
    while not mark.exists():
        time.sleep(0.002)
    write_file({"step": 2}, tmp_path / "quick.ckpt")
    go.touch()
    process.join(20)
    assert process.exitcode == 0
    assert read_checkpoint(tmp_path / "slow.ckpt") == {"step": 1}


class RaisesHalfWay:
    """An object whose pickling raises after some of the file is written."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("half way")


def test_an_object_that_cannot_be_pickled_is_refused_before_the_file_is_touched(
    tmp_path: Path,
) -> None:
    """Case B75: a state object whose pickling raises half way."""
    path = tmp_path / "last.ckpt"
    write_file({"step": 1}, path)
    with pytest.raises(CheckpointContentError, match=r"state\.odd is of type .*RaisesHalfWay"):
        write_file({"w": torch.zeros(1000), "state": {"odd": RaisesHalfWay()}}, path)
    assert names(tmp_path) == ["last.ckpt"]
    assert read_checkpoint(path) == {"step": 1}


def test_a_failure_half_way_through_the_writer_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B75: whatever is raised in the write, interrupts too, no temporary file stays."""
    path = tmp_path / "last.ckpt"
    write_file({"step": 1}, path)

    def save(content: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(KeyboardInterrupt):
        write_file({"step": 2}, path)
    assert names(tmp_path) == ["last.ckpt"]


@contextlib.contextmanager
def _no_file_above(limit: int) -> Any:
    # The kernel's limit on file sizes fails a write just as a full disk does.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("limit", [100, 5000, 300_000])
def test_a_write_that_the_disk_refuses_is_one_clear_error(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "last.ckpt"
    write_file({"step": 1}, path)
    with _no_file_above(limit), pytest.raises(CheckpointWriteError) as raised:
        write_file({"step": 2, "w": torch.zeros(100_000)}, path)
    assert str(raised.value).startswith(f"[C04] {path} could not be written: File too large.")
    assert names(tmp_path) == ["last.ckpt"]
    assert read_checkpoint(path) == {"step": 1}


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.os, "fsync", fsync)
    with pytest.raises(CheckpointWriteError, match=r"No space left on device.*Free space"):
        write_file(CONTENT, tmp_path / "a.ckpt")
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["file for folder", "folder for file"])
def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    path = tmp_path / ("file/a.ckpt" if kind == "file for folder" else "folder")
    with pytest.raises(CheckpointWriteError, match=str(path)):
        write_file(CONTENT, path)
    assert names(tmp_path) == ["file", "folder"]


# Reading ---------------------------------------------------------------------------------------


def test_a_missing_file_is_named_with_its_nearest_neighbour(tmp_path: Path) -> None:
    write_file(CONTENT, tmp_path / "epoch=3-step=40.ckpt")
    with pytest.raises(CheckpointNotFoundError, match=r"epoch=3-step=40\.ckpt"):
        read_file(tmp_path / "epoch=3-step=4.ckpt")
    with pytest.raises(CheckpointNotFoundError, match=f"{tmp_path} is the last part that exists"):
        read_file(tmp_path / "no" / "such" / "folder.ckpt")


@pytest.mark.parametrize("length", [5, 300, 5000])
def test_an_odd_path_is_a_usage_error(tmp_path: Path, length: int) -> None:
    for path in (tmp_path / ("x" * length), tmp_path / "a\0b", Path("/dev/null"), tmp_path):
        with pytest.raises(UsageError) as raised:
            read_checkpoint(path)
        assert raised.value.exit_code == 2


@pytest.mark.parametrize("address", ["http://host/a.ckpt", "s3://bucket/a.ckpt", "hf+x:/y/a.ckpt"])
def test_nothing_is_fetched(address: str) -> None:
    for path in (address, Path(address)):
        with pytest.raises(CheckpointNotFoundError, match="Nothing is fetched"):
            read_file(path)  # type: ignore[arg-type]


def test_mmap_opens_without_reading_it_all(tmp_path: Path) -> None:
    write_file(CONTENT, tmp_path / "a.ckpt")
    got = read_file(tmp_path / "a.ckpt", mmap=True)
    assert got["epoch"] == 3
    assert torch.equal(got["state_dict"]["w"], torch.arange(60.0))


def test_every_cut_of_a_file_is_unreadable(tmp_path: Path) -> None:
    """Case B75: truncated or 0 bytes is an error of ours, whatever was cut."""
    path = tmp_path / "a.ckpt"
    write_file(CONTENT, path)
    raw = path.read_bytes()
    for length in [*range(0, 64), *range(64, len(raw), 13), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointUnreadableError) as raised:
            read_checkpoint(path)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(_same(left[key], right[key]) for key in left)
    return bool(left == right)


def test_a_flipped_bit_is_unreadable_or_harmless_and_never_silent(tmp_path: Path) -> None:
    """Checksums are verified: torch alone loads most damaged files without a word."""
    path = tmp_path / "a.ckpt"
    write_file(CONTENT, path)
    raw = path.read_bytes()
    silent = refused = 0
    for position in range(0, len(raw), 3):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            silent += not _same(torch.load(path, weights_only=True), CONTENT)
        try:
            got = read_file(path)
        except CheckpointUnreadableError:
            refused += 1
        else:
            assert _same(got, CONTENT), position
    assert silent > 50  # plain torch falls in
    assert refused > silent


def test_a_record_marked_as_a_folder_is_unreadable(tmp_path: Path) -> None:
    """One bit in the file's directory makes plain torch return memory as it was, for a tensor."""
    path = tmp_path / "a.ckpt"
    write_file(CONTENT, path)
    raw = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data/0"))
    entry = raw.rindex(name.encode()) - 46
    assert raw[entry : entry + 4] == b"PK\x01\x02"
    raw[entry + 38] |= 0x10
    path.write_bytes(raw)
    torch.load(path, weights_only=True)  # without a word: plain torch falls in
    with pytest.raises(CheckpointUnreadableError):
        read_file(path)


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"hello world\n", b"PK\x03\x04rest", b"\x80\x02}."]
)
def test_garbage_is_unreadable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointUnreadableError):
        read_checkpoint(tmp_path / "a.ckpt")


def test_random_garbage_is_unreadable_and_warns_nothing(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        (tmp_path / "a.ckpt").write_bytes(b"\x80" + generator.bytes(50))
        with pytest.raises(CheckpointUnreadableError):
            read_file(tmp_path / "a.ckpt")


class RunsCode:
    """Unpickling it makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it-ran",)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_file_that_would_run_code_is_named_and_runs_nothing(
    tmp_path: Path, new_format: bool
) -> None:
    path = tmp_path / "evil.ckpt"
    torch.save({"a": RunsCode()}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(CheckpointUnreadableError, match=r"refers to posix\.mkdir") as raised:
        read_checkpoint(path)
    assert "run code" in str(raised.value)
    assert names(tmp_path) == ["evil.ckpt"]


def test_files_of_others_are_taken(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 1)
    torch.save(module.state_dict(), tmp_path / "bare.pt")
    assert list(read_checkpoint(tmp_path / "bare.pt")) == ["state_dict"]
    assert isinstance(read_checkpoint(tmp_path / "bare.pt")["state_dict"], OrderedDict)
    torch.save(
        {
            "pytorch-lightning_version": "2.6.0",
            "epoch": 1,
            "state_dict": module.state_dict(),
            "hyper_parameters": {"lr": 0.1},
        },
        tmp_path / "lightning.ckpt",
    )
    got = read_checkpoint(tmp_path / "lightning.ckpt")
    assert got["hyperparameters"] == {"lr": 0.1}
    assert "hyper_parameters" not in got
    torch.save(module.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert list(read_checkpoint(tmp_path / "old.pt")["state_dict"]) == ["weight", "bias"]
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointUnreadableError, match="holds a list"):
        read_checkpoint(tmp_path / "list.pt")
