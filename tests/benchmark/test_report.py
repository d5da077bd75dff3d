"""Rows as tables, CSV and lines of a plot: everything that was measured can be read, and everything that failed."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from flexdecode.benchmark.report import FORMS, Line, lines, markdown, progress, render

ORIGIN: dict[str, Any] = {"model": "random:x@int4", "threads": 2, "cpu": "Some CPU", "gpu": None, "torch": "2.13"}
ORIGIN |= {"flexdecode": "0.1", "commit": "0123456789abcdef", "dirty": False, "date": "2026-01-01"}
HELD = {"dtype": "bfloat16", "quantization": "int4 g128 (cpu)", "kv_dtype": "int8", "mask": "causal() & window(8)"}


def decoded(backend: str, context: int, rate: float, **more: Any) -> dict[str, Any]:
    own = {"benchmark": "decode", "backend": backend, "context": context, "batch": 1, "tokens_per_second": rate}
    floor = {"floor_steps_per_second": 40.0, "fraction_of_floor": rate / 40}
    return {**own, **ORIGIN, **HELD, **floor, "fill": "prefill", **more}


def failed(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: row[key] for key in row if key in ORIGIN or key in ("benchmark", "backend", "context", "batch")}
    return {**kept, "failure": "ValueError: cannot serve", **{k: row[k] for k in row if k.endswith("_length")}}


DECODE = [
    decoded("sdpa", 1024, 10.0),
    decoded("cpu", 1024, 30.0, times_sdpa=3.1),
    decoded("sdpa", 2048, 5.0),
    decoded("cpu", 2048, 20.0),
]
CELL: dict[str, Any] = {
    **ORIGIN,
    **HELD,
    "benchmark": "grid",
    "batch": 2,
    "prefill_length": 32,
    "decode_length": 64,
    "prefill_tokens_per_second": 1234.5,
    "decode_tokens_per_second": 56.78,
    "held_bytes": 3 << 30,
    "peak_bytes": 7 << 29,
    "floor_steps_per_second": 40.0,
    "fraction_of_floor": 0.71,
}
LATENCY: dict[str, Any] = {**CELL, "benchmark": "latency", "tokens_per_second": 50.0, "total_tokens_per_second": 70.0}
for _name, _ms in (("total", 730.0), ("prefill", 100.0), ("decode", 630.0)):
    LATENCY |= {f"{_name}_ms": _ms, f"{_name}_ms_q1": _ms - 63, f"{_name}_ms_q3": _ms + 63}
PREFILL: dict[str, Any] = {
    **ORIGIN,
    **HELD,
    "benchmark": "prefill",
    "context": 1024,
    "ms": 2000.0,
    "ms_q1": 1900.0,
    "ms_q3": 2100.0,
    "tokens_per_second": 512.0,
    "gflop_per_s": 700.0,
    "gemm_gflop_per_s": 900.0,
    "floor_tokens_per_second": 640.0,
    "fraction_of_floor": 0.8,
}


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_decoding_is_a_line_for_each_length_and_a_column_for_each_backend() -> None:
    head, _, *body = table(markdown(DECODE))
    assert head == "| Length | sdpa | cpu | Speedup | of floor |"
    # The ratio of rounds where both ran in turn, else of the medians.
    assert body == ["| 1024 | 10.00 | 30.00 | 3.10× | 75% |", "| 2048 | 5.00 | 20.00 | 4.00× | 50% |"]


def test_one_backend_has_no_speedup() -> None:
    assert table(markdown(DECODE[1::2]))[0] == "| Length | cpu | of floor |"


@pytest.mark.parametrize("at", [2, 3])
def test_failures_are_in_the_table_and_say_why_below_it(at: int) -> None:
    rows = list(DECODE)
    rows[at] = failed(rows[at])
    told = markdown(rows)
    assert table(told)[-1].count("failed") == (1 if at == 2 else 2)
    assert "| – |" in table(told)[-1], "no speedup over what was not measured"
    assert f"- 2048 tokens, {rows[at]['backend']}: ValueError: cannot serve" in told.splitlines()


def test_the_caption_says_what_was_measured_on_what() -> None:
    caption = markdown(DECODE).splitlines()[0]
    for words in (
        "Decode of random:x@int4",
        "weights int4 g128 (cpu)",
        "cache int8",
        "mask causal() & window(8)",
        "2 threads of Some CPU",
        "commit 0123456789,",
        "torch 2.13",
    ):
        assert words in caption
    assert "at random" not in caption
    assert "one after the other" not in caption
    apart = [row | {"in_turn": False} for row in DECODE]
    assert "backends one after the other" in markdown(apart)
    assert "one after the other" not in markdown(apart[::2]), "there is one backend"
    changed = decoded("cpu", 8, 1.0, fill="random", dirty=True, gpu="Some GPU")
    told = markdown([changed]).splitlines()[0]
    for words in ("keys and values drawn at random", "(changed)", "of Some GPU"):
        assert words in told
    assert "commit" not in markdown([decoded("cpu", 8, 1.0, commit=None)])


def test_the_grid_has_the_columns_that_its_readers_know() -> None:
    head, _, body, last = table(markdown([CELL, failed({**CELL, "batch": 4})]))
    columns = "Batch Size | Prefill Length | Decode Length | Prefill tokens/s | Decode tokens/s | Memory | of floor"
    assert head == f"| {columns} |"
    assert body == "| 2 | 32 | 64 | 1234.50 | 56.78 | 3.00 GiB held, 3.50 peak | 71% |"
    assert last == "| 4 | 32 | 64 | failed | failed | failed | failed |"
    assert "– GiB held, 3.50 peak" in markdown([CELL | {"held_bytes": None}])


def test_latency_and_prefill_tell_medians_and_quartiles() -> None:
    told = table(markdown([LATENCY]))[-1]
    assert "| 730.0 (667.0–793.0) | 100.0 (37.0–163.0) | 10.0 (9.0–11.0) | 1234.50 | 56.78 | 50.00 | 70.00 |" in told
    assert table(markdown([PREFILL]))[-1] == "| 1024 | 2000.0 (1900.0–2100.0) | 512.00 | 700.0 | 900.0 | 80% |"


def test_csv_has_every_column_of_every_row() -> None:
    rows = [DECODE[0] | {"gemm_shapes": ["1x2x3", "4x5x6"]}, DECODE[1], failed(DECODE[2])]
    found = list(csv.DictReader(io.StringIO(render(rows, "csv"))))
    assert set(found[0]) == {key for row in rows for key in row}
    assert json.loads(found[0]["gemm_shapes"]) == ["1x2x3", "4x5x6"]
    assert (found[1]["times_sdpa"], found[1]["gemm_shapes"], found[1]["gpu"]) == ("3.1", "", "")
    assert found[2]["failure"] == "ValueError: cannot serve"


def test_json_and_json_lines_are_the_rows() -> None:
    assert json.loads(render(DECODE, "json")) == DECODE
    assert [json.loads(line) for line in render(DECODE, "jsonl").splitlines()] == DECODE
    assert all(render(DECODE, form).endswith("\n") for form in FORMS)


def test_progress_is_one_line() -> None:
    assert progress(DECODE[1]) == "1024 tokens, cpu: 30.00 tokens/s, 75% of the floor"
    assert progress(CELL) == "batch 2, 32 + 64 tokens: 56.78 tokens/s, 71% of the floor"
    assert progress(failed(CELL)) == "batch 2, 32 + 64 tokens: FAILED: ValueError: cannot serve"


def test_lines_of_a_plot_are_backends_and_a_floor() -> None:
    rows = [*DECODE[:3], failed(DECODE[3])]
    assert lines(rows) == [
        Line("sdpa", ((1024, 10.0), (2048, 5.0))),
        Line("cpu", ((1024, 30.0),)),
        Line("floor", ((1024, 40.0), (2048, 40.0)), floor=True),
    ]


def test_batches_have_floors_of_their_own() -> None:
    found = lines([CELL | {"batch": 1}, CELL])
    assert [(line.label, line.points) for line in found] == [
        ("batch 1", ((96, 56.78),)),
        ("batch 2", ((96, 56.78),)),
        ("floor", ((96, 40.0),)),
        ("floor, batch 2", ((96, 80.0),)),
    ]
    assert [line.label for line in lines([PREFILL])] == ["prefill", "floor"]
