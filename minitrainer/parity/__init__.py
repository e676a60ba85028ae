"""Does a recipe compute the same on one process, on many ranks and by accumulation; if not, why."""

from minitrainer.parity.report import Report, compare_layouts

__all__ = ["Report", "compare_layouts"]
