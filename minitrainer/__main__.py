"""`python -m minitrainer`, and the console script."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from minitrainer.cli import main


def run() -> NoReturn:
    """Run the command line and end the process.

    What the interpreter does at its end is done here, but for taking the modules apart: with torch
    that takes 0.3 s, and where DDP has run over gloo it now and then aborts ("terminate called
    without an active exception"), which would turn a run that has done its work into a failed one.
    """
    code = main()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
