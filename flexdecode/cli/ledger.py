"""The output of `flexdecode batch`: rows that are appended one by one, and found again by the next run.

Knows rows, no model. A run holds a lock on its file. Whatever ends it leaves whole rows and at most one that is
half written, which the next run cuts off. Nothing in a file is touched before all of it has been understood.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from flexdecode.cli.intake import Known
from flexdecode.cli.output import write_text
from flexdecode.cli.rows import BEGINNINGS, Answered, Key, read_row


class Writer(Protocol):
    """Where rows go."""

    def write(self, row: Mapping[str, Any]) -> None: ...


class Stdout:
    """Rows to stdout, each at once."""

    def write(self, row: Mapping[str, Any]) -> None:
        write_text(_encoded(row, plain=not _speaks_utf8()).decode())


class Ledger:
    """Rows in a file. `done` and `failed` hold the keys of the rows that were there when it was opened.

    known: for each key of the input its line and digest. A row of the file that answers no line of it, or a line that
    asked something else, is a ValueError, as is a file that another run is writing. With `retry_errors` the rows of
    failed lines are taken out, and `failed` is empty. Closed before its first row, a new file goes away.
    """

    def __init__(self, path: Path, source: str, known: Known, retry_errors: bool) -> None:
        self._path, self._source = Path(os.path.realpath(path)), source
        self._is_new, self._asked = not self._path.exists(), bool(known)
        self.done: set[Key] = set()
        self.failed: set[Key] = set()
        self._file = _open_locked(self._path)
        try:
            end = self._read(known, retry_errors)
            if os.fstat(self._file).st_size > end:
                os.ftruncate(self._file, end)
            if retry_errors and self.failed:
                self._drop_failed()
        except BaseException:
            os.close(self._file)
            raise

    def write(self, row: Mapping[str, Any]) -> None:
        data = memoryview(_encoded(row))
        while data:
            data = data[os.write(self._file, data) :]

    def _read(self, known: Known, retry_errors: bool) -> int:
        """Takes up the rows that are there; the place where the last whole one ends."""
        end, seen = 0, dict[Key, int]()
        with open(self._path, "rb") as rows:
            for number, data in enumerate(rows, start=1):
                if not data.endswith(b"\n"):
                    if not (data.startswith(BEGINNINGS) or any(start.startswith(data) for start in BEGINNINGS)):
                        raise self._foreign(number)
                    break
                row = read_row(data)
                if row is None:
                    raise self._foreign(number)
                self._check(row, number, known, seen, retry_errors)
                seen[row.key] = number
                (self.failed if row.failed else self.done).add(row.key)
                end += len(data)
        return end

    def _foreign(self, number: int) -> ValueError:
        return ValueError(
            f"{self._path}:{number} is no row of `flexdecode batch`, so nothing can be added; name another file"
        )

    def _check(
        self,
        row: Answered,
        number: int,
        known: Known,
        seen: Mapping[Key, int],
        retry_errors: bool,
    ) -> None:
        where = f"{self._path}:{number} answers id {row.key!r}"
        if row.key in seen:
            raise ValueError(f"{where}, and so does line {seen[row.key]}; take one of them out")
        if row.key not in known:
            if retry_errors and row.failed and isinstance(row.key, int):
                return  # a line that could not be read then, and may have an id of its own by now
            hint = "--retry-errors drops it" if row.failed and isinstance(row.key, int) else "name another file"
            raise ValueError(f"{where}, which {self._source} does not have; {hint} for this input")
        line, digest = known[row.key]
        if not row.failed and row.digest != digest:
            raise ValueError(
                f"{where}, and line {line} of {self._source} asks something else by now; take the row out, or name "
                "another file for this input"
            )

    def _drop_failed(self) -> None:
        """The file without the rows of failed lines, made beside it and then put in its place, locked throughout."""
        beside = self._path.with_name(f".{self._path.name}.new")
        other = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            os.fchmod(other, stat.S_IMODE(os.fstat(self._file).st_mode))
            with open(self._path, "rb") as rows, open(other, "wb", closefd=False) as kept:
                for data in rows:
                    row = read_row(data)
                    if row is not None and not row.failed:
                        kept.write(data)
            os.fsync(other)
            os.rename(beside, self._path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            os.close(other)
            raise
        os.close(self._file)
        self._file = other
        self.failed = set()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_new and self._asked and os.fstat(self._file).st_size == 0:
            os.unlink(self._path)
        os.close(self._file)


def _open_locked(path: Path) -> int:
    """The file, open for appending and locked. Raises ValueError where that cannot be."""
    while True:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ValueError(f"{path} is no ordinary file; - writes to stdout")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another run may have put a new file in its place before it let go of this one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BlockingIOError:
            os.close(file)
            raise ValueError(f"{path} is being written by another run; wait for it, or name another file") from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _encoded(row: Mapping[str, Any], plain: bool = False) -> bytes:
    """One line. Text that is no valid Unicode (half of a surrogate pair, in an id) is escaped."""
    try:
        return json.dumps(row, ensure_ascii=plain, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return _encoded(row, plain=True)


def _speaks_utf8() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
