"""What was right once, or never helped."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from minitrainer.doctor import codes
from minitrainer.doctor.finding import Finding
from minitrainer.doctor.reading.script import Script

_NEW_NAMES = {
    "autocast": 'torch.autocast("cuda")',
    "GradScaler": 'torch.amp.GradScaler("cuda")',
    "custom_fwd": 'torch.amp.custom_fwd(device_type="cuda")',
    "custom_bwd": 'torch.amp.custom_bwd(device_type="cuda")',
}


def emptied_cache(script: Script) -> Iterator[Finding]:
    """`empty_cache` after each batch frees nothing that is in use."""
    over_batches = set(script.training_loops)
    for visit, loop in script.loops:
        if not isinstance(loop, ast.While) and any(script.loaders(loop.iter, visit.frame)):
            over_batches.add(loop)
    for visit, call in script.calls_of("torch.cuda.empty_cache", "torch.accelerator.empty_cache"):
        if visit.loop in over_batches:
            yield script.finding(
                codes.EMPTIED_CACHE,
                "warning",
                call,
                "empty_cache in the loop over the batches frees only blocks that nobody uses, and "
                "the next step has to wait for new ones.",
                "Remove it; when memory grows, look for losses that are kept with their graph.",
            )


def deprecated_amp(script: Script) -> Iterator[Finding]:
    """`torch.cuda.amp` warns of its removal."""
    seen = set()
    for node in ast.walk(script.source.tree):
        called = node.func if isinstance(node, ast.Call) else node
        name = script.source.dotted(called) or ""
        last = name.removeprefix("torch.cuda.amp.")
        if last in _NEW_NAMES and name != last and name not in seen:
            seen.add(name)
            yield script.finding(
                codes.DEPRECATED_AMP,
                "warning",
                called,
                f"{name} is deprecated and will be removed from torch.",
                f"Write {_NEW_NAMES[last]}.",
            )
