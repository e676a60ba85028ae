"""`doctor` on this machine: facts are collected, and judged by their values alone."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minitrainer.doctor import codes, facts
from minitrainer.doctor.environment import CHECKS, examine, table
from minitrainer.doctor.facts import Device, Facts, Space, collect
from minitrainer.doctor.variables import VARIABLES, judge

GIB = 2**30
GPUS = (
    Device(0, "NVIDIA X", "GPU-aaaa", 80 * GIB, GIB // 2),
    Device(1, "NVIDIA X", "GPU-bbbb", 80 * GIB, 0),
)
GOOD = Facts(
    versions={"python": "3.11.9", "torch": "2.14.1"},
    devices=GPUS,
    num_gpus=2,
    machine_cores=16,
    cores=16,
    quota=None,
    shared_memory=Space(16 * GIB, 15 * GIB),
    open_files=(65536, 1048576),
    environ={},
    interfaces=("lo", "eth0"),
    port_holder="",
    run_dir="runs",
    run_dir_problem="",
    run_dir_space=Space(900 * GIB, 500 * GIB),
)
TORCHRUN = {
    **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"},
    "OMP_NUM_THREADS": "1",
}


def test_a_good_machine_has_no_finding() -> None:
    assert examine(GOOD) == []
    assert examine(replace(GOOD, devices=(), num_gpus=0)) == []
    assert examine(replace(GOOD, environ=TORCHRUN, port_holder="python, process 1")) == []


@pytest.mark.parametrize(
    ("change", "code", "severity", "said"),
    [
        ({"environ": {"RANK": "0"}}, codes.INCOMPLETE_ENVIRONMENT, "error", "RANK is set, but"),
        (
            {"environ": {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "3"}},
            *(codes.INCOMPLETE_ENVIRONMENT, "note", "SLURM has granted 8 tasks"),
        ),
        ({"environ": {"MASTER_PORT": "http"}}, codes.PORT_IN_USE, "error", "MASTER_PORT is 'http'"),
        (
            {"environ": {"MASTER_PORT": "29500"}, "port_holder": "python, process 77"},
            *(codes.PORT_IN_USE, "error", "29500, which is in use: python, process 77."),
        ),
        ({"num_gpus": 0}, codes.BACKEND_WITHOUT_DEVICE, "error", "2 GPUs, but torch sees none"),
        (
            {"devices": (GPUS[0], replace(GPUS[1], memory_used=30 * GIB))},
            *(codes.SHARED_DEVICE, "warning", "GPU 1 (GPU-bbbb) has 30.0 GiB of 80.0 GiB"),
        ),
        ({"environ": {"OMP_NUM_THREADS": "many"}}, codes.THREADS, "warning", "is 'many'"),
        ({"environ": {"OMP_NUM_THREADS": "64"}}, codes.THREADS, "warning", "is 64, but this"),
        ({"quota": 2.5}, codes.THREADS, "warning", "16 cores are to be seen, but"),
        ({"shared_memory": None}, codes.WORKERS_WITHOUT_ROOM, "warning", "/dev/shm has none"),
        (
            {"shared_memory": Space(2**26, 2**26)},
            *(codes.WORKERS_WITHOUT_ROOM, "warning", "0.1 GiB of 0.1 GiB free"),
        ),
        ({"open_files": (256, 4096)}, codes.WORKERS_WITHOUT_ROOM, "warning", "may open 256 files"),
        ({"run_dir_problem": "no"}, codes.RUN_DIRECTORY, "error", "runs cannot be made: no."),
        (
            {"run_dir_space": Space(900 * GIB, GIB // 2)},
            *(codes.RUN_DIRECTORY, "warning", "runs has 0.5 GiB free"),
        ),
        ({"environ": {"NCCL_BLOCKING_WAIT": "1"}}, codes.VARIABLE, "warning", "watchdog"),
    ],
)
def test_what_is_wrong_is_told_with_numbers(
    change: dict[str, object], code: str, severity: str, said: str
) -> None:
    """Rows B2, B7, B22, B29, B30, C6 and A14, each by a fact that differs from a good machine."""
    (finding,) = examine(replace(GOOD, **change))  # type: ignore[arg-type]
    assert (finding.code, finding.severity, finding.place) == (code, severity, "environment")
    assert said in finding.what
    assert finding.what.endswith(".")
    assert finding.fix.endswith(".")


def test_each_check_finds_something() -> None:
    bad = replace(
        GOOD,
        num_gpus=0,
        open_files=(1, 1),
        shared_memory=None,
        environ={
            "LOCAL_RANK": "0",
            "MASTER_PORT": "x",
            "OMP_NUM_THREADS": "99",
            "WORLDSIZE": "2",
        },
        run_dir_problem="no",
    )
    assert all(list(check(bad)) for check in CHECKS)
    severities = [finding.severity for finding in examine(bad)]
    assert severities == sorted(severities)  # error, warning: the worst first


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        *(({name: "1"}, name) for name in VARIABLES),
        ({"OMP_NUM_THREAD": "4"}, "Set OMP_NUM_THREADS"),
        ({"WORLDSIZE": "4"}, "Set WORLD_SIZE"),
        ({"MASTER_ADDRESS": "here"}, "Set MASTER_ADDR"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "GLOO_SOCKET_IFNAME is eth1, but"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME is eth, but"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "are lo, eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "are lo, eth0"),
    ],
)
def test_variables_that_are_wrong(environ: dict[str, str], said: str) -> None:
    """Rows B22 and B30, and misspelt names."""
    (variable,) = judge(environ, ("lo", "eth0"))
    assert said in f"{variable.what} {variable.fix}"


def test_variables_that_are_right() -> None:
    right = {
        **{"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0"},
        **{"NCCL_SOCKET_IFNAME": "eth", "NCCL_IB_HCA": "mlx5", "PATH": "/bin", "HOME": "/"},
        **{"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "MASTER_ADDR": "x", "MASTER_ADDRESS": "x"},
    }
    assert judge(right, ("lo", "eth0")) == []
    assert judge({"NCCL_SOCKET_IFNAME": "^docker,lo"}, ("lo", "eth0")) == []


def test_the_table_tells_all_facts() -> None:
    rows = dict(table(GOOD))
    assert rows["gpu 1"] == "NVIDIA X  GPU-bbbb  80.0 GiB, 0.0 GiB used"
    assert rows["backend"] == "nccl"
    assert rows["cores"] == "16 of 16, cgroup: no limit"
    assert rows["port"] == "a free one is chosen"
    assert rows["launcher"] == "none"
    rows = dict(
        table(
            replace(GOOD, devices=(), num_gpus=0, environ=TORCHRUN, quota=1.5, open_files=(9, -1))
        )
    )
    assert rows["gpus"] == "none, ranks use the CPU"
    assert rows["backend"] == "gloo"
    assert rows["cores"].endswith("1.5 at a time")
    assert rows["launcher"] == "torchrun, rank 1 of 2"
    assert rows["port"] == "29500 (MASTER_PORT), the launcher's"
    assert rows["open files"] == "9, up to unlimited on request"


# This machine ------------------------------------------------------------------------------------


def test_collecting_facts_of_this_machine(tmp_path: Path) -> None:
    here = collect(tmp_path / "runs" / "deep", {"A": "b"})
    assert here.versions["torch"] == torch.__version__.partition("+")[0]
    assert here.cores == len(os.sched_getaffinity(0)) <= here.machine_cores
    assert here.environ == {"A": "b"}
    assert "lo" in here.interfaces
    assert here.run_dir_problem == ""
    assert 0 < here.run_dir_space.free <= here.run_dir_space.total
    assert not list(tmp_path.iterdir()), "looking makes nothing"
    assert not torch.cuda.is_initialized(), "ranks can still be forked"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert collect(tmp_path / "file" / "runs", {}).run_dir_problem.endswith("file is a file")


def test_who_holds_a_port() -> None:
    """Row B29: the holder of a busy port is named."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        holder = collect(Path(), {"MASTER_PORT": port}).port_holder
        assert holder.endswith(f"process {os.getpid()}")
    assert collect(Path(), {"MASTER_PORT": port}).port_holder == ""
    assert collect(Path(), {"MASTER_PORT": "none"}).port_holder == ""


TABLE = """\
0, NVIDIA H200, GPU-1111-a, 143771, 4
1, NVIDIA H200, GPU-2222-b, 143771, [N/A]
10, NVIDIA H200, GPU-3333-c, 143771, 99
"""


def test_the_drivers_table_is_read() -> None:
    devices = facts.parse_devices(TABLE)
    assert [device.index for device in devices] == [0, 1, 10]
    assert devices[0] == Device(0, "NVIDIA H200", "GPU-1111-a", 143771 * 2**20, 4 * 2**20)
    assert devices[1].memory_used == 0
    assert facts.parse_devices("NVIDIA-SMI has failed\n") == ()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 10]),
        ("1", [1]),
        ("10, 0", [10, 0]),
        ("GPU-22,GPU-11", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
    ],
)
def test_only_visible_devices_count(visible: str | None, expected: list[int]) -> None:
    chosen = facts.visible_devices(facts.parse_devices(TABLE), visible)
    assert [device.index for device in chosen] == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container(
    files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert facts._quota(tmp_path) == expected
