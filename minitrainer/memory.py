"""How much memory a rank needs, from shapes, before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from minitrainer.errors import ModelTooLargeError

# Tensors of a parameter's size that each optimizer keeps, from the sources of torch 2.14; those
# whose number depends on the settings are in _state_copies.
_STATE_COPIES = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "Rprop": 2,
    "ASGD": 1,
}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes per rank that are there all the time; activations come on top.

    `optimizer` is None when the optimizer is not one of torch's. DDP's buckets are the gradients
    themselves (`gradient_as_bucket_view`), so they add nothing.
    """

    parameters: int
    gradients: int
    buffers: int
    optimizer: int | None

    @property
    def total(self) -> int:
        """Return the sum of what is known."""
        return self.parameters + self.gradients + self.buffers + (self.optimizer or 0)

    def __str__(self) -> str:
        state = "unknown" if self.optimizer is None else _size(self.optimizer)
        return (
            f"{_size(self.total)} per rank (parameters {_size(self.parameters)}, gradients "
            f"{_size(self.gradients)}, optimizer {state}, buffers {_size(self.buffers)}) "
            "and activations"
        )


def estimate(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> MemoryEstimate:
    """Return what a rank needs for this module; parameters shared by layers count once."""
    copies = None if optimizer is None else _state_copies(optimizer)
    trained = sum(_bytes(p) for p in module.parameters() if p.requires_grad)
    return MemoryEstimate(
        parameters=sum(_bytes(p) for p in module.parameters()),
        gradients=trained,
        buffers=sum(_bytes(b) for b in module.buffers()),
        optimizer=None if copies is None else copies * trained,
    )


def check_fits(needed: MemoryEstimate, device: torch.device, local_ranks: int) -> None:
    """Raise if the model cannot fit, before it is moved and before anything runs out of memory.

    Raises:
        ModelTooLargeError: The parts that are always there need more than the device has.
    """
    present = capacity(device) // (1 if device.type == "cuda" else local_ranks)
    if needed.total > present:
        raise ModelTooLargeError(
            f"The model needs {needed}; a rank has {_size(present)} on {device.type}.",
            "DDP copies the whole model to every rank, it does not split it.",
            "Use a smaller model or optimizer, fewer ranks on this machine if they share its "
            "memory, or a trainer that splits the model (FSDP).",
        )


def capacity(device: torch.device) -> int:
    """Return the bytes of the device, or of this machine for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _state_copies(optimizer: torch.optim.Optimizer) -> int | None:
    name, settings = type(optimizer).__name__, optimizer.defaults
    if type(optimizer).__module__.split(".")[0] != "torch":
        return None
    if name == "SGD":
        return int(bool(settings["momentum"]))
    if name == "RMSprop":
        return 1 + int(bool(settings["momentum"])) + int(bool(settings["centered"]))
    copies = _STATE_COPIES.get(name)
    return None if copies is None else copies + int(bool(settings.get("amsgrad")))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"
