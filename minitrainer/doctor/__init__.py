"""What is wrong before the first step: with this machine, or with a hand-written DDP script.

Every part hands out `Finding`s and prints nothing. Reading a script needs no torch, so nothing
that imports it is imported here.
"""

from minitrainer.doctor.finding import Finding, Severity

__all__ = ["Finding", "Severity"]
