"""`flexdecode mask`: the grid, the ranges, the reasons, the picture, and what is refused before any work."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexdecode.attention.expressions import parse_mask
from flexdecode.attention.plan import plan_tiles
from flexdecode.cli.main import main
from flexdecode.cli.picture import Grid

STREAMING = "causal & (window(4096) | sinks(4))"


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["mask", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_few_tokens_are_drawn_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "causal & (window(2) | sinks(1))", "--length", "5")
    assert lines[:2] == ["causal() & (window(2) | sinks(1))", "all queries against 5 keys"]
    assert lines[3:8] == ["0 █····", "1 ██···", "2 ███··", "3 █·██·", "4 █··██"]
    assert lines[8] == "█ seen   · hidden   (a row is 1 query, a column 1 key)"
    assert "12 of 25 pairs of query and key are visible (48.0%)" in lines


def test_blocks_are_drawn_and_counted_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "causal & window(64)", "--length", "512")
    assert lines[3:7] == ["  0 ▒▒······", "128 ·▒▒▒····", "256 ···▒▒▒··", "384 ·····▒▒▒"]
    assert lines[7] == "█ full   ▒ partial   · skipped   (a row is 128 queries, a column 64 keys)"
    assert lines[-1] == "  skipped        21   65.6%  12 by causal(); 9 by window(64)"


@pytest.mark.parametrize("columns", [20, 80, 300])
def test_a_large_grid_fits_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = told(capsys, STREAMING, "--length", "30000")
    end = next(i for i, line in enumerate(lines) if "█ full" in line)
    grid = lines[3:end]
    assert 0 < len(grid) <= 32
    assert {len(line) for line in grid} == {len(grid[0])}
    assert len(grid[0]) <= min(columns, 64 + 6)


def test_one_query_is_told_as_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, STREAMING, "--length", "8192", "--at", "8191")
    assert "sees 4,100 of 8,192 keys (50.0%): 0-3, 4096-8191" in lines
    assert "hidden by window(4096), sinks(4): 4-4095" in lines
    assert lines[1] == "the query at 8191 against 8192 keys"
    lines = told(capsys, "causal & window(3)", "--length", "9", "--at", "4")
    assert lines[3] == "4 ··███····"
    assert "sees 3 of 9 keys (33.3%): 2-4" in lines
    assert "hidden by window(3): 0-1" in lines
    assert "hidden by causal(): 5-8" in lines
    assert "sees 0 of 5 keys (0.0%): none" in told(capsys, "causal & ~causal", "--length", "5", "--at", "4")


def test_many_ranges_are_shortened_for_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["dilated(40, 3)", "--length", "200", "--at", "199"]
    (line,) = [line for line in told(capsys, *argv) if line.startswith("sees")]
    assert line.endswith(": 82, 85, 88, 91, 94, 97, … 184, 187, 190, 193, 196, 199 (40 ranges)")
    keys = json.loads("".join(told(capsys, *argv, "--json")))["keys"]
    assert [k["first"] for k in keys if k["state"] == "full"] == list(range(82, 200, 3))


def test_json_holds_the_blocks_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = told(capsys, "causal & (window(100) | sinks(4))", "--length", "700", "--json")
    data: dict[str, Any] = json.loads(line)
    tiles = plan_tiles(parse_mask(data["mask"]), np.arange(700), 700, heads=1, kv_heads=1)
    assert len(data["tiles"]) == len(tiles)
    for shown, tile in zip(data["tiles"], tiles, strict=True):
        assert shown["queries"] == [int(tile.q_idx_Q[0]), int(tile.q_idx_Q[-1])]
        read = [
            (n, span["state"])
            for span in shown["blocks"]
            if span["state"] != "skipped"
            for n in range(span["first"], span["last"] + 1)
        ]
        planned = zip(tile.seen.blocks_N.tolist(), tile.seen.bits_at_N.tolist(), strict=True)
        assert read == [(n, "full" if at < 0 else "partial") for n, at in planned]
    assert data["keys_read"] == sum(len(tile.keys_L()) for tile in tiles)
    assert sum(data["blocks"].values()) == len(tiles) * 11
    assert {tuple(x["by"]) for x in data["decided"]["skipped"]} == {("causal()",), ("window(100)", "sinks(4)")}
    assert "keys" not in data


def test_heads_that_differ_are_named_and_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    mask = "causal & per_head([window(64), window(200), window(64), window(64)])"
    lines = told(capsys, mask, "--length", "640", "--at", "639")
    assert lines[1] == "the query at 639 against 640 keys, head 0 of 4"
    assert lines[2] == "heads 0, 2-3: 10.0% of the pairs visible (--head 0 shows it)"
    assert lines[3] == "head 1: 31.2% of the pairs visible (--head 1 shows it)"
    assert "sees 64 of 640 keys (10.0%): 576-639" in lines
    lines = told(capsys, mask, "--length", "640", "--at", "639", "--head", "1", "--heads", "4")
    assert lines[1] == "the query at 639 against 640 keys, head 1 of 4"
    assert "sees 200 of 640 keys (31.2%): 440-639" in lines
    alike = told(capsys, "per_head([causal, causal])", "--length", "9")
    assert alike[1] == "all queries against 9 keys"


def test_a_function_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def even(b, h, q_idx, kv_idx):\n    return (kv_idx % 2 == 0) & (h < 2)\n")
    lines = told(capsys, f"{file}:even", "--length", "6", "--at", "3", "--heads", "3")
    assert lines[0] == "mask(even)"
    assert lines[2:4] == [
        "heads 0-1: 50.0% of the pairs visible (--head 0 shows it)",
        "head 2: 0.0% of the pairs visible (--head 2 shows it)",
    ]
    assert "hidden by mask(even): 1, 3, 5" in lines


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["causal", "--length", "0"], "--length is 0"),
        (["causal", "--length", "8", "--at", "8"], "--at 8 is no position .* 0 to 7"),
        (["causal", "--length", "8", "--at", "-1"], "--at -1"),
        (["causal", "--length", "8", "--heads", "0"], "--heads is 0"),
        (["causal", "--length", "8", "--heads", "2", "--head", "2"], "--head 2 is none of 2 query heads"),
        (["causal", "--length", "8", "--head", "-1"], "--head -1"),
        (
            ["per_head([causal])", "--length", "8", "--heads", "4"],
            "per_head.. has 1 masks, and there are 4 query heads",
        ),
        (["widnow(4)", "--length", "8"], "did you mean window"),
        (["causal", "--length", "8", "--png", "absent/x.png"], "there is no folder absent"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["mask", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(words, err)


@pytest.mark.parametrize(
    "argv", [["causal & window(9)", "--length", "40"], [STREAMING, "--length", "9000", "--at", "5"]]
)
def test_a_picture_is_drawn_beside_the_text_and_always_the_same(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("a.png", "b.picture")]
    lines = [told(capsys, *argv, "--png", str(file)) for file in files]
    assert lines[0] == lines[1] == told(capsys, *argv)
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(b"\x89PNG\r\n")
    assert first == second
    assert len(first) < 30_000


def test_without_matplotlib_the_remedy_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["mask", "causal", "--length", "8", "--png", str(tmp_path / "x.png")]) == 1
    assert "pip install flexdecode[plot]" in capsys.readouterr().err
    assert main(["mask", "causal", "--length", "8"]) == 0


def test_a_terminal_without_block_characters_tells_the_states_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["mask", "causal & window(64)", "--length", "256"]) == 0
    out.flush()
    lines = out.buffer.getvalue().decode("ascii").splitlines()  # type: ignore[attr-defined]
    assert lines[3:5] == ["  0 ++..", "128 .+++"]


def test_cells_that_differ_become_partial() -> None:
    states = np.array([[2, 2, 0, 0, 0], [2, 2, 0, 1, 0], [2, 0, 0, 0, 2]])
    small = Grid(states, 128, 64).at_most(2, 3)
    assert (small.row, small.column) == (256, 128)
    assert small.states.tolist() == [[2, 1, 0], [1, 0, 2]]
    assert Grid(states, 1, 1).at_most(3, 5).states is states
    row = Grid(states[2:], 1, 64, 7).at_most(9, 2)
    assert (row.row, row.column, row.first, row.states.tolist()) == (1, 192, 7, [[1, 1]])
