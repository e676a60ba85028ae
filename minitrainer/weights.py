"""Put saved weights into a module, whatever wrapper they were saved through, and never silently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minitrainer.errors import CheckpointMismatchError

# torch.compile puts its part in front of a name wherever a module was compiled; DDP and
# DataParallel put theirs in front of all names.
_COMPILED = "_orig_mod"
_WRAPPED = "module."


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did, in names of the plain module.

    `stripped` is the prefix that was taken off all names of the file, "" when none was.
    """

    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    stripped: str

    def __str__(self) -> str:
        parts = [f"{len(self.matched)} matched"]
        parts += [f"{len(names)} {kind}{_first(names)}" for kind, names in self._problems()]
        parts += [f"prefix {self.stripped} stripped"] if self.stripped else []
        return ", ".join(parts)

    def _problems(self) -> list[tuple[str, tuple[str, ...]]]:
        return [("missing", self.missing), ("unexpected", self.unexpected)]


def plain_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's state_dict with the names it has when nothing of it is compiled.

    The tensors share their memory with the module.
    """
    saved = module.state_dict()
    state_dict = OrderedDict((_without_compiled(name), value) for name, value in saved.items())
    # The versions of the submodules; `load_state_dict` looks at them.
    state_dict._metadata = {  # type: ignore[attr-defined]
        _without_compiled(name): entry for name, entry in _metadata(saved).items()
    }
    return state_dict


def load_weights(
    module: torch.nn.Module, checkpoint: Mapping[str, Any], *, strict: bool = True
) -> LoadReport:
    """Load weights into the module, through the prefixes that DDP and torch.compile add.

    When all names of the file start with `module.` or `_orig_mod.`, nested in any order, and the
    module's own do not, these prefixes are stripped; the other way round they are added.

    Args:
        module: The module, compiled or not, wrapped or not.
        checkpoint: A checkpoint with a `state_dict`, or a state_dict.
        strict: Refuse missing and unexpected names. Shapes that differ, and a file of which no
            name fits, are refused in any case.

    Raises:
        CheckpointMismatchError: The weights do not fit. When shapes differ or no name fits, the
            module is unchanged.
    """
    saved = _find_state_dict(checkpoint)
    own = {_without_compiled(name): value for name, value in module.state_dict().items()}
    rename = _Renaming(list(saved), list(own))
    renamed = {rename(name): value for name, value in saved.items()}
    _check_shapes(own, renamed)
    if (own or renamed) and not own.keys() & renamed.keys():
        raise _mismatch(LoadReport((), tuple(own), tuple(renamed), rename.stripped))
    missing, unexpected = _load(module, renamed, rename.names(_metadata(saved)))
    matched = tuple(name for name in own if name not in missing)
    report = LoadReport(matched, missing, unexpected, rename.stripped)
    if strict and (missing or unexpected):
        raise _mismatch(report)
    return report


class _Renaming:
    """From names in the file to names of the plain module."""

    def __init__(self, saved: Sequence[str], own: Sequence[str]) -> None:
        plain = [_without_compiled(name) for name in saved]
        extra = _wrapping_depth(plain) - _wrapping_depth(own) if own else 0
        self._surplus = _WRAPPED * extra
        self._lacking = _WRAPPED * -extra
        first = saved[0] if saved else ""
        rest = self(first)
        self.stripped = first.removesuffix(rest) if first.endswith(rest) else ""

    def __call__(self, name: str) -> str:
        return self._lacking + _without_compiled(name).removeprefix(self._surplus)

    def names(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the paths of submodules, which are names without a dot at the end."""
        return {self(f"{name}.").rstrip("."): entry for name, entry in metadata.items()}


def _find_state_dict(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = checkpoint.get("state_dict")
    if isinstance(inner, Mapping):
        return inner
    if any(isinstance(value, torch.Tensor) for value in checkpoint.values()):
        return checkpoint
    raise CheckpointMismatchError(
        f"There are no weights among {', '.join(map(str, checkpoint)) or 'nothing at all'}.",
        "A checkpoint has its weights under the key state_dict.",
        'Pass {"state_dict": ...}, or the state_dict itself.',
    )


def _load(
    module: torch.nn.Module, state_dict: dict[str, Any], metadata: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    real = {_without_compiled(name): name for name in module.state_dict()}
    content = OrderedDict((real.get(name, name), value) for name, value in state_dict.items())
    content._metadata = {  # type: ignore[attr-defined]
        name: metadata[plain]
        for name, _ in module.named_modules()
        if (plain := _without_compiled(f"{name}.").rstrip(".")) in metadata
    }
    try:
        # Not strict, so that modules which rename old keys themselves have their say first.
        result = module.load_state_dict(content, strict=False)
    except RuntimeError as error:
        raise CheckpointMismatchError(
            f"The module refused the weights: {' '.join(str(error).split())}.",
            "The checkpoint was made with another module.",
            "Build the module with the arguments it was saved with.",
        ) from error
    missing, unexpected = (
        tuple(_without_compiled(name) for name in names)
        for names in (result.missing_keys, result.unexpected_keys)
    )
    return missing, unexpected


def _check_shapes(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    differing = [
        f"{name} is {tuple(saved[name].shape)} in the checkpoint and {tuple(value.shape)} here"
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
        and isinstance(saved.get(name), torch.Tensor)
        and not torch.nn.parameter.is_lazy(value)
        and saved[name].shape != value.shape
    ]
    if differing:
        raise CheckpointMismatchError(
            f"{len(differing)} of {len(own)} tensors have another shape: "
            f"{'; '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}.",
            "The checkpoint was made with other sizes.",
            "Build the module with the arguments it was saved with, or drop these tensors from "
            "the state_dict and load with strict=False.",
        )


def _mismatch(report: LoadReport) -> CheckpointMismatchError:
    fix = "Build the module with the arguments it was saved with"
    return CheckpointMismatchError(
        f"The weights do not fit the module: {report}.",
        "Weights that are not loaded stay random.",
        f"{fix}, or load with strict=False." if report.matched else f"{fix}.",
    )


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f" ({shown}{', ...' if len(names) > 5 else ''})" if names else ""


def _without_compiled(name: str) -> str:
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _wrapping_depth(names: Sequence[str]) -> int:
    """Return how many `module.` all names start with."""
    depth = 0
    while names and all(name.startswith(_WRAPPED * (depth + 1)) for name in names):
        depth += 1
    return depth


def _metadata(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = getattr(state_dict, "_metadata", None)
    return metadata if isinstance(metadata, Mapping) else {}
