"""Which device a rank computes on, and with how many threads."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Literal, get_args

import torch

from minitrainer.errors import DevicesError, SharedDeviceError
from minitrainer.launch.environment import Environment

Accelerator = Literal["auto", "cpu", "cuda"]


def check_devices(accelerator: Accelerator, devices: int | None, environment: Environment) -> int:
    """Return how many ranks this machine has in the run.

    Called before ranks are forked, so CUDA is not started here.

    Args:
        accelerator: The kind of device.
        devices: How many the user asked for; None for what the launcher gives, or 1.
        environment: The place of this process.

    Raises:
        DevicesError: Fewer than one, more than there are GPUs, or not what the launcher gives.
    """
    if accelerator not in get_args(Accelerator):
        raise DevicesError(
            f"accelerator is {accelerator!r}.",
            fix=f"Use one of {', '.join(get_args(Accelerator))}.",
        )
    whole = isinstance(devices, int) and not isinstance(devices, bool)
    if devices is not None and not (whole and devices >= 1):
        raise DevicesError(
            f"devices is {devices!r}.",
            "It is the number of ranks on this machine.",
            "Give a number, 1 or more.",
        )
    present = _num_gpus() if _uses_cuda(accelerator) else None
    if environment.launcher == "none":
        wanted = devices or 1
        if present is not None and wanted > present:
            raise DevicesError(
                f"devices is {wanted}, but {_gpus(present)} here.",
                "Each rank needs a GPU of its own.",
                f"Set devices to {present} or less, or the accelerator to cpu.",
            )
        return wanted
    given = environment.local_world_size
    if devices is not None and devices != given:
        raise DevicesError(
            f"devices is {devices}, but the launcher started {given} "
            f"{'rank' if given == 1 else 'ranks'} on this machine.",
            "Under torchrun, SLURM and the like it is the launcher that starts the ranks.",
            "Leave `devices` out, or give the launcher the same number.",
        )
    return given


def pick_device(accelerator: Accelerator, environment: Environment) -> torch.device:
    """Return the device of this rank; a GPU is made the current one first of all.

    Raises:
        DevicesError: There is no GPU for this rank.
    """
    if not _uses_cuda(accelerator):
        return torch.device("cpu")
    present = _num_gpus()
    index = environment.local_rank
    if index >= present:
        raise DevicesError(
            f"LOCAL_RANK is {index}, but {_gpus(present)} visible to this rank.",
            "Sharing one would put two ranks on the same GPU, where NCCL refuses to work.",
            f"Start at most {present} ranks on this machine, or let every rank see all GPUs "
            "(CUDA_VISIBLE_DEVICES; srun --gpu-bind=none).",
        )
    # Before anything else touches CUDA: otherwise every rank gets a context on GPU 0 as well.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_identity(device: torch.device) -> str:
    """Return what tells this GPU from all others, also under CUDA_VISIBLE_DEVICES and MIG.

    Empty for a CPU, which ranks may share.
    """
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def check_identities(identities: Sequence[str]) -> None:
    """Raise if two ranks have the same GPU.

    Args:
        identities: What `device_identity` returned on each rank.

    Raises:
        SharedDeviceError: They share one; both ranks are named.
    """
    owners: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if identity and identity in owners:
            raise SharedDeviceError(
                f"Ranks {owners[identity]} and {rank} are on the same GPU ({identity}).",
                "They would take turns, fill its memory twice, and NCCL refuses to work.",
                "Let the launcher choose the devices: no --local_rank by hand, no own set_device.",
            )
        owners[identity] = rank


def threads_per_rank(local_world_size: int) -> int:
    """Return the cores this process may use, divided by the ranks of the machine."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def set_threads(environment: Environment) -> None:
    """Give each of several ranks its share of the cores; one process alone is left as it is.

    OMP_NUM_THREADS is respected, with one exception: torchrun sets it to 1 when the user has not,
    which cannot be told from a 1 of the user's, so under torchrun a 1 becomes the share. A number
    of threads below the share is kept.
    """
    if environment.world_size == 1:
        return
    chosen = os.environ.get("OMP_NUM_THREADS")
    share = threads_per_rank(environment.local_world_size)
    lowered = environment.launcher == "torchrun" and chosen == "1"
    if lowered or (not chosen and torch.get_num_threads() > share):
        torch.set_num_threads(share)


def _uses_cuda(accelerator: Accelerator) -> bool:
    if accelerator == "cuda" and _num_gpus() == 0:
        raise DevicesError(
            "The accelerator is cuda, but there is no GPU here.",
            "torch sees none: no device, no driver, or a torch built without CUDA.",
            'Set the accelerator to "cpu" or "auto".',
        )
    return accelerator != "cpu" and _num_gpus() > 0


def _num_gpus() -> int:
    # Not torch.cuda.is_available(): that starts the CUDA driver, after which a forked rank could
    # not use CUDA at all. device_count() asks NVML, in the parent and in the ranks alike.
    return torch.cuda.device_count()


def _gpus(number: int) -> str:
    return f"only {number} {'GPU is' if number == 1 else 'GPUs are'}"
