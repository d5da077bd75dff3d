"""How a quantization looks: a bar over layers, errors as a table a layer a row, and as a picture.

Knows records as plain dicts (`Record.as_dict`). matplotlib and rich are loaded only to draw.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flexdecode.cli.text import note

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"experts\.\d+\.")


class LayerBar:
    """Called with (layers done, in all): a bar with the time left where stderr is a terminal, else with `lines` a line
    a layer, else nothing."""

    def __init__(self, lines: bool) -> None:
        self._bar = sys.stderr is not None and sys.stderr.isatty()
        self._lines = lines and not self._bar
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._begun: tuple[float, int] | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self._begun is None:
            self._begun = (now, done)
        if self._lines:
            since, first = self._begun
            left = f", about {(now - since) / (done - first) * (total - done):.0f} s left" if done > first else ""
            note(f"layer {done} of {total}{left}")
        if self._bar:
            self._draw(done, total)

    def _draw(self, done: int, total: int) -> None:
        if self._progress is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("quantizing layers"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(file=sys.stderr),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=total, completed=done)
        self._progress.update(self._task, completed=done)

    def __enter__(self) -> LayerBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def place(matrix: Mapping[str, Any]) -> tuple[int, str]:
    """(layer, input) of a matrix, experts of a layer taken together."""
    match = _LAYER.fullmatch(matrix["module"])
    assert match is not None
    return int(match[1]), _EXPERT.sub("", matrix["input"])


def means(matrices: Sequence[Mapping[str, Any]], key: str) -> dict[tuple[int, str], float]:
    """`key` by layer and input, the mean over the matrices that have it."""
    found: dict[tuple[int, str], list[float]] = {}
    for matrix in matrices:
        if matrix[key] is not None:
            found.setdefault(place(matrix), []).append(matrix[key])
    return {where: sum(values) / len(values) for where, values in found.items()}


def rows(matrices: Sequence[Mapping[str, Any]]) -> list[dict[str, str | int]]:
    """A row an input of a layer: the relative error of what its matrices make of it, that of plain rounding before it
    where there is one, the ratio of the scale, and the share of groups clipped."""
    shown = {"plain rounding": ("before", 100, " %"), "error": ("after", 100, " %"), "ratio": ("ratio", 1, "")}
    shown["clipped"] = ("clipped", 100, " %")
    columns = {name: (means(matrices, key), factor, unit) for name, (key, factor, unit) in shown.items()}
    table: list[dict[str, str | int]] = []
    for where in sorted({place(m): None for m in matrices if m["after"] is not None}, key=lambda where: where[0]):
        row: dict[str, str | int] = {"layer": where[0], "matrices": where[1]}
        for name, (values, factor, unit) in columns.items():
            if values:
                row[name] = f"{factor * values[where]:.2f}{unit}" if where in values else "–"
        table.append(row)
    return table


def check_drawing(path: Path) -> None:
    """Raises ValueError where `draw` could not: no matplotlib, or no such folder."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png draws with matplotlib, which is not installed: pip install flexdecode[plot]")
    if not path.parent.is_dir():
        raise ValueError(f"--png {path}: there is no folder {path.parent}")


def draw(path: Path, matrices: Sequence[Mapping[str, Any]], title: str) -> None:
    """Errors over layers, a colour a matrix: solid as saved, dotted for plain rounding."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3.6))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    before, after = means(matrices, "before"), means(matrices, "after")
    for number, name in enumerate(dict.fromkeys(name for _, name in after)):
        for values, style in ((after, "-"), (before, ":")):
            layers = {layer: 100 * value for (layer, of), value in values.items() if of == name}
            label = name if values is after else None
            axes.plot(list(layers), list(layers.values()), style, color=f"C{number}", label=label, linewidth=1.4)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel("relative error, %" + (" (dotted: plain rounding)" if before else ""), fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=7, frameon=False, ncols=2)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
