"""The tests, laid out like the package; `ranks.py` runs functions on real ranks."""
