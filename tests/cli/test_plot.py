"""Lines drawn to a file, all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode.benchmark.report import Line
from flexdecode.cli.plot import draw_lines

LINES = [Line("cpu", ((1024, 30.0), (4096, 20.0))), Line("floor", ((1024, 40.0), (4096, 35.0)), floor=True)]


@pytest.mark.parametrize("lines", [LINES, [Line("cpu", ((96, 3.0),))], []])
def test_a_picture_is_drawn_and_nothing_else(lines: list[Line], tmp_path: Path) -> None:
    draw_lines(tmp_path / "speed.png", lines, "random:tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["speed.png"]
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_every_line_is_named_and_floors_are_dashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn = []
    plot = Axes.plot

    def spy(self: Axes, *arguments: object, **options: object) -> object:
        drawn.append((options["label"], options.get("linestyle")))
        return plot(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Axes, "plot", spy)
    draw_lines(tmp_path / "speed.png", LINES, "m")
    assert drawn == [("cpu", None), ("floor", "--")]


def test_a_drawing_that_fails_leaves_no_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fails)
    with pytest.raises(OSError, match="disk full"):
        draw_lines(tmp_path / "speed.png", LINES, "m")
    assert not (tmp_path / "speed.png").exists()
