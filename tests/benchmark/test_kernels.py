"""The kernel benchmark checks before it measures, says what failed or was skipped, and gets its fractions right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flexdecode.attention.masks import causal, mask, window
from flexdecode.attention.scores import score
from flexdecode.benchmark import kernels, rows
from flexdecode.benchmark.cases import Case, causal_in_python, distance_in_python
from flexdecode.benchmark.ceilings import Gemm
from flexdecode.benchmark.kernels import bench

DECODE = Case("decode", 200, 64, 3, kv_heads=2, beside=("sdpa", "sdpa_folded"))
PREFILL = Case("prefill", 100, 64, 2, queries=100, kv_heads=1, beside=("sdpa",))
MASKS = Case("masks", 200, 64, 2, kv_heads=1, planned=True)
PLAN = replace(MASKS, section="plan", kernel="plan", planned=False)
TWINS = [
    replace(DECODE, section="int8", beside=(), kv_dtype=torch.int8).with_twin("bf16", kv_dtype=torch.bfloat16),
    replace(DECODE, section="verify", beside=(), queries=4).with_twin("one_query", queries=1),
    replace(MASKS, mask=causal() & window(64)).with_twin("outright", keys=64, mask=causal()),
    replace(MASKS, mask=mask(causal_in_python)).with_twin("causal", mask=causal()),
    replace(MASKS, score=score(distance_in_python)).with_twin("no_score", score=None),
    replace(PREFILL, beside=(), mask=causal() & window(20)).with_twin("causal", mask=causal()),
]
EVERY_ROW = {"benchmark", "section", "kernel", "keys", "queries", "head_dim", "group", "kv_heads", "kv_dtype", "mask"}
EVERY_ROW |= {"score", "isa", "threads", "cpu", "flexdecode", "torch", "python", "commit", "dirty", "date", "warm_up"}
EVERY_ROW |= {"repetitions"}
MEASURED = {"error", "checked_rows", "ms", "ms_q1", "ms_q3", "ms_min", "ms_max"}


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "Gemm", lambda: Gemm((8, 16, 8)))


def row_of(case: Case, repetitions: int = 2) -> dict[str, Any]:
    (row,) = bench([case], repetitions, [1])
    return row


@pytest.mark.parametrize("case", [DECODE, PREFILL, PLAN, *TWINS])
def test_a_row_is_complete(case: Case) -> None:
    row = row_of(case)
    assert set(row) >= EVERY_ROW | MEASURED
    assert (row["warm_up"], row["repetitions"], row["threads"]) == (1, 2, 1)
    assert 0 <= row["error"] < 2e-2
    assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    if case.kernel == "plan":
        assert {"fresh_plan_ms", "attention_ms", "share_of_layer", "share_of_16_layers"} <= set(row)
    else:
        kind = ("flops", "ceiling_gflop_per_s") if case.multiplies else ("bytes", "ceiling_gb_per_s")
        assert {*kind, "fraction"} <= set(row)
    for name in (*case.beside, *(name for name, _ in case.twins)):
        assert row[f"times_{name}"] > 0
        assert row[f"{name}_repetitions"] == 2
        if case.planned:
            assert {"plan_ms", f"{name}_plan_ms", f"times_{name}_planned"} <= set(row)
    assert ("bf16_error_to_fp32" in row) == (case.kv_dtype == torch.int8)


def test_decoding_is_a_fraction_of_reading(one_second_each: dict[str, float]) -> None:
    one_second_each |= {"attention": 4.0, "ceiling": 3.0, "sdpa": 20.0}
    row = row_of(DECODE)
    count = 200 * 2 * 2 * 64 * 2
    assert row["bytes"] == count
    assert row["gb_per_s"] == pytest.approx(count / 4e9)
    assert row["ceiling_gb_per_s"] == pytest.approx(count / 3e9)
    assert row["fraction"] == pytest.approx(0.75)
    assert row["times_sdpa"] == 5.0


def test_prefill_is_a_fraction_of_a_product_of_another_size(one_second_each: dict[str, float]) -> None:
    one_second_each |= {"attention": 4.0, "ceiling": 2.0}
    row = row_of(PREFILL)
    count, product = 4 * 64 * 2 * (100 * 101 // 2), 2 * 8 * 16 * 8
    assert row["flops"] == count
    assert row["gflop_per_s"] == pytest.approx(count / 4e9)
    assert row["ceiling_gflop_per_s"] == pytest.approx(product / 2e9)
    assert row["fraction"] == pytest.approx((count / 4) / (product / 2))


def test_planning_included_adds_each_ones_own_plan(one_second_each: dict[str, float]) -> None:
    one_second_each |= {"attention": 2.0, "causal": 1.0, "plan": 6.0, "causal_plan": 3.0}
    row = row_of(TWINS[3])
    assert row["times_causal"] == 0.5
    assert row["times_causal_planned"] == 0.5
    assert (row["plan_ms"], row["causal_plan_ms"]) == (6e3, 3e3)


def test_a_plans_share_is_of_one_layer_and_of_sixteen(one_second_each: dict[str, float]) -> None:
    one_second_each |= {"attention": 8.0, "plan": 2.0}
    row = row_of(PLAN)
    assert (row["ms"], row["attention_ms"]) == (2e3, 8e3)
    assert row["share_of_layer"] == 0.25
    assert row["share_of_16_layers"] == 0.25 / 16


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_a_wrong_kernel_is_not_measured_and_others_are(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.Cpu.run

    def run(self: Any, call: Any) -> Any:
        if call.q_THD.shape[1] == 6:
            return torch.full_like(call.q_THD, wrong), None
        return right(self, call)

    monkeypatch.setattr(kernels.Cpu, "run", run)
    bad, good = bench([DECODE, replace(DECODE, group=2)], 1, [1])
    assert "off by" in bad["failure"]
    assert "ms" not in bad
    assert set(bad) >= EVERY_ROW
    assert "failure" not in good
    assert good["ms"] > 0


def test_an_error_is_a_failure_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise ValueError("cannot serve")

    monkeypatch.setattr(kernels.Sdpa, "run", raises)
    bad, good = bench([DECODE, replace(DECODE, beside=())], 1, [1])
    assert bad["failure"] == "ValueError: cannot serve"
    assert good["ms"] > 0


def test_what_does_not_fit_is_skipped_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "available_bytes", lambda device: 1 << 29)
    row = row_of(DECODE)
    assert "0.5 GiB are available" in row["skipped"]
    assert set(row) >= EVERY_ROW
    assert "failure" not in row


@pytest.mark.slow
def test_compiled_flex_stands_beside() -> None:
    row = row_of(replace(DECODE, beside=("flex",)))
    assert row["times_flex"] > 0
