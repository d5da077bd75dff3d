"""A mask as a picture: a grid of cells in the terminal's characters, or drawn to a PNG file.

Knows grids of states (0 skipped, 1 partial, 2 full), no mask. matplotlib is loaded only to draw.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GLYPHS = "·▒█"
_PLAIN_GLYPHS = ".+#"  # where stdout can write no others
_COLOURS = ("#e9e9ee", "#8fb4d9", "#1f5a99")
_MOST_CELLS = 512  # a side of a drawing
_INCHES = 3.4
_TITLE = 44  # characters that fit above a drawing


@dataclass(frozen=True)
class Grid:
    """States of cells, [rows, columns]. A row is `row` queries from position `first` on, a column `column` keys."""

    states: NDArray[Any]
    row: int
    column: int
    first: int = 0

    def at_most(self, rows: int, columns: int) -> Grid:
        """The grid, as many neighbours taken together as it takes to fit; those that differ are partial."""
        many = max(-(-self.states.shape[0] // rows), -(-self.states.shape[1] // columns), 1)
        if many == 1:
            return self
        import numpy as np

        low, high = self.states, self.states
        for axis in (0, 1):
            edges = np.arange(0, self.states.shape[axis], many)
            low, high = np.minimum.reduceat(low, edges, axis), np.maximum.reduceat(high, edges, axis)
        row = self.row if len(self.states) == 1 else self.row * many
        return Grid(np.where(low == high, low, 1), row, self.column * many, self.first)


def glyphs() -> str:
    """One character a state, from skipped to full, that stdout can write."""
    try:
        _GLYPHS.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN_GLYPHS
    return _GLYPHS


def grid_lines(grid: Grid) -> list[str]:
    """The grid a row a line, after the position of the row's first query."""
    drawn = glyphs()
    width = len(str(grid.first + grid.row * (len(grid.states) - 1)))
    return [
        f"{grid.first + i * grid.row:>{width}} " + "".join(drawn[state] for state in row)
        for i, row in enumerate(grid.states.tolist())
    ]


def check_drawing(path: Path, option: str = "--png") -> None:
    """Raises ValueError where `draw` could not: no matplotlib, or no such folder."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} draws with matplotlib, which is not installed: pip install flexdecode[plot]")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")


def draw(path: Path, grid: Grid, title: str, legend: Mapping[int, str]) -> None:
    """Write `grid` as a PNG file; `legend` names the states that are to be told apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    grid = grid.at_most(_MOST_CELLS, _MOST_CELLS)
    rows, columns = grid.states.shape
    figure = Figure(figsize=(_INCHES, _INCHES * max(0.35, min(1.1, rows * grid.row / (columns * grid.column) + 0.1))))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    extent = (0, columns * grid.column, grid.first + rows * grid.row, grid.first)
    axes.imshow(
        grid.states,
        cmap=ListedColormap(_COLOURS),
        vmin=0,
        vmax=2,
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_title(title if len(title) <= _TITLE else f"{title[:_TITLE]}…", fontsize=8)
    axes.set_xlabel("key", fontsize=8)
    axes.set_ylabel("query", fontsize=8)
    axes.tick_params(labelsize=7)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 8, 10]))
    handles = [Patch(facecolor=_COLOURS[state], edgecolor="#999999", label=name) for state, name in legend.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, format="png", dpi=100, metadata={"Software": None})
