"""Where the rows of a benchmark of a model go: to stdout in the form that was asked for, to a file, and into a plot.

Knows no benchmark. Rows are JSON lines in the file, which is written under a name ending in .part until the run ends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flexdecode.cli.options import OUTPUT
from flexdecode.cli.output import write_text
from flexdecode.cli.picture import check_drawing
from flexdecode.cli.text import note
from flexdecode.cli.verb import option

Out = Annotated[
    Path | None,
    option("--out", help="Write the rows here, too; a whole run replaces the file.", panel=OUTPUT, show_default=False),
]
Form = Annotated[
    str, option("--format", "-o", metavar="md|csv|json|jsonl", help="How the rows are printed.", panel=OUTPUT)
]
Plot = Annotated[
    Path | None,
    option("--plot", metavar="FILE.png", help="Draw tokens/s against the context.", panel=OUTPUT, show_default=False),
]


class RowFile:
    """JSON lines, row by row. A run that ends well puts them in the place of `path`; one that does not leaves what it
    has measured beside it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._part = None if path is None else path.with_name(path.name + ".part")
        self._file = None if self._part is None else self._part.open("w", encoding="utf-8")
        self._count = 0

    def add(self, line: str) -> None:
        self._count += 1
        if self._file is not None:
            self._file.write(line)
            self._file.flush()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is None or self._part is None or self._path is None:
            return
        self._file.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            note(f"broken off: the rows measured so far ({self._count}) are in {self._part}")


@dataclass(frozen=True)
class ReportOptions:
    """Where rows go, and how they look."""

    form: Form = "md"
    out: Out = None
    plot: Plot = None

    def check(self) -> None:
        """Before any long work. Raises ValueError for a form that is not known and a plot that cannot be drawn."""
        if self.form not in ("md", "csv", "json", "jsonl"):
            raise ValueError(f"--format {self.form!r} is not known (known: md, csv, json, jsonl)")
        if self.plot is not None:
            check_drawing(self.plot, "--plot")

    def write(self, rows: Iterable[dict[str, Any]], json: bool) -> None:
        """Take the rows as they are measured; what has come is shown even where the rest does not. Raises ValueError,
        after everything is written, where some rows failed."""
        from flexdecode.benchmark.report import json_line, lines, progress, render

        form = "json" if json else self.form
        found: list[dict[str, Any]] = []
        with RowFile(self.out) as file:
            try:
                for row in rows:
                    found.append(row)
                    file.add(json_line(row))
                    if form == "jsonl":
                        write_text(json_line(row))
                    elif sys.stderr.isatty():
                        note(progress(row))
            finally:
                if found and form != "jsonl":
                    write_text(render(found, form))
        failed = sum("failure" in row for row in found)
        if self.plot is not None and failed < len(found):
            from flexdecode.cli.plot import draw_lines

            draw_lines(self.plot, lines(found), found[0]["model"])
        if failed:
            raise ValueError(f"{failed} of {len(found)} rows failed; each says why")
