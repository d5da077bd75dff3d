"""The check before a measurement: it sees a wrong kernel wherever the fault lies, and NaN above all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexdecode.attention.backends.cpu import Cpu
from flexdecode.benchmark.cases import Case
from flexdecode.benchmark.check import check, error_of_rounding, sample
from flexdecode.benchmark.inputs import build

CASE = Case("decode", 200, 64, 3, kv_heads=2)


@pytest.mark.parametrize("case", [CASE, replace(CASE, section="prefill", queries=200), replace(CASE, queries=16)])
@pytest.mark.parametrize("fault", ["none", "one row", "nan", "zeros"])
def test_faults_are_seen(case: Case, fault: str) -> None:
    inputs = build(case)
    out = inputs.attend(Cpu())
    if fault == "one row":
        out[-1] *= 1.5
    elif fault != "none":
        out.fill_(float("nan") if fault == "nan" else 0.0)
    checked = check(inputs, out)
    assert (checked.failure is None) == (fault == "none")
    assert fault == "none" or "off by" in str(checked.failure)


def test_many_rows_are_sampled_from_end_to_end() -> None:
    rows = sample(5000)
    assert (rows[0], rows[-1]) == (0, 4999)
    assert len(rows) == len(set(rows.tolist())) <= 96
    assert ((rows > 1000) & (rows < 4000)).sum() > 10
    assert sample(16).tolist() == list(range(16))


def test_rounding_of_the_cache_is_told_apart_from_the_kernels_error() -> None:
    inputs = build(replace(CASE, kv_dtype=torch.int8))
    out = inputs.attend(Cpu())
    assert check(inputs, out).error < error_of_rounding(inputs, out) < 0.1
