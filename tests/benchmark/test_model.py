"""What rows about a model say, all of it told in docs/benchmarks.md, and how a floor is made of bytes and a rate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexdecode import LLM
from flexdecode.benchmark import decode, engine, grid, latency, model, prefill, step
from flexdecode.benchmark.model import Floor, facts
from flexdecode.benchmark.rounds import Times
from tests.checkpoints import tiny

pytestmark = pytest.mark.usefixtures("small_reads")
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
ENDS = re.compile(r"ms(_q1|_q3|_min|_max)$")
OF_KERNELS = {"error", "over_one_row"}


def test_facts_tell_how_a_model_is_held_and_computed(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma3_text", layer_types=["sliding_attention"] * 3 + ["full_attention"])
    told = facts(LLM(tmp_path, kv_dtype="int8", mask="window(64)"), "m")
    assert (told["model"], told["dtype"], told["kv_dtype"], told["device"]) == ("m", "bfloat16", "int8", "cpu")
    assert told["mask"] == "causal() & window(16) & window(64), causal() & window(64)"
    assert told["quantization"] == "bfloat16"
    assert told["attention"]
    assert told["weights_bytes"] > 0
    assert facts(LLM("random:tiny@int4"), "m")["quantization"].startswith("int4 g128")


def test_a_floor_reads_weights_once_and_keys_for_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_MOST_READ", 1 << 20)
    llm = LLM("random:tiny")
    one, four = Floor(llm, 100), Floor(llm, 100, batch=4)
    assert one.weights_bytes == four.weights_bytes == llm.explain(100).weights_bytes
    assert one.kv_bytes == 2 * 2 * 2 * 32 * 2 * 100  # layers, keys and values, heads, head_dim, bf16, tokens
    assert four.kv_bytes == 4 * one.kv_bytes
    assert one.nbytes == one.weights_bytes + one.kv_bytes


def test_the_fraction_is_of_the_time_in_which_all_could_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_MOST_READ", 1 << 16)  # less than a step reads
    floor = Floor(LLM("random:tiny"), 100)
    share = floor.nbytes / (1 << 16)
    found = floor.columns(Times({"step": {0: 8.0, 1: 8.0}, "read": {0: 0.125, 1: 0.125}}))
    assert found["read_gb_per_s"] == pytest.approx((1 << 16) / 0.125 / 1e9)
    assert found["floor_ms"] == pytest.approx(125 * share)
    assert found["floor_steps_per_second"] == pytest.approx(8 / share)
    assert found["fraction_of_floor"] == pytest.approx(0.125 * share / 8)
    assert (found["weights_read_bytes"], found["kv_read_bytes"]) == (floor.weights_bytes, floor.kv_bytes)
    many = floor.columns(Times({"all": {0: 40.0}, "read": {0: 0.125}}), steps=5, step="all")
    assert many["fraction_of_floor"] == pytest.approx(found["fraction_of_floor"])


def test_the_page_on_benchmarks_tells_of_every_column_and_of_no_other(tmp_path: Path) -> None:
    tiny(tmp_path)
    llm = LLM(tmp_path)
    rows = [
        next(decode.bench(decode.Plan("m", ("cpu", "sdpa"), (20,), 2), lambda name: LLM(tmp_path, attention=name))),
        next(prefill.bench(llm, "m", [20], 1)),
        next(grid.bench(llm, "m", [1], [8], 1)),
        next(latency.bench(llm, "m", latency.Task(1, 8, 4), 1)),
        step.measure(llm, "m", 8, 1),
        next(engine.bench(llm, "m", engine.Load(2, 8, 12, 70), 1)),
    ]
    columns = {re.sub(r"^times_.*", "times_X", ENDS.sub("ms", key)) for row in rows for key in row}
    told = set(re.findall(r"`([a-z][A-Za-z0-9_]*)`", PAGE.read_text()))
    assert columns - told == set()
    assert {name for name in told if "_" in name and not ENDS.search(name)} - columns - OF_KERNELS == set()
