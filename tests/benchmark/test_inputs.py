"""Inputs of a case: the same numbers in every dtype, and counts of exactly what a call must read or multiply."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexdecode.attention.backends.cpu import Cpu
from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.masks import Mask, causal, mask, window
from flexdecode.benchmark.cases import Case, causal_in_python
from flexdecode.benchmark.inputs import build, needed_bytes

DECODE = Case("decode", 300, 64, 3, kv_heads=2)
PREFILL = Case("prefill", 300, 64, 2, queries=300, kv_heads=2)


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 300])
def test_pairs_are_those_that_the_mask_shows(keys: int) -> None:
    for own in (causal(), causal() & window(70), mask(causal_in_python)):
        for queries in {1, keys}:
            inputs = build(replace(PREFILL, keys=keys, queries=queries, mask=own))
            q_idx, kv_idx = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
            seen = own(torch.tensor(0), torch.tensor(0), q_idx, kv_idx)
            assert inputs.flops() == 4 * 64 * 4 * int(seen.sum())


@pytest.mark.parametrize(("dtype", "a_key"), [(torch.bfloat16, 2 * 64 * 2), (torch.int8, 2 * (64 + 4))])
def test_bytes_are_visible_keys_and_values_once(dtype: torch.dtype, a_key: int) -> None:
    assert build(replace(DECODE, kv_dtype=dtype)).visible_bytes() == 300 * 2 * a_key
    # A window's keys end within blocks of 64, which are read whole.
    assert build(replace(DECODE, kv_dtype=dtype, mask=causal() & window(100))).visible_bytes() == 108 * 2 * a_key


@pytest.mark.parametrize("own", [causal(), causal() & window(100)])
def test_every_layer_and_every_dtype_holds_the_same(own: Mask) -> None:
    case = replace(DECODE, keys=9000, mask=own)  # more than are written at a time
    inputs, exact = build(case), build(replace(case, kv_dtype=torch.float32))
    call = inputs.attention(Reference())
    first = call()
    assert len(inputs.cache.layers) > 1
    torch.testing.assert_close(call(), first, rtol=0, atol=0)
    torch.testing.assert_close(exact.attend(Reference()), first, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("case", [DECODE, PREFILL])
def test_torchs_own_attention_gets_the_same_inputs(case: Case) -> None:
    inputs = build(case)
    ours, theirs = inputs.attend(Cpu()), inputs.torch_sdpa()()[0].transpose(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


def test_rows_alone_are_rows_of_the_whole() -> None:
    inputs = build(replace(PREFILL, mask=causal() & window(70)))
    rows = torch.tensor([0, 63, 64, 200, 299])
    some, whole = inputs.attend_rows(Reference(), rows.numpy()), inputs.attend(Reference())
    torch.testing.assert_close(some.bfloat16(), whole[rows])


def test_memory_grows_with_the_case_and_not_with_what_a_window_hides() -> None:
    long = replace(DECODE, keys=1 << 20, kv_heads=8)
    assert needed_bytes(long) > 2 * (1 << 20) * 8 * 64 * 2 * 2
    assert needed_bytes(replace(long, mask=causal() & window(1024))) < needed_bytes(long) / 2
    assert needed_bytes(long.with_twin("short", keys=1 << 19)) > needed_bytes(long)
