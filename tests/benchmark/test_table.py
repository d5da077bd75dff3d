"""Rows as lines: what was measured, failed and skipped can be read."""

from __future__ import annotations

from typing import Any

from flexdecode.benchmark.table import heading, line

ROW: dict[str, Any] = {
    "section": "decode",
    "kernel": "attention",
    "keys": 4096,
    "queries": 1,
    "head_dim": 128,
    "group": 4,
    "kv_heads": 8,
    "kv_dtype": "bfloat16",
    "mask": "causal()",
    "score": None,
    "threads": 2,
    "isa": "avx2",
}
TIMED = {"error": 2e-3, "ms": 0.5, "bytes": 1, "gb_per_s": 30.0, "ceiling_gb_per_s": 40.0, "fraction": 0.75}


def test_a_measured_row() -> None:
    told = line(ROW | TIMED | {"times_sdpa": 60.0, "sdpa_ms": 30.0})
    for words in ("4,096", "bfloat16", "0.500", "30.0 GB/s", "75% of 40.0", "2.0e-03", "sdpa 60.00"):
        assert words in told
    assert "causal" not in told
    assert "[window(64), softcap(30.0)]" in line(ROW | TIMED | {"mask": "window(64)", "score": "softcap(30.0)"})


def test_flops_and_plans() -> None:
    rates = {"flops": 1, "gflop_per_s": 100.0, "ceiling_gflop_per_s": 400.0, "fraction": 0.25}
    assert "100.0 GFLOP/s" in line(ROW | {"error": 1e-3, "ms": 2.0} | rates)
    plan = ROW | {"error": 1e-3, "ms": 0.02, "share_of_layer": 0.031, "fresh_plan_ms": 0.4}
    assert "3.10% share of layer, fresh plan 0.400 ms" in line(plan)


PRODUCT: dict[str, Any] = {"section": "int4", "kernel": "product", "outputs": 4096, "inputs": 14336, "rows": 4}
PRODUCT |= {"group_size": 128, "threads": 1, "isa": "avx2"}


def test_products_have_columns_of_their_own() -> None:
    assert [word in heading(PRODUCT) for word in ("weights", "rows", "keys")] == [True, True, False]
    told = line(PRODUCT | TIMED | {"times_torch": 1.5, "over_one_row": 1.07})
    for words in ("4096x14336", " 128 ", "75% of 40.0", "torch 1.50, 1.07 over one row"):
        assert words in told
    assert "–" in line(PRODUCT | TIMED | {"section": "dense", "group_size": None})
    assert "FAILED: off by 1" in line(PRODUCT | {"failure": "off by 1"})


def test_failed_and_skipped_rows_give_their_reason() -> None:
    assert "FAILED: off by 1" in line(ROW | {"failure": "off by 1", "error": 1.0})
    assert "skipped: too big" in line(ROW | {"skipped": "too big"})


def test_the_heading_tells_section_and_threads() -> None:
    assert heading(ROW).startswith("decode, 2 threads, avx2\n")
    assert "1 thread," in heading(ROW | {"threads": 1})
