"""The catalogue of DDP pitfalls: what each looks like, why it happens, what closes it, the proof.

It is plain text about the rest of the package, which it names but never imports, so that
`python -m minitrainer explain` answers at once. `python -m minitrainer.pitfalls` writes
docs/pitfalls.md.
"""

from minitrainer.pitfalls.catalogue import ENTRIES, FAMILIES, find, match, nearest
from minitrainer.pitfalls.entry import Entry

__all__ = ["ENTRIES", "FAMILIES", "Entry", "find", "match", "nearest"]
