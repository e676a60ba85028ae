"""What this machine is like. Nothing here judges, and nothing starts CUDA."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minitrainer.version import __version__

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that this process may use; memory in bytes."""

    index: int
    name: str
    uuid: str
    memory: int
    memory_used: int


@dataclass(frozen=True, slots=True)
class Space:
    """The size of a file system and what is free of it, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What there is, in numbers.

    `devices` are those that the driver tells of, `num_gpus` counts those that torch sees. `quota`
    is the number of cores that the container may use at a time, None without a limit.
    `open_files` are the limits, soft and hard. `port_holder` is empty while MASTER_PORT is free or
    not set. `run_dir_problem` says why the folder of the runs cannot be written to.
    """

    versions: Mapping[str, str]
    devices: tuple[Device, ...]
    num_gpus: int
    machine_cores: int
    cores: int
    quota: float | None
    shared_memory: Space | None
    open_files: tuple[int, int]
    environ: Mapping[str, str]
    interfaces: tuple[str, ...]
    port_holder: str
    run_dir: str
    run_dir_problem: str
    run_dir_space: Space

    @property
    def backend(self) -> str:
        """The backend that the ranks would use."""
        return "nccl" if self.num_gpus else "gloo"


def collect(run_dir: Path, environ: Mapping[str, str]) -> Facts:
    """Return the facts of this machine, as this process sees it.

    Args:
        run_dir: The folder that runs are written to; it need not exist.
        environ: The environment.
    """
    import torch  # a second, which `doctor --script` does not need

    folder = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.exists())
    shared_memory = Path("/dev/shm")
    return Facts(
        versions=_versions(torch.version.cuda),
        devices=_devices(environ.get("CUDA_VISIBLE_DEVICES")),
        num_gpus=torch.cuda.device_count(),
        machine_cores=os.cpu_count() or 1,
        cores=len(os.sched_getaffinity(0)),
        quota=_quota(Path("/sys/fs/cgroup")),
        shared_memory=_space(shared_memory) if shared_memory.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        environ=dict(environ),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        port_holder=_port_holder(environ.get("MASTER_PORT", "")),
        run_dir=str(run_dir),
        run_dir_problem=_write_problem(folder),
        run_dir_space=_space(folder),
    )


def _versions(cuda: str | None) -> dict[str, str]:
    versions = {"python": platform.python_version(), "minitrainer": __version__}
    for package in ("torch", "torchvision"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if cuda is not None:
        import torch

        versions["CUDA"] = cuda
        with contextlib.suppress(AttributeError):  # a torch built without it
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _devices(visible: str | None) -> tuple[Device, ...]:
    """Ask the driver, because torch would have to start CUDA to tell the UUIDs."""
    query = "--query-gpu=index,name,uuid,memory.total,memory.used"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible_devices(parse_devices(run.stdout), visible)


def parse_devices(table: str) -> tuple[Device, ...]:
    """Return the devices of nvidia-smi's table: index, name, UUID, memory and memory used."""
    devices = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].isdecimal():
            total, used = (int(c) * _MIB if c.isdecimal() else 0 for c in cells[3:])
            devices.append(Device(int(cells[0]), cells[1], cells[2], total, used))
    return tuple(devices)


def visible_devices(devices: tuple[Device, ...], visible: str | None) -> tuple[Device, ...]:
    """Return those that CUDA_VISIBLE_DEVICES lets through, by index or beginning of the UUID."""
    if visible is None:
        return devices
    chosen = []
    for word in filter(None, (word.strip() for word in visible.split(","))):
        found = [d for d in devices if str(d.index) == word or d.uuid.startswith(word)]
        if not found:
            break  # CUDA, too, ignores everything behind a name that it does not know
        chosen.append(found[0])
    return tuple(chosen)


def _quota(root: Path) -> float | None:
    """Return the cores' worth of time that a cgroup, version 2 or 1, allows."""
    with contextlib.suppress(OSError, ValueError):
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit = (root / "cpu/cpu.cfs_quota_us").read_text()
        period = (root / "cpu/cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    return None


def _space(path: Path) -> Space:
    usage = shutil.disk_usage(path)
    return Space(usage.total, usage.free)


def _write_problem(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is a file"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write to {folder}"


def _port_holder(port: str) -> str:
    """Return who listens at a port; empty if nobody does or it is no port."""
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            return _listener(int(port)) or f"unknown ({error.strerror})"
    return ""


def _listener(port: int) -> str:
    """Return the process that listens at a port, as far as this user may know."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                cells = line.split()
                local, state, inode = cells[1], cells[3], cells[9]
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{inode}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if any(os.readlink(file) in inodes for file in (process / "fd").iterdir()):
                name = (process / "comm").read_text().strip()
                return f"{name}, process {process.name}"
    return ""
