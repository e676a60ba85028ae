"""Where metrics go: one logger per file, none importing another."""

from minitrainer.loggers.csv import CSVLogger

__all__ = ["CSVLogger"]
