"""`python -m minitrainer`."""

from __future__ import annotations

import sys

from minitrainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
