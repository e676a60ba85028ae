"""The nearest right name, for messages about a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that looks most like `name`, None when none does."""
    # Compared without case and underscores, so that maxEpochs finds max_epochs.
    folded = {_fold(candidate): candidate for candidate in sorted(names, reverse=True)}
    found = difflib.get_close_matches(_fold(name), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing when no name is near."""
    found = nearest(name, names)
    return f"; did you mean {found}?" if found is not None else ""


def _fold(name: str) -> str:
    return name.lower().replace("_", "")
