"""The fused kernel of an optimizer, where its class has one and the user has not chosen.

One call updates all parameters, two to three times as fast as torch's default (docs/log.md), with
results equal up to rounding. torch does not take it by itself.
"""

from __future__ import annotations

from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


def use_fused(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Have the optimizer use its fused kernel from its first step on.

    It stays as it is if the user gave `fused` or `foreach`, has stepped it, or uses what the
    kernels cannot: `differentiable`, sparse gradients, parameters that are not real floating-point
    numbers or not on CPU or CUDA; and if its class is not torch's own.

    Args:
        optimizer: What `configure_optimizers` returned, its parameters on their device.
        module: The module whose parameters it holds.
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if (
        type(optimizer).__module__.startswith("torch.optim.")
        and "fused" in optimizer.defaults
        and not optimizer.state
        and not any(_is_settled(group) for group in groups)
        and not any(getattr(part, "sparse", False) for part in module.modules())
        and all(p.is_floating_point() and p.device.type in _DEVICES for p in parameters)
    ):
        for settings in (optimizer.defaults, *groups):
            settings["fused"] = True


def _is_settled(group: dict[str, Any]) -> bool:
    chosen = group.get("fused") is not None or group.get("foreach") is not None
    return chosen or bool(group.get("differentiable"))
