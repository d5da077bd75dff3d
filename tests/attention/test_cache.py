"""KVCache: what was written is read back in every storage type, and what cannot be appended changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.attention.cache import KV_DTYPES, CacheLayer, KVCache, bytes_per_token
from flexdecode.attention.masks import causal, chunked, window
from flexdecode.attention.pages import OutOfPagesError
from tests.attention.dense import held, state

# Two layers to one group; every shape different.
LAYERS = (
    CacheLayer(2, 3, causal(), v_head_dim=2),
    CacheLayer(1, 4, causal() & window(5)),
    CacheLayer(1, 2, causal() & chunked(4)),
    CacheLayer(3, 1, causal(), v_head_dim=5),
)


def lone(
    dtype: torch.dtype, length: int, *, page: int = 4, dims: tuple[int, int] = (8, 8)
) -> tuple[KVCache, int, Tensor, Tensor]:
    cache = KVCache([CacheLayer(2, dims[0], causal(), dims[1])], 64, page=page, dtype=dtype)
    generator = torch.Generator().manual_seed(length)
    k, v = (torch.randn(length, 2, dim, generator=generator) for dim in dims)
    sequence = cache.new()
    cache.write(0, cache.append([sequence], [length]), k, v)
    return cache, sequence, k, v


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("dims", [(8, 8), (8, 3), (1, 20)])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_every_storage_type(dtype: torch.dtype, dims: tuple[int, int], out: torch.dtype) -> None:
    cache, sequence, k, v = lone(dtype, 11, dims=dims)
    for got, x_TCD in zip(held(cache, 0, sequence, 0, 11, out), (k, v), strict=True):
        assert got.dtype == out
        x_CTD = x_TCD.transpose(0, 1)
        if dtype == torch.int8:
            half_step = x_CTD.abs().amax(-1, keepdim=True) / 127 / 2
            rounding = 2.0**-8 * x_CTD.abs() if out == torch.bfloat16 else 1e-6 * x_CTD.abs()
            assert bool(((got.float() - x_CTD).abs() <= half_step * 1.001 + rounding * 1.01).all())
        else:
            assert torch.equal(got, x_CTD.to(dtype).to(out))


@given(
    exponent=st.integers(-35, 36),
    row=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=9),
)
@settings(deadline=None)
def test_int8_is_within_half_a_step(exponent: int, row: list[float]) -> None:
    """Whatever the size of a row: the scale follows it, down to where fp32 itself ends."""
    x = torch.tensor(row) * 10.0**exponent
    cache = KVCache([CacheLayer(1, len(row), causal())], 4, dtype=torch.int8)
    sequence = cache.new()
    cache.write(0, cache.append([sequence], [1]), x.view(1, 1, -1), x.view(1, 1, -1))
    k, v = held(cache, 0, sequence, 0, 1)
    step = x.double().abs().max() / 127
    assert torch.equal(k, v)
    assert bool(((k.double() - x.double()).abs() <= step * 0.501 + 2e-36).all())


def test_int8_rows_of_zeros_stay_zero_and_change_nothing_else() -> None:
    cache, sequence, _, _ = lone(torch.int8, 3)
    before = held(cache, 0, sequence, 0, 3)[0].clone()
    cache.write(0, cache.append([sequence], [1]), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    k, v = held(cache, 0, sequence, 0, 4)
    assert torch.equal(k[:, 3], torch.zeros(2, 8))
    assert torch.equal(v[:, 3], torch.zeros(2, 8))
    assert torch.equal(k[:, :3], before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_is_not_finite_stays_so_and_in_its_row(dtype: torch.dtype, bad: float) -> None:
    """A model gone wrong must show, not be rounded into something plausible; other tokens and heads are untouched."""
    cache, sequence, k, v = lone(dtype, 3)
    clean = held(cache, 0, sequence, 0, 3)[1].clone()
    v = v.clone()
    v[1, 0, 5] = bad
    cache.truncate(sequence, 0)
    cache.write(0, cache.append([sequence], [3]), k, v)
    got = held(cache, 0, sequence, 0, 3)[1]
    assert not bool(got[0, 1, 5].isfinite())
    got[0, 1] = clean[0, 1]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lone_sequence_is_read_where_it_lies(dtype: torch.dtype) -> None:
    cache, sequence, _, _ = lone(dtype, 11)
    kv = cache.kv(0)
    for got, stored in zip(held(cache, 0, sequence, 3, 11, dtype), (kv.k_CSD, kv.v_CSD), strict=True):
        assert got.data_ptr() == stored[:, 3:].data_ptr()
        assert got.stride(-1) == 1


@pytest.mark.parametrize(
    "slots", [[0], [5], [2, 3, 4], [4, 3, 2], [0, 2, 1, 3], [1, 1, 2], [7, 0], [3, 3, 5], []], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_slots_are_read_in_the_order_that_is_asked(slots: list[int], dtype: torch.dtype) -> None:
    """First and last as far apart as a run's, but in the wrong order between, or twice: it is none."""
    cache, sequence, _, _ = lone(dtype, 8)
    whole = held(cache, 0, sequence, 0, 8)
    for got, all_of_it in zip(cache.kv(0).read(np.array(slots, np.int64), torch.float32), whole, strict=True):
        assert got.shape == (2, len(slots), 8)
        assert torch.equal(got, all_of_it[:, slots])


def test_one_page_of_one_head_is_one_run_of_memory() -> None:
    cache, _, k, _ = lone(torch.float32, 8, page=4)
    pages = cache.kv(0).k_CSD.view(2, -1, 4, 8)
    assert pages[1, 1].is_contiguous()
    assert torch.equal(pages[1, 1], k[4:8, 1])


def test_slots_are_int64() -> None:
    """int32 offsets wrap where a pool is larger than 2 ** 31 elements."""
    cache = KVCache(LAYERS, 64, page=4)
    a, b = cache.new(), cache.new()
    slots = cache.append([a, b], [3, 5])
    assert [t.dtype for t in slots.by_group] == [torch.int64] * 3
    assert [len(t) for t in slots.by_group] == [8] * 3


def test_truncate_then_append() -> None:
    """The next tokens take the places of those that were cut off, also in the middle of a page."""
    cache, sequence, k, v = lone(torch.float32, 10)
    cache.truncate(sequence, 6)
    assert cache.length(sequence) == 6
    more = torch.full((3, 2, 8), 7.0)
    cache.write(0, cache.append([sequence], [3]), more, -more)
    got_k, got_v = held(cache, 0, sequence, 0, 9)
    assert torch.equal(got_k.transpose(0, 1), torch.cat([k[:6], more]))
    assert torch.equal(got_v.transpose(0, 1), torch.cat([v[:6], -more]))


@pytest.mark.parametrize("length", [-1, 11])
def test_truncating_to_what_is_not_there(length: int) -> None:
    cache, sequence, _, _ = lone(torch.float32, 10)
    with pytest.raises(ValueError, match=f"of 10 tokens to {length}"):
        cache.truncate(sequence, length)
    assert cache.length(sequence) == 10


def test_a_full_cache_says_so_with_both_numbers_and_what_to_do() -> None:
    cache = KVCache(LAYERS, 16, page=4)
    a, b = cache.new(), cache.new()
    cache.append([a], [9])
    before = state(cache)
    with pytest.raises(OutOfPagesError, match=r"3 more pages of 4 tokens.*, 1 are free.*--max-context"):
        cache.append([a, b], [4, 5])
    assert state(cache) == before
    assert cache.free_tokens() == 4
    cache.append([a], [3])
    cache.append([b], [4])
    assert cache.free_tokens() == 0


def test_nothing_appended_to_a_twin_takes_no_page() -> None:
    """A step may hold no token of a forked sequence; the copy of its last page must wait until there is one."""
    cache = KVCache([CacheLayer(1, 1, causal())], 4, page=4)
    a = cache.new()
    cache.append([a], [3])
    twin = cache.fork(a)
    before = state(cache)
    assert len(cache.append([twin], [0]).by_group[0]) == 0
    assert state(cache) == before
    with pytest.raises(OutOfPagesError):
        cache.append([twin], [1])
    assert state(cache) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_copied_page_is_copied_whole_and_in_its_own_layers_only(dtype: torch.dtype) -> None:
    """Groups number their pages apart: page 3 of one group is another sequence's in the other."""
    layers = [CacheLayer(1, 1, causal()), CacheLayer(1, 1, causal() & window(2))]
    cache = KVCache(layers, 64, page=4, dtype=dtype)

    def put(sequence: int, counts: list[int], value: float) -> None:
        for count in counts:
            slots = cache.append([sequence], [count])
            for layer in range(2):
                x = torch.full((count, 1, 1), value)
                cache.write(layer, slots, x, x)

    a, b, c = cache.new(), cache.new(), cache.new()
    for sequence, counts, value in ((a, [1] * 10, 1.0), (b, [8], 2.0), (c, [4], 3.0)):
        put(sequence, counts, value)
    cache.free(b)
    twin = cache.fork(a)
    put(twin, [1], 4.0)
    assert [group.table(twin)[-1] for group in cache.groups] == [3, 1]  # copies of pages 2 and 0
    assert cache.groups[1].table(c) == [3]
    for layer in range(2):
        for sequence, start, wanted in ((c, 0, [3.0] * 4), (a, 9, [1.0]), (twin, 9, [1.0, 4.0])):
            for got in held(cache, layer, sequence, start, start + len(wanted)):
                torch.testing.assert_close(got.flatten(), torch.tensor(wanted))


def test_counts_below_zero_and_twice_the_same_sequence_are_refused() -> None:
    cache = KVCache([CacheLayer(1, 1, causal())], 16, page=4)
    a = cache.new()
    cache.append([a], [3])
    before = state(cache)
    with pytest.raises(ValueError, match="-1"):
        cache.append([a], [-1])
    with pytest.raises(ValueError, match="once a step"):
        cache.append([a, a], [1, 1])
    assert state(cache) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.int32])
def test_unknown_storage_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"{dtype}.*known: torch\.bfloat16"):
        KVCache(LAYERS, 16, dtype=dtype)


@pytest.mark.parametrize(("tokens", "page"), [(0, 4), (-1, 4), (16, 0), (16, -2)])
def test_a_cache_without_room_is_refused(tokens: int, page: int) -> None:
    with pytest.raises(ValueError, match=f"tokens={tokens}, page={page}"):
        KVCache(LAYERS, tokens, page=page)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_bytes_per_token_is_what_the_storage_takes(dtype: torch.dtype) -> None:
    cache = KVCache(LAYERS, 12, page=4, dtype=dtype)
    for layer, shape in enumerate(LAYERS):
        kv = cache.kv(layer)
        stored = [kv.k_CSD, kv.v_CSD, kv.k_scale_CS, kv.v_scale_CS]
        assert sum(t.nbytes for t in stored if t is not None) == 12 * bytes_per_token(shape, dtype)
