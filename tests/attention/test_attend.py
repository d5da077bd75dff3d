"""attend against the formula in fp64, over every backend, and what must not make a difference: neighbours, where pages
lie, and whatever is stored where no token is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.attention.attend import attend
from flexdecode.attention.backends.cpu import Cpu
from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.backends.sdpa import Sdpa
from flexdecode.attention.cache import KV_DTYPES, CacheLayer, KVCache
from flexdecode.attention.masks import Mask, causal, chunked, window
from flexdecode.attention.plan import plan_attention
from flexdecode.attention.request import Backend
from flexdecode.attention.scores import softcap
from tests.attention.dense import (
    BACKENDS,
    MASKS,
    Filled,
    Holes,
    Stripes,
    check,
    filled,
    held,
    overwrite,
    queries,
    run,
    slots_of,
    visible,
)
from tests.grids import by_name, pairwise

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 257)
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=by_name)
GRID = pairwise(
    length=LENGTHS,
    head_dim=(31, 64, 72, 80, 96, 128, 256),
    group=(1, 3, 4, 7, 8, 12),
    q_len=(1, 2, 5, 17, "whole"),
    mask=tuple(MASKS),
    dtype=(torch.float32, torch.bfloat16),
    kv_heads=(1, 2, 3),
    v_head_dim=(None, 24),
    page=(16, 64),
    scattered=(0, 1),
)


@every_backend
@pytest.mark.parametrize("case", GRID, ids=by_name)
def test_grid(backend: Backend, case: dict[str, Any]) -> None:
    length, mask = case["length"], MASKS[case["mask"]]
    q_len = length if case["q_len"] == "whole" else min(case["q_len"], length)
    shape = {name: case[name] for name in ("kv_heads", "head_dim", "v_head_dim", "page", "dtype", "scattered")}
    f = filled([length], mask, last=[q_len], rest=math.nan, **shape)
    q = queries([q_len], case["kv_heads"] * case["group"], case["head_dim"], case["dtype"])
    check(run(f, q, [q_len], mask, backend), f, q, [q_len], mask)


@every_backend
@pytest.mark.parametrize("rest", [1e4, math.nan])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 130, 255, 257])
def test_what_lies_past_the_end_never_shows(backend: Backend, length: int, rest: float) -> None:
    """B53, and static caches attended as a whole: a length that is no multiple of the block reads the block's rest."""
    for q_len in {1, min(5, length), length}:
        outs = []
        for value in (0.0, rest):
            f = filled([length, 40], causal(), last=[q_len, 1], page=64, rest=value)
            q = queries([q_len, 1], 4, 16)
            outs.append(run(f, q, [q_len, 1], causal(), backend))
        check(outs[1], f, q, [q_len, 1], causal())
        assert torch.equal(*outs)


@every_backend
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_storage_under_every_query_type(backend: Backend, dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    mask, q_lens = causal() & window(50), [7, 1]
    f = filled([70, 33], mask, last=q_lens, dtype=torch.float32 if dtype == torch.int8 else dtype, v_head_dim=24)
    if dtype == torch.int8:
        cache = KVCache([CacheLayer(2, 16, mask, 24)], 512, page=16, dtype=dtype)
        f.sequences = [cache.new() for _ in f.k]
        cache.write(0, cache.append(f.sequences, [70, 33]), torch.cat(f.k), torch.cat(f.v))
        reads = [[x.transpose(0, 1) for x in held(cache, 0, s, 0, cache.length(s))] for s in f.sequences]
        f = Filled(cache, f.sequences, [k for k, _ in reads], [v for _, v in reads])
    if backend.name == "sdpa":  # reads the cache in the query's type
        f = replace(f, k=[k.to(q_dtype) for k in f.k], v=[v.to(q_dtype) for v in f.v])
    q = queries(q_lens, 6, 16, q_dtype)
    check(run(f, q, q_lens, mask, backend), f, q, q_lens, mask)


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_a_ragged_batch_is_its_sequences_one_by_one(data: st.DataObject) -> None:
    """Bit for bit: a sequence's result does not depend on who is beside it."""
    mask = MASKS[data.draw(st.sampled_from(sorted(MASKS)))]
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=5))
    q_lens = [data.draw(st.one_of(st.just(1), st.integers(1, n))) for n in lengths]
    f = filled(lengths, mask, last=q_lens, rest=math.nan, scattered=data.draw(st.integers(0, 3)))
    q = queries(q_lens, 6, 16)
    for backend in BACKENDS:
        out = run(f, q, q_lens, mask, backend)
        check(out, f, q, q_lens, mask)
        row = 0
        for i, count in enumerate(q_lens):
            here = slice(row, row + count)
            alone = plan_attention(f.cache, f.sequences[i : i + 1], [count], mask, heads=6, batch=[i])
            assert torch.equal(attend(q[here], f.cache, 0, alone, backend=backend), out[here])  # type: ignore[arg-type]
            row += count


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_len", [1, 5, 17])
@pytest.mark.parametrize("mask", [causal(), causal() & window(70), causal() & chunked(16)], ids=str)
def test_where_pages_lie_changes_no_bit(backend: Backend, dtype: torch.dtype, q_len: int, mask: Mask) -> None:
    """Blocks larger than pages elsewhere made the sum's order, and so its bits, depend on which pages were free."""
    q, q_lens = queries([q_len, 1], 6, 64, dtype), [q_len, 1]
    lone = filled([129], mask, last=[q_len], head_dim=64, dtype=dtype)
    if mask == causal():
        assert (np.diff(slots_of(lone.cache, 0, lone.sequences[0], 0, 129)) == 1).all()
    wanted = run(lone, q[:q_len], [q_len], mask, backend)
    for scattered in (1, 2, 3):
        f = filled([129, 65], mask, last=q_lens, head_dim=64, dtype=dtype, scattered=scattered)
        if mask == causal():
            assert (np.diff(slots_of(f.cache, 0, f.sequences[0], 0, 129)) != 1).any()
        assert torch.equal(run(f, q, q_lens, mask, backend)[:q_len], wanted)


@every_backend
@pytest.mark.parametrize("neighbour", [1e4, math.nan, math.inf])
def test_a_neighbour_changes_no_bit(backend: Backend, neighbour: float) -> None:
    """Packed rows and shared pools: what one sequence holds must not reach another's result."""
    q_lens = [3, 2, 20]
    f = filled([40, 70, 20], causal(), last=q_lens)
    q = queries(q_lens, 4, 16)
    before = run(f, q, q_lens, causal(), backend)
    overwrite(f.cache, 0, slots_of(f.cache, 0, f.sequences[1], 0, 70), neighbour)
    q[3:5] *= 100
    after = run(f, q, q_lens, causal(), backend)
    assert torch.equal(after[:3], before[:3])
    assert torch.equal(after[5:], before[5:])
    assert not torch.equal(after[3:5], before[3:5])


@every_backend
@pytest.mark.parametrize("mask", [Holes(2), Holes(3), Holes(3, exact=True), Stripes(3, first=30), Holes(1)], ids=str)
@pytest.mark.parametrize("q_len", [1, 2, 17, 40])
def test_rows_that_see_nothing_are_zero(backend: Backend, mask: Mask, q_len: int) -> None:
    """B57: softmax over nothing is NaN, and NaN spreads. The other rows are as they would be alone."""
    for length in (40, 41, 42):
        f = filled([length, 25], mask, last=[q_len, 3])
        q = queries([q_len, 3], 4, 16)
        out = run(f, q, [q_len, 3], mask, backend)
        assert bool(out.isfinite().all())
        check(out, f, q, [q_len, 3], mask)
        empty = ~visible(mask, torch.arange(length - q_len, length), length).any(1)
        assert bool((out[:q_len][empty] == 0).all())


@every_backend
@pytest.mark.parametrize("mask", [Stripes(3), Stripes(7, first=20), Holes(2), causal() & window(9)], ids=str)
@pytest.mark.parametrize("q_len", [1, 4, 20])
@pytest.mark.parametrize("poison", [1e4, math.nan, math.inf])
def test_keys_that_no_query_sees_never_show(backend: Backend, mask: Mask, q_len: int, poison: float) -> None:
    """0 times NaN is NaN: a masked value must be left out of the sum, not multiplied by nothing."""
    f = filled([64], mask, last=[q_len])
    unseen = ~visible(mask, torch.arange(64 - q_len, 64), 64).any(0)
    q = queries([q_len], 4, 16)
    slots = np.array([t * 16 + i for t in f.cache.groups[0].table(f.sequences[0]) for i in range(16)])
    overwrite(f.cache, 0, slots[unseen.numpy() & (slots >= 0)], poison)
    check(run(f, q, [q_len], mask, backend), f, q, [q_len], mask)


@every_backend
@pytest.mark.parametrize("scale", [None, 1.0, 0.01, 0.0])
def test_scale(backend: Backend, scale: float | None) -> None:
    f = filled([30], causal(), last=[5])
    q = queries([5], 4, 16)
    check(run(f, q, [5], causal(), backend, scale=scale), f, q, [5], causal(), scale=scale)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_scores_of_any_size(backend: Backend, dtype: torch.dtype, size: float) -> None:
    """Scores far beyond what exp takes: the largest wins, all is finite."""
    f = filled([40], causal(), last=[20], dtype=dtype)
    f.cache.kv(0).k_CSD.mul_(size)
    f.k = [k * size for k in f.k]
    q = queries([20], 4, 16, dtype)
    out = run(f, q, [20], causal(), backend, scale=1.0)
    assert bool(out.isfinite().all())
    largest = (q.float().abs().amax(0).sum(-1).max() * f.k[0].float().abs().max()).item()
    check(out, f, q, [20], causal(), slack=16 * 2**-24 * largest, scale=1.0)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [causal(), causal() & window(1000)], ids=str)
def test_a_long_context(backend: Backend, dtype: torch.dtype, mask: Mask) -> None:
    for q_len in (1, 33):
        f = filled([9000], mask, last=[q_len], kv_heads=1, head_dim=64, page=64, dtype=dtype, rest=math.nan)
        q = queries([q_len], 3, 64, dtype)
        check(run(f, q, [q_len], mask, backend), f, q, [q_len], mask)


def test_every_layer_reads_its_own() -> None:
    layers = [CacheLayer(1, 8, causal()), CacheLayer(2, 4, causal() & window(3), 6), CacheLayer(1, 8, causal())]
    cache = KVCache(layers, 64, page=4, dtype=torch.float32)
    sequence = cache.new()
    slots = cache.append([sequence], [10])
    for i, layer in enumerate(layers):
        k = torch.randn(10, layer.kv_heads, layer.head_dim, generator=torch.Generator().manual_seed(i))
        v = torch.full((10, layer.kv_heads, layer.v_head_dim or layer.head_dim), float(i))
        cache.write(i, slots, k, v)
    for i, layer in enumerate(layers):
        q = queries([10], 2 * layer.kv_heads, layer.head_dim)
        out = attend(q, cache, i, plan_attention(cache, [sequence], [10], layer.mask))
        assert isinstance(out, Tensor)
        torch.testing.assert_close(out, torch.full((10, 2 * layer.kv_heads, layer.v_head_dim or 8), float(i)))


# what cannot be


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "told"),
    [
        (4, 4, 16, "q has 4 tokens, the plan 5"),
        (5, 5, 16, "q has 5 heads of 16, layer 0 caches 2 kv_heads of 16"),
        (5, 4, 8, "q has 4 heads of 8, layer 0 caches 2 kv_heads of 16"),
    ],
)
def test_queries_that_do_not_fit_are_refused_with_both_numbers(tokens: int, heads: int, dim: int, told: str) -> None:
    f = filled([9], causal(), last=[5])
    plan = plan_attention(f.cache, f.sequences, [5], causal())
    with pytest.raises(ValueError, match=told):
        attend(torch.zeros(tokens, heads, dim), f.cache, 0, plan)


def test_a_plan_for_another_mask_is_refused() -> None:
    cache = KVCache([CacheLayer(1, 4, causal()), CacheLayer(1, 4, causal() & window(3))], 16, dtype=torch.float32)
    sequence = cache.new()
    cache.append([sequence], [2])
    plan = plan_attention(cache, [sequence], [2], causal())
    with pytest.raises(
        ValueError, match=r"(?i)layer 1 has the mask .*window\W(size=)?3.*, the plan was made for causal"
    ):
        attend(torch.zeros(2, 1, 4), cache, 1, plan)


@pytest.mark.parametrize("shape", [(1,), (3,), (4, 1)])
def test_sinks_must_be_one_for_each_head(shape: tuple[int, ...]) -> None:
    """A tensor of one would be spread over all heads without a word."""
    f = filled([9], causal(), last=[5])
    plan = plan_attention(f.cache, f.sequences, [5], causal())
    with pytest.raises(ValueError, match=r"sinks.*4 heads"):
        attend(torch.zeros(5, 4, 16), f.cache, 0, plan, sinks=torch.zeros(shape))


@pytest.mark.parametrize(
    "options", [{"score": softcap(5.0)}, {"sinks": torch.zeros(4)}, {"return_lse": True}], ids=lambda o: next(iter(o))
)
def test_a_backend_that_cannot_is_refused_and_never_ignores(options: dict[str, Any]) -> None:
    f = filled([9], causal(), last=[5])
    plan = plan_attention(f.cache, f.sequences, [5], causal())
    q = queries([5], 4, 16)
    with pytest.raises(ValueError, match=r"sdpa.*Request\(heads=4, kv_heads=2, head_dim=16.*torch's SDPA"):
        attend(q, f.cache, 0, plan, backend=Sdpa(), **options)
    unforced, forced, exact = (attend(q, f.cache, 0, plan, backend=b, **options) for b in (None, Cpu(), Reference()))
    for a, b, c in zip(unforced, forced, exact, strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, c, atol=1e-5)
