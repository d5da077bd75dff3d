"""A table of numbers from 0 to 1 as a heat map in a PNG file. Knows no model; matplotlib is loaded only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_INCHES = 0.62  # a cell
_LIGHT = 0.55  # below it, writing in a cell is dark


def draw_heatmap(
    path: Path,
    cells: Sequence[Sequence[float]],
    words: Sequence[Sequence[str]],
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str, str],
) -> None:
    """Write `cells` [rows, columns], each with its word in it; `labels` are of the rows, the columns and the whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES * len(columns) + 2.2, _INCHES * len(rows) + 1.3))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(cells, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for i, line in enumerate(words):
        for j, word in enumerate(line):
            colour = "black" if cells[i][j] < _LIGHT else "white"
            axes.text(j, i, word, ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_ylabel(labels[0], fontsize=8)
    axes.set_xlabel(labels[1], fontsize=8)
    axes.set_title(labels[2], fontsize=8)
    figure.colorbar(image, ax=axes).ax.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=100, metadata={"Software": None})
