"""How results look: JSON for programs, tables, and progress bars that only a terminal sees.

Knows plain data. Results go to stdout, progress to stderr; rich is loaded only when something is drawn.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flexdecode.memory import size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

_LABELS = {"load": "reading weights", "prefill": "reading the prompt", "lines": "answering"}
_COUNTED_IN_BYTES = {"load"}
_UNITS = {"prefill": "tokens", "lines": "lines"}


def write_text(text: str) -> None:
    """`text` to stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(data: Any, *, indent: int | None = 2) -> None:
    """One JSON value to stdout; with `indent=None` on one line. Not-a-number and infinities become null."""
    utf8 = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
    write_text(json.dumps(_plain(data), indent=indent, ensure_ascii=not utf8, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def print_report(report: Mapping[str, Any], title: str) -> None:
    """A dict as tables on stdout: plain values in one under `title`, a nested dict or list of dicts in one of its own.

    A key that is or ends in `bytes`, and everything inside such a key, is shown as a size.
    """
    console = _console()
    console.print(_pairs({k: v for k, v in report.items() if not _is_section(v)}, title))
    for key, value in report.items():
        if _is_section(value):
            console.print()
            console.print(_rows(value, key) if isinstance(value, Sequence) else _pairs(value, key))


def _is_section(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _pairs(pairs: Mapping[str, Any], title: str) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(_words(title)), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in pairs.items():
        name = key if _means_bytes(key) or not _means_bytes(title) else f"{key} bytes"
        table.add_row(Text(_words(key)), Text(_shown(name, value)))
    return table


def _rows(rows: Sequence[Mapping[str, Any]], title: str) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=Text(_words(title)), title_justify="left")
    for column in columns:
        table.add_column(Text(_words(column)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_shown(column, row.get(column, ""))) for column in columns))
    return table


def _means_bytes(key: str) -> bool:
    return key == "bytes" or key.endswith(("_bytes", " bytes")) or key.startswith("bytes_")


def _words(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix(" bytes").replace("_", " ")


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, (Mapping, list, tuple)) and not value:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return size(value) if _means_bytes(key) else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(str(name), item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(key, item) for item in value)
    return str(value)


def _console() -> Console:
    from rich.console import Console

    # A pipe or a file has no width: a long value belongs on one line there.
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False)


class Bars:
    """The `progress` callable of LLM, drawn as bars on stderr. Draws nothing unless stderr is a terminal,
    and leaves nothing behind: a bar goes away when its work is done."""

    def __init__(self) -> None:
        self._wanted = sys.stderr is not None and sys.stderr.isatty()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, kind: str, done: int, total: int, more: str = "") -> None:
        """`more` stands behind the figures."""
        if not self._wanted:
            return
        if done >= total:
            self._finish(kind)
            return
        if self._progress is None:
            self._progress = _new_progress()
            self._progress.start()
        if kind in _COUNTED_IN_BYTES:
            shown = f"{size(done)} of {size(total)}{more}"
        else:
            shown = f"{done:,} of {total:,} {_UNITS[kind]}{more}"
        if kind in self._tasks:
            self._progress.update(self._tasks[kind], completed=done, total=total, shown=shown)
        else:
            label = _LABELS.get(kind, kind)
            self._tasks[kind] = self._progress.add_task(label, completed=done, total=total, shown=shown)

    def _finish(self, kind: str) -> None:
        task = self._tasks.pop(kind, None)
        if self._progress is not None and task is not None:
            self._progress.remove_task(task)
            if not self._tasks:
                self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._tasks.clear()

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _new_progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
