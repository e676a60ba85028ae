"""The model of a recipe as its ranks build it: is it the same, and do its layers need each other.

Call everything on all ranks: they compare notes.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator

import torch

from minitrainer import dist
from minitrainer.doctor import recipe_codes as codes
from minitrainer.doctor.finding import Finding
from minitrainer.module import Module
from minitrainer.parity.adapt import batch_norms

_SMALL_BATCH = 16


def compare_models(module: Module) -> Iterator[Finding]:
    """Yield in what the ranks' models differ as they were built; call it on all ranks."""
    shapes, values, names = [], [], []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        names.append(name)
        kind = str(tensor.dtype).removeprefix("torch.")
        shapes.append(f"{name} {tuple(tensor.shape)} {kind}")
        values.append(_digest(tensor))
    theirs = dist.gather_objects([shapes, values])
    first_shapes, first_values = theirs[0]
    for rank, (other, _) in enumerate(theirs):
        if other != first_shapes:
            pairs = zip([*first_shapes, None], [*other, None], strict=False)
            here, there = next(pair for pair in pairs if pair[0] != pair[1])
            yield Finding(
                codes.OTHER_MODELS,
                "error",
                "module",
                f"Rank 0 builds {here or 'no further tensor'} where rank {rank} builds "
                f"{there or 'no further tensor'}.",
                "Do not let the model depend on the rank or on unseeded randomness.",
            )
            return
    num_parameters = len(list(module.parameters()))
    for code, kind, start, stop in (
        (codes.SAME_RANDOMNESS, "parameters", 0, num_parameters),
        (codes.OTHER_BUFFERS, "buffers", num_parameters, len(names)),
    ):
        unequal = [
            at for at in range(start, stop) if any(v[at] != first_values[at] for _, v in theirs)
        ]
        if unequal:
            yield Finding(
                code,
                "warning",
                "module",
                f"{len(unequal)} of {stop - start} {kind} have other values on other ranks as "
                f"they are built ({names[unequal[0]]} first); the trainer overwrites them by rank "
                "0's, and another run starts elsewhere.",
                "Draw them from torch's own generators only, which the trainer seeds alike.",
            )


def small_batch_norm(module: Module, batch_size: int | None) -> Iterator[Finding]:
    """Yield that batch norm layers see too few samples, if several ranks do not share them.

    Args:
        module: As built.
        batch_size: Samples of a full micro-batch of one rank, None when unknown.
    """
    ranks = dist.world_size()
    names = [
        name
        for name, layer in batch_norms(module).items()
        if not isinstance(layer, torch.nn.SyncBatchNorm)
    ]
    if ranks > 1 and names and batch_size is not None and batch_size < _SMALL_BATCH:
        yield Finding(
            codes.SMALL_BATCH_NORM,
            "warning",
            "module",
            f"{len(names)} batch norm layers ({names[0]} first) normalise by the {batch_size} "
            f"samples of one rank instead of the {ranks * batch_size} of the global batch.",
            "Set trainer.sync_batchnorm=true, or use a norm that does not look at the batch.",
        )


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    data = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
    return hashlib.blake2b(data, digest_size=8).hexdigest()
