"""The kernel benchmark checks before it measures, and counts the bytes that must be read."""

from __future__ import annotations

import pytest
import torch

from flexdecode.benchmark import kernels
from flexdecode.benchmark.kernels import DecodeCase, bench_decode, decode_cases


def test_a_row_states_error_and_ceiling() -> None:
    cases = [DecodeCase(200, 64, 3, kv_heads=2), DecodeCase(130, 80, 4, kv_heads=1, kv_dtype=torch.int8, queries=3)]
    for case, row in zip(cases, bench_decode(cases, repetitions=2), strict=True):
        assert row["kernel"] == case.name
        assert 0 <= row["error"] < 2e-2
        for key in ("ms", "gb_per_s", "read_gb_per_s", "fraction_of_read", "times_sdpa"):
            assert row[key] > 0


def test_bytes_are_keys_and_values_once() -> None:
    (row,) = bench_decode([DecodeCase(256, 128, 4, kv_heads=2)], repetitions=1)
    assert row["gb_per_s"] * row["ms"] * 1e6 == pytest.approx(256 * 2 * 2 * 128 * 2)


def test_a_wrong_kernel_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.Cpu, "run", lambda self, q, *rest: (torch.zeros_like(q), None))
    with pytest.raises(ValueError, match="off by"):
        list(bench_decode([DecodeCase(64, 64, 1)], repetitions=1))


def test_the_grid_has_every_axis() -> None:
    names = [case.name for case in decode_cases([64, 128], [64, 128], [1, 4])]
    assert len(names) == len(set(names)) == 5
    assert sum("int8" in name for name in names) == 1
