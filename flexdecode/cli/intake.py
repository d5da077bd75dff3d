"""The input of `flexdecode batch`: a file or a pipe of lines that is read twice, first for the keys alone.

Knows lines (cli/rows.py), no model.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import IO

from flexdecode.cli.rows import Key, Line, read_line

Known = Mapping[Key, tuple[int, str]]  # the number and the digest of each line


def refuse_one_file(source: str, target: str) -> None:
    """ValueError where input and output are the same file."""
    files = "-" not in (source, target) and os.path.exists(source) and os.path.exists(target)
    if files and os.path.samefile(source, target):
        raise ValueError(f"{source} is both IN and OUT; name another file for the answers")


@contextmanager
def opened(source: str) -> Iterator[IO[bytes]]:
    """The input, to be read twice: stdin, and what else is no ordinary file, is copied to a temporary one first."""
    with ExitStack() as stack:
        try:
            stream = sys.stdin.buffer if source == "-" else stack.enter_context(open(source, "rb"))
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror}") from None
        if source == "-" or not stream.seekable():
            copy = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(stream, copy)
            yield copy
        else:
            yield stream


def lines(file: IO[bytes]) -> Iterator[Line]:
    """Every line that is not blank, from the beginning."""
    file.seek(0)
    for number, data in enumerate(file, start=1):
        if number == 1:
            data = data.removeprefix(b"\xef\xbb\xbf")  # the mark that some editors put before UTF-8
        if data.strip():
            yield read_line(number, data)


def scan(file: IO[bytes], source: str) -> Known:
    """The keys of all lines. Raises ValueError where two lines share one: their rows could not be told apart."""
    known: dict[Key, tuple[int, str]] = {}
    for line in lines(file):
        if line.key in known:
            first = known[line.key][0]
            raise ValueError(
                f"{source}: lines {first} and {line.number} both have the id {line.key!r}; give each its own "
                "(a line without one has its number)"
            )
        known[line.key] = (line.number, line.digest)
    return known
