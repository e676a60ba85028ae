"""Devices and threads of a rank. What needs a GPU to be there is marked so."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from minitrainer.errors import DevicesError, SharedDeviceError
from minitrainer.launch import (
    Environment,
    check_devices,
    check_identities,
    device_identity,
    pick_device,
    set_threads,
    threads_per_rank,
)

GPUS = torch.cuda.device_count()
ALONE = Environment()
LAUNCHED = Environment(1, 1, 0, 4, 2, "torchrun")


def test_how_many_ranks() -> None:
    assert check_devices("cpu", None, ALONE) == 1
    assert check_devices("cpu", 3, ALONE) == 3
    assert check_devices("cpu", None, LAUNCHED) == 2
    assert check_devices("cpu", 2, LAUNCHED) == 2


@pytest.mark.parametrize("devices", [0, -1, True, 1.5])
def test_numbers_that_make_no_sense(devices: Any) -> None:
    for environment in (ALONE, LAUNCHED):
        with pytest.raises(DevicesError, match=f"devices is {devices}"):
            check_devices("cpu", devices, environment)


def test_devices_other_than_the_launcher_gave() -> None:
    with pytest.raises(DevicesError, match="devices is 3, but the launcher started 2 ranks") as e:
        check_devices("cpu", 3, LAUNCHED)
    assert "Leave `devices` out" in e.value.fix


def test_more_gpus_than_there_are() -> None:
    if GPUS == 0:
        with pytest.raises(DevicesError, match="no GPU"):
            check_devices("cuda", None, ALONE)
        with pytest.raises(DevicesError, match="no GPU"):
            pick_device("cuda", ALONE)
        # Without a GPU, auto is the CPU, where there can be any number of ranks.
        assert check_devices("auto", 2, ALONE) == 2
        assert pick_device("auto", LAUNCHED) == torch.device("cpu")
        return
    with pytest.raises(DevicesError, match=f"devices is {GPUS + 1}, but only {GPUS}"):
        check_devices("cuda", GPUS + 1, ALONE)
    beyond = Environment(GPUS, GPUS, 0, GPUS + 1, GPUS + 1, "torchrun")
    with pytest.raises(DevicesError, match="two ranks on the same GPU"):
        pick_device("auto", beyond)
    assert pick_device("auto", ALONE) == torch.device("cuda", 0)


def test_counting_devices_does_not_start_cuda() -> None:
    check_devices("auto", 1, ALONE)
    assert not torch.cuda.is_initialized()


def test_the_cpu_is_the_same_for_all_ranks() -> None:
    assert pick_device("cpu", LAUNCHED) == torch.device("cpu")


def test_share_of_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores
    assert threads_per_rank(cores) == 1
    assert threads_per_rank(10 * cores) == 1


@pytest.mark.parametrize(
    ("launcher", "variable", "before", "after"),
    [
        ("local", None, 64, "share"),
        ("local", None, 1, 1),  # asked for less than the share
        ("local", "", 64, "share"),
        ("local", "3", 3, 3),
        ("local", "1", 1, 1),
        ("torchrun", "1", 1, "share"),  # torchrun's own 1
        ("torchrun", "3", 3, 3),
        ("slurm", None, 64, "share"),
    ],
)
def test_threads(
    launcher: Any, variable: str | None, before: int, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    set_to: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    set_threads(Environment(1, 1, 0, 2, 2, launcher))
    assert set_to == ([6] if after == "share" else [])
    # One process alone is left as it is.
    set_to.clear()
    set_threads(Environment(launcher=launcher))
    assert not set_to


def test_two_ranks_on_one_gpu_are_named() -> None:
    check_identities(["", "", ""])
    check_identities(["host-a GPU-1", "host-a GPU-2", "host-b GPU-1"])
    with pytest.raises(SharedDeviceError, match="Ranks 0 and 2 are on the same GPU"):
        check_identities(["host-a GPU-1", "host-a GPU-2", "host-a GPU-1"])
    assert device_identity(torch.device("cpu")) == ""
