"""The rows of two popular guides that were audited, and those that have no entry.

Guide A is about pitfalls from the environment to saving, guide B about four GPUs and their use;
part C is what both leave out. The rows themselves are not repeated here.
"""

ROWS: tuple[str, ...] = (
    *(f"A{number}" for number in range(1, 18)),
    *(f"B{number}" for number in range(38)),
    *(f"C{number}" for number in range(1, 9)),
)

ROWS_WITHOUT_ENTRY: dict[str, str] = {
    "B0": (
        "Use of a GPU in percent is the share of time in which any kernel runs, a hung one "
        "included. No pitfall of a run but of its measure; open: a report of throughput and of "
        "the time that steps wait for data and for other ranks."
    ),
    "B2": (
        "Looking at versions, devices and drivers by hand. Nothing to fall into; `python -m "
        "minitrainer doctor` prints them (nvcc is not among them: torch's wheels do not need it)."
    ),
    "B3": "The version of torch: the package's metadata asks for it, and pip refuses an older one.",
    "B16": (
        "How much mixed precision saves depends on the model. A number to be measured and not a "
        "pitfall; open: a command that measures it."
    ),
    "B26": "Watching nvidia-smi; open like B0.",
    "B27": "A table of numbers without hardware, batch and data: nothing to fall into.",
    "B28": "A claim that the table in B27 does not bear out: nothing to fall into.",
    "B36": "A claim about costs: nothing to fall into.",
    "B37": "Three numbers for the same thing: nothing to fall into.",
}
"""Why a row has no entry."""
