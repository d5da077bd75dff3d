"""Text that crosses the edge of the program: prompts in, answers out, whatever bytes a terminal or a pipe holds.

Knows no model. Bytes that are not UTF-8 never raise: they become U+FFFD, and a warning on stderr says so.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from pathlib import Path
from typing import TextIO

import typer

from flexdecode.config import FlexdecodeWarning


def note(message: str) -> None:
    """One line on stderr."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    note(f"flexdecode: warning: {message}")


def tolerate_encodings() -> None:
    """Lets stdout and stderr print any text, with `?` for what their encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError, OSError):
                stream.reconfigure(errors="replace")


def speak_plainly() -> None:
    """Our own warnings and news (a kernel that is being compiled) as one line each on stderr; others' as they are."""
    theirs = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is FlexdecodeWarning:
            warn(str(message))
        else:
            theirs(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    news = logging.getLogger("flexdecode")
    if not news.handlers:
        news.addHandler(_Notes())
        news.setLevel(logging.INFO)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"flexdecode: {record.getMessage()}")


def decode(data: bytes, origin: str) -> str:
    """`data` as UTF-8; wrong bytes become U+FFFD and are warned of under the name `origin`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        warn(f"{origin} is not UTF-8 (byte {error.start}); what cannot be read became U+FFFD")
        return data.decode("utf-8", errors="replace")


def clean(text: str, origin: str) -> str:
    """`text` without the lone surrogates that stand for undecodable bytes of an argument, a variable or a terminal."""
    try:
        data = text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        data = text.encode("utf-8", errors="surrogatepass")
    return decode(data, origin)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from -p TEXT, -p - (stdin) or -f FILE, exactly one of them.

    One newline at the very end of stdin or of a file is left out, as a shell's $(...) would do.
    """
    if (prompt is None) == (file is None):
        problem = "-p and -f were both given" if prompt is not None else "there is no prompt"
        raise typer.BadParameter(f"{problem}; give one of -p TEXT, -p - (reads stdin) and -f FILE")
    if file is not None and str(file) != "-":
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ValueError(f"prompt file {file}: {error.strerror or error}") from None
        return _without_last_newline(decode(data, f"prompt file {file}"))
    if prompt is not None and prompt != "-":
        return clean(prompt, "the prompt")
    return _without_last_newline(read_stdin())


def read_stdin() -> str:
    """All of stdin. Raises ValueError when there is none."""
    if sys.stdin is None:
        raise ValueError("stdin is closed, so there is no prompt to read from it")
    buffer = getattr(sys.stdin, "buffer", None)
    return clean(sys.stdin.read(), "stdin") if buffer is None else decode(buffer.read(), "stdin")


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
