"""All entries, and how to find one."""

from __future__ import annotations

import difflib
import re

from minitrainer.pitfalls import (
    checkpoint,
    data,
    launch,
    performance,
    precision,
    recipe,
    sync,
    training,
)
from minitrainer.pitfalls.entry import Entry

FAMILIES = {
    "L": "Launch",
    "D": "Data",
    "S": "Sync",
    "P": "Precision",
    "C": "Checkpoint",
    "R": "Recipe and settings",
    "T": "Training",
    "F": "Performance",
}
"""The name of each family by the letter of its codes, in the order of the documentation."""

ENTRIES: tuple[Entry, ...] = tuple(
    sorted(
        (
            *launch.ENTRIES,
            *data.ENTRIES,
            *sync.ENTRIES,
            *precision.ENTRIES,
            *checkpoint.ENTRIES,
            *recipe.ENTRIES,
            *training.ENTRIES,
            *performance.ENTRIES,
        ),
        key=lambda entry: (list(FAMILIES).index(entry.code[0]), entry.code),
    )
)

_CODE = re.compile(r"\[([A-Z]\d\d)\]")


def find(code: str) -> Entry | None:
    """Return the entry with this code, None when there is none."""
    return next((entry for entry in ENTRIES if entry.code == code.upper()), None)


def match(message: str) -> list[Entry]:
    """Return the entries that a message belongs to.

    Args:
        message: One or many lines, as pasted. A code in brackets names its entry; otherwise the
            patterns of the entries, or a good part of a symptom, must occur in it.
    """
    named = [entry for code in _CODE.findall(message) if (entry := find(code))]
    if named:
        return list(dict.fromkeys(named))
    text = " ".join(message.split())
    found = [entry for entry in ENTRIES if any(_finds(p, text) for p in entry.patterns)]
    return found or [entry for entry in ENTRIES if len(text) >= 12 and _finds_text(text, entry)]


def nearest(words: str, number: int = 3) -> list[Entry]:
    """Return the entries whose title is nearest to some words, or whose code is to a code."""
    by_code = {entry.code: entry for entry in ENTRIES}
    if re.fullmatch(r"[a-zA-Z]\d+", words):
        near = difflib.get_close_matches(words.upper(), by_code, number, cutoff=0.3)
        return [by_code[code] for code in near]
    return sorted(ENTRIES, key=lambda entry: _overlap(words, entry), reverse=True)[:number]


def _finds(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


def _finds_text(text: str, entry: Entry) -> bool:
    """Return whether the text is a part of what the user is said to see, or of the title."""
    return text.lower() in f"{entry.title} {entry.symptom}".lower()


def _overlap(words: str, entry: Entry) -> tuple[int, float]:
    """Return how many words a title and symptom share with some words, and how alike they are."""
    wanted = {word for word in re.findall(r"\w+", words.lower()) if len(word) > 2}
    there = set(re.findall(r"\w+", f"{entry.title} {entry.symptom}".lower()))
    alike = difflib.SequenceMatcher(None, words.lower(), entry.title.lower()).ratio()
    return len(wanted & there), alike
