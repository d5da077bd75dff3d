"""Tokens a second against the context, drawn to a PNG file. Knows lines of points; matplotlib is loaded to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexdecode.benchmark.report import Line

_FLOOR_COLOUR = "#777777"


def draw_lines(path: Path, lines: Sequence[Line], title: str) -> None:
    """Write the lines as a PNG file; floors are dashed. Written under a name ending in .part first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(6.4, 4.0))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line in lines:
        contexts, rates = [x for x, _ in line.points], [y for _, y in line.points]
        if line.floor:
            axes.plot(contexts, rates, linestyle="--", color=_FLOOR_COLOUR, label=line.label)
        else:
            axes.plot(contexts, rates, marker="o", markersize=4, label=line.label)
    every = sorted({x for line in lines for x, _ in line.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("tokens/s")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=120, metadata={"Software": None})
    part.replace(path)
