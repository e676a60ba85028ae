"""`python -m minitrainer.pitfalls` writes the text of docs/pitfalls.md."""

import sys

from minitrainer.pitfalls.document import document

sys.stdout.write(document())
