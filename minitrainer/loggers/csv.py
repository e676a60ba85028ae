"""`CSVLogger`: one file, one row per optimizer step that has something to tell."""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from minitrainer.errors import LogError, SettingError

_logger = logging.getLogger(__name__)

_STEP = "step"
_HYPERPARAMETERS = "hparams.yaml"


class CSVLogger:
    """Write metrics to a CSV file in the run directory, and hyperparameters to `hparams.yaml`.

    The first column is `step`, the others are the metrics in the order they appeared in; a cell is
    empty where a step has no value. Numbers are written so that reading them gives the same number
    again; NaN and infinities as `nan`, `inf` and `-inf`. Each row is handed to the system at once,
    so a killed run leaves all of them.

    A metric that appears later gets a column of its own: the file is written anew beside the old
    one and renamed.

    Args:
        filename: Name of the file in the run directory.

    Raises:
        SettingError: `filename` is not the name of a file.
        LogError: During a run: the file cannot be written.
    """

    def __init__(self, *, filename: str = "metrics.csv") -> None:
        if filename in ("", ".", "..") or Path(str(filename)).name != filename:
            raise SettingError(
                f"{type(self).__name__} got filename={filename!r}.",
                fix="Give a name without a folder; the file is in the run directory.",
            )
        self._filename = filename
        self._path = Path(filename)
        self._file: BinaryIO | None = None
        self._columns: list[str] = [_STEP]
        self._last: dict[str, str] = {}
        self._last_at = self._size = 0
        self._told = False

    def start(self, run_dir: Path, *, resume_step: int | None) -> None:
        """Open the file; with `resume_step`, drop rows after that global_step and go on."""
        self.finish()
        self._path = run_dir / self._filename
        rows = [] if resume_step is None else _read_rows(self._path, resume_step)
        self._columns = list(rows[0]) if rows else [_STEP]
        self._write_anew(rows)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one row; metrics of the step of the row before join that row."""
        row = {_STEP: str(step), **{name: _number(value) for name, value in metrics.items()}}
        if row[_STEP] != str(step):
            row[_STEP] = str(step)
            if not self._told:
                _logger.warning(
                    "[T28] A metric called 'step' is not written: the column is global_step."
                )
                self._told = True
        assert self._file is not None, "start comes before log_metrics"
        with self._writing(self._path):
            if row[_STEP] == self._last.get(_STEP):
                row = {**self._last, **row}
                self._size = self._last_at
                self._file.seek(self._size)
                self._file.truncate()
            new = [name for name in row if name not in self._columns]
            if new:
                rows = _read_rows(self._path, None)
                self._columns += new
                self._write_anew([*rows, row])
                return
            line = self._line(row)
            self._file.write(line)
            self._file.flush()
            self._last, self._last_at = row, self._size
            self._size += len(line)

    def log_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Write the hyperparameters, plain values, as YAML."""
        import yaml  # type: ignore[import-untyped]  # not needed by runs without hyperparameters

        text = yaml.safe_dump(_simple(values), sort_keys=False, allow_unicode=True)
        path = self._path.parent / _HYPERPARAMETERS
        with self._writing(path):
            path.write_text(text, encoding="utf-8")

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            with self._writing(self._path):
                self._file.close()
            self._file = None

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):
                    file.close()
            raise LogError(
                f"{path} could not be written: {error.strerror}.",
                fix="Free space on the disk, or make the folder writable.",
            ) from error

    def _write_anew(self, rows: list[dict[str, str]]) -> None:
        """Write a file with these rows beside the old one, and put it in its place."""
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow(self._columns)
        lines = [header.getvalue().encode(), *(self._line(row) for row in rows)]
        self._last = rows[-1] if rows else {}
        self._size = sum(map(len, lines))
        self._last_at = self._size - len(lines[-1])
        with self._writing(self._path):
            temporary = self._path.with_name(f".{self._path.name}.tmp{os.getpid()}")
            try:
                temporary.write_bytes(b"".join(lines))
                temporary.replace(self._path)
            finally:
                temporary.unlink(missing_ok=True)
            if self._file is not None:
                self._file.close()
            self._file = self._path.open("r+b")
            self._file.seek(self._size)

    def _line(self, row: dict[str, str]) -> bytes:
        # Numbers need no quotes; only names do.
        return (",".join([row.get(name, "") for name in self._columns]) + "\n").encode()


def _read_rows(path: Path, last_step: int | None) -> list[dict[str, str]]:
    """Return the whole rows of the file, up to a step."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    # What follows the last line end is a row that was cut off by a kill.
    lines = list(csv.reader(text.split("\n")[:-1]))
    header = lines[0] if lines else []
    if header[:1] != [_STEP]:
        return []
    return [
        dict(zip(header, cells, strict=True))
        for cells in lines[1:]
        if len(cells) == len(header)
        and cells[0].isdecimal()
        and (last_step is None or int(cells[0]) <= last_step)
    ]


def _number(value: Any) -> str:
    return repr(value) if type(value) in (int, float) else repr(float(value))


def _simple(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _simple(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_simple(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
