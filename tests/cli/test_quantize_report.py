"""Tables and pictures of a quantization, from its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli import quantize_report as shown


def record(module: str, input_: str, **values: Any) -> dict[str, Any]:
    base = {"module": module, "input": input_, "before": None, "after": None, "ratio": None, "clipped": None}
    return base | values


RECORDS = [
    record("model.layers.0.self_attn.q_proj", "qkv", before=0.1, after=0.06, ratio=0.5, clipped=0.0),
    record("model.layers.0.self_attn.v_proj", "qkv", before=0.2, after=0.08, ratio=0.5, clipped=0.5),
    record("model.layers.0.mlp.experts.0.w1", "experts.0.gate_up", before=0.1, after=0.1),
    record("model.layers.0.mlp.experts.1.w1", "experts.1.gate_up", before=0.1, after=0.3),
    record("model.layers.0.mlp.gate", "router"),
    record("model.layers.10.self_attn.q_proj", "qkv", before=0.1, after=0.05),
    record("model.layers.2.self_attn.q_proj", "qkv", before=0.1, after=0.05),
]


def test_a_row_an_input_experts_together() -> None:
    table = shown.rows(RECORDS)
    assert [(row["layer"], row["matrices"]) for row in table] == [(0, "qkv"), (0, "gate_up"), (2, "qkv"), (10, "qkv")]
    assert table[0] == {
        "layer": 0, "matrices": "qkv", "plain rounding": "15.00 %", "error": "7.00 %", "ratio": "0.50",
        "clipped": "25.00 %",
    }  # fmt: skip
    assert table[1]["error"] == "20.00 %"
    assert table[1]["ratio"] == "–"


def test_what_no_matrix_has_is_no_column() -> None:
    table = shown.rows([record("model.layers.0.mlp.up_proj", "gate_up", after=0.01)])
    assert table == [{"layer": 0, "matrices": "gate_up", "error": "1.00 %"}]


def test_a_picture(tmp_path: Path) -> None:
    shown.draw(tmp_path / "a.png", RECORDS, "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="there is no folder"):
        shown.check_drawing(tmp_path / "none" / "a.png")


def test_lines_tell_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with shown.LayerBar(lines=True) as bar:
        bar(3, 5)
        bar(4, 5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "layer 3 of 5"
    assert lines[1].startswith("layer 4 of 5, about ")
    with shown.LayerBar(lines=False) as bar:
        bar(1, 5)
    assert capsys.readouterr().err == ""
