"""One pitfall."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One pitfall, from what the user sees to the test that shows it closed.

    Attributes:
        code: The family's letter and a number: 01 to 19 is the error class of that code, from 20
            on there is none (a warning of the library may carry the code).
        title: What goes wrong, in a few words.
        symptom: What the user sees, mostly in torch's own words.
        patterns: Regular expressions for messages that a user may paste; upper and lower case do
            not matter, and one space stands for any white space.
        cause: Why it happens.
        remedy: What minitrainer does about it.
        fix: What is left for the user to do; empty when nothing is.
        component: What does it, as an importable dotted name.
        test: The test that shows it closed, as pytest names it.
        plain: The test in which plain torch falls in; None where there is no such test.
        rows: The rows of the two audited guides (A, B) and of what they leave out (C).
        unproven: What no test on a CPU can show, and what a run on GPUs would; None when nothing.
    """

    code: str
    title: str
    symptom: str
    cause: str
    remedy: str
    component: str
    test: str
    fix: str = ""
    patterns: tuple[str, ...] = ()
    plain: str | None = None
    rows: tuple[str, ...] = ()
    unproven: str | None = None
