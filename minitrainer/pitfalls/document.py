"""docs/pitfalls.md, written from the catalogue."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from minitrainer.pitfalls.catalogue import ENTRIES, FAMILIES
from minitrainer.pitfalls.entry import Entry
from minitrainer.pitfalls.rows import ROWS, ROWS_WITHOUT_ENTRY

_OPENING = """\
# Pitfalls

What goes wrong in distributed training with plain torch, and what closes it here. This page is
written from the catalogue by `python -m minitrainer.pitfalls > docs/pitfalls.md`; a test keeps the
two in step.

`python -m minitrainer explain` lists the entries, `explain S02` prints one, and
`explain "a message"` finds those that a message of torch, NCCL or minitrainer belongs to
(`explain -` reads it from standard input).

The first letter of a code is its family. 01 to 19 are errors that minitrainer raises. From 20 on
there are pitfalls that it closes without a word, with a warning that carries the code, or by a
command that finds them. *Proof* names the test of what closes it, and *plain torch* the one in
which torch by itself falls in, on CPU and gloo.
"""

_ROWS = """\
## Two guides, audited

Two popular guides to DDP were read row by row: A is about pitfalls from the environment to saving,
B about four GPUs and their use; C is what both leave out. Each row has entries here, or a reason
why it has none.
"""


def document() -> str:
    """Return the text of docs/pitfalls.md."""
    lines = [_OPENING, "## Contents"]
    for letter, family in FAMILIES.items():
        titles = [f"[{entry.code}](#{entry.code.lower()}) {entry.title}" for entry in _of(letter)]
        lines += ["", f"**{family}**", "", *(f"- {title}" for title in titles)]
    for letter, family in FAMILIES.items():
        lines += ["", f"## {family}"]
        for entry in _of(letter):
            lines += ["", *_section(entry)]
    lines += ["", _ROWS, *_covered(), "", "| without entry | reason |", "|---|---|"]
    lines += [f"| {row} | {ROWS_WITHOUT_ENTRY[row]} |" for row in ROWS if row in ROWS_WITHOUT_ENTRY]
    return "\n".join(lines) + "\n"


def plain_text(entry: Entry) -> str:
    """Return an entry as a terminal shows it, without a newline at its end."""
    parts = [f"{entry.code}  {entry.title}"]
    parts += [f"{name}\n{_indented(text)}" for name, text in _paragraphs(entry)]
    parts += [f"component  {entry.component}\nproof      {entry.test}"]
    if entry.plain is not None and entry.plain != entry.test:
        parts[-1] += f"\n           {entry.plain} (plain torch)"
    return "\n\n".join(parts)


def _of(letter: str) -> list[Entry]:
    return [entry for entry in ENTRIES if entry.code[0] == letter]


def _section(entry: Entry) -> Iterator[str]:
    yield f'### <a id="{entry.code.lower()}"></a>{entry.code} {entry.title}'
    for name, text in _paragraphs(entry):
        yield f"**{name}** {_escaped(text)}"
        yield ""
    proof = f"`{entry.test}`"
    if entry.plain is not None:
        same = entry.plain == entry.test
        proof += " (both halves)" if same else f"; plain torch: `{entry.plain}`"
    yield f"**Component** `{entry.component}` · **Proof** {proof}" + (
        f" · **Rows** {', '.join(entry.rows)}" if entry.rows else ""
    )


def _paragraphs(entry: Entry) -> Iterator[tuple[str, str]]:
    yield "What you see.", entry.symptom
    yield "Why.", entry.cause
    yield "What minitrainer does.", entry.remedy
    if entry.fix:
        yield "What is left to you.", entry.fix
    if entry.unproven is not None:
        yield "Not shown on a CPU.", entry.unproven


def _indented(text: str) -> str:
    indent = "    "
    return textwrap.fill(
        text, 88, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _covered() -> Iterator[str]:
    yield "| row | entries |"
    yield "|---|---|"
    for row in ROWS:
        codes = [entry.code for entry in ENTRIES if row in entry.rows]
        if codes:
            yield f"| {row} | {', '.join(f'[{code}](#{code.lower()})' for code in codes)} |"


def _escaped(text: str) -> str:
    """Return the text with what Markdown would take for its own, code in backticks left alone."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        parts[index] = parts[index].replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
    return "`".join(parts)
