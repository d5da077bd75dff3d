"""How plans are packed for the CPU kernels, against the reference: tiles by kv head, pages that were given back, keys
without a page table, and scores that are kept between passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from flexdecode.attention import scores
from flexdecode.attention.attend import attend
from flexdecode.attention.backends import cpu
from flexdecode.attention.backends.cpu import Cpu, pack
from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.cache import KV, CacheLayer, KVCache
from flexdecode.attention.masks import Mask, causal, window
from flexdecode.attention.plan import AttentionPlan, Tile, plan_attention, plan_tiles
from flexdecode.attention.request import Call, Request
from flexdecode.attention.scores import softcap
from flexdecode.kernels import ops
from flexdecode.kernels.attention import Pass
from tests.attention.dense import (
    ByBatch,
    ByHead,
    Ends,
    Holes,
    Stripes,
    check,
    filled,
    overwrite,
    queries,
    run,
    slots_of,
)

BACKEND = Cpu()
MASKS = [
    causal(),
    causal() & window(70),
    Ends(20, 70),
    Stripes(3),
    Holes(2),
    ByBatch(),
    ByHead((causal(), causal() & window(9))),  # the same for each kv head of two, three and six queries heads
    ByHead((causal(), causal() & window(9), Stripes(3))),
    ByHead((Ends(5, 70), Holes(2)), opaque=True),
]
every_mask = pytest.mark.parametrize("mask", MASKS, ids=str)


def agree(call: Call) -> None:
    out, lse = BACKEND.run(call)
    wanted, wanted_lse = Reference().run(call)
    assert lse is not None
    assert wanted_lse is not None
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=1e-5)


@every_mask
@pytest.mark.parametrize("heads", [2, 4, 6])
@pytest.mark.parametrize("q_lens", [[1, 1], [3, 16], [140, 2]], ids=str)
@pytest.mark.parametrize("page", [4, 64])
def test_packed_plans_are_the_plans(mask: Mask, heads: int, q_lens: list[int], page: int) -> None:
    f = filled([200, 70], mask, last=q_lens, page=page, rest=math.nan, scattered=1)
    plan = plan_attention(f.cache, f.sequences, q_lens, mask, heads=heads)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(0))
    q = queries(q_lens, heads, 16)
    agree(Call(q, f.cache.kv(0), plan, 0.25, softcap(3.0), sinks, return_lse=True))


@every_mask
@pytest.mark.parametrize("q_lens", [[1, 1], [3, 16], [140, 2]], ids=str)
def test_a_function_of_scores(mask: Mask, q_lens: list[int]) -> None:
    """Plain Python is asked for what the reference asks: positions, heads and the caller's index, tile by tile. Its
    table is just as long as the longest sequence."""
    f = filled([200, 70], mask, last=q_lens, rest=math.nan, scattered=1)
    plan = plan_attention(f.cache, f.sequences, q_lens, mask, heads=4)
    table = torch.randn(200, generator=torch.Generator().manual_seed(0))

    def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * (1 + b) + table[kv_idx] * (h + 1) - table[q_idx] / 2

    agree(Call(queries(q_lens, 4, 16), f.cache.kv(0), plan, 0.25, score, return_lse=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("mask", [Ends(5, 20), ByHead((Ends(5, 20), causal() & window(1))), Ends(70, 10)], ids=str)
def test_a_page_that_was_given_back_is_never_read(mask: Mask, dtype: torch.dtype, poison: float) -> None:
    """Its number is gone, and any page stands in for it: here one that another sequence has filled with what is no
    number. Blocks at both ends of the hole are seen in part."""
    cache = KVCache([CacheLayer(2, 16, mask)], 400, page=8, dtype=dtype)
    other, sequence = cache.new(), cache.new()
    cache.append([other], [16])
    for count in [60, 30, 1, 1, 40, 1]:
        slots = cache.append([sequence], [count])
        k, v = (torch.randn(count, 2, 16, generator=torch.Generator().manual_seed(count + i)) for i in range(2))
        cache.write(0, slots, k, v)
    assert cache.groups[0].table(other) == [0, 1]
    assert cache.groups[0].has_holes(sequence)
    plan = plan_attention(cache, [sequence], [1], mask, heads=4)
    assert min(pack(plan.tiles, 4, 2).table.tolist()) >= 0
    clean = BACKEND.run(Call(queries([1], 4, 16), cache.kv(0), plan, 0.25))[0]
    overwrite(cache, 0, slots_of(cache, 0, other, 0, 16), poison)
    call = Call(queries([1], 4, 16), cache.kv(0), plan, 0.25, return_lse=True)
    assert torch.equal(BACKEND.run(call)[0], clean)
    agree(call)


def without_table(mask: Mask, batch: int, count: int, length: int, heads: int, step: int) -> AttentionPlan:
    tiles: list[Tile] = []
    for b in range(batch):
        q_idx = np.arange(length - count, length)
        row, base = b * count, b * step
        tiles += plan_tiles(mask, q_idx, length, heads=heads, kv_heads=2, row=row, batch=b, base=base)
    return AttentionPlan(mask, 0, tuple(tiles), batch * count)


@every_mask
@pytest.mark.parametrize("count", [1, 5, 30])
@pytest.mark.parametrize("length", [63, 64, 129])
def test_keys_without_a_page_table(mask: Mask, count: int, length: int) -> None:
    """Three sequences in one tensor [batch, length + 7, kv_heads, more than head_dim], read where they lie."""
    whole = torch.randn(3, length + 7, 2, 40, generator=torch.Generator().manual_seed(1))
    whole[:, length:] = math.nan
    k, v = (whole.flatten(0, 1).transpose(0, 1)[..., part] for part in (slice(0, 16), slice(16, 40)))
    assert k.stride(-1) == 1
    assert not k.is_contiguous()
    plan = without_table(mask, 3, count, length, 4, length + 7)
    q = queries([3 * count], 4, 16)
    agree(Call(q, KV(k, v, page=3), plan, 0.25, return_lse=True))


@every_mask
def test_scores_kept_between_passes_have_a_place_of_their_own(mask: Mask) -> None:
    """Scored and then weighed is the same, bit for bit; `kept` is exactly what the tiles need."""
    q_lens = [3, 1, 40]
    f = filled([200, 70, 64], mask, last=q_lens, rest=math.nan)
    plan = plan_attention(f.cache, f.sequences, q_lens, mask, heads=4)
    packed, kv = pack(plan.tiles, 4, 2), f.cache.kv(0)
    kept = torch.full((packed.kept + 1,), 7.0)
    q = queries(q_lens, 4, 16)

    def attended(only: Pass, scores: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return ops.attend_few(
            q,
            kv.k_CSD,
            kv.v_CSD,
            None,
            None,
            packed,
            page=kv.page,
            scale=0.25,
            return_lse=True,
            only=only,
            scores=scores,
        )

    attended("score", kept)
    assert kept[-1] == 7.0
    for got, wanted in zip(attended("weigh", kept), attended("all"), strict=True):
        assert got is not None
        assert wanted is not None
        assert torch.equal(got, wanted)
    used = sum((4 if t.kv_head is None else 2) * t.count * 64 * len(t.seen.blocks_N) for t in plan.tiles)
    assert packed.kept == used


def test_a_plan_is_packed_once_for_all_layers() -> None:
    f = filled([70, 70], causal(), last=[2, 30])
    plan = plan_attention(f.cache, f.sequences, [2, 30], causal())
    q = queries([2, 30], 4, 16)
    attend(q, f.cache, 0, plan, backend=BACKEND)
    packed = dict(plan.memo)
    assert packed
    attend(q, f.cache, 0, plan, backend=BACKEND)
    assert {name: id(arrays) for name, arrays in plan.memo.items()} == {k: id(x) for k, x in packed.items()}


def test_layers_of_different_shapes_share_a_plan() -> None:
    """Layers under one mask may differ in heads and kv heads; what was packed for one is not what another needs."""
    f = filled([70], causal(), last=[3])
    plan = plan_attention(f.cache, f.sequences, [3], causal())
    for heads in (4, 2, 6):
        agree(Call(queries([3], heads, 16), f.cache.kv(0), plan, 0.25, lambda s, b, h, q, k: s + h, return_lse=True))


def test_tiles_of_a_sequence_share_its_page_numbers() -> None:
    f = filled([300, 70], causal(), last=[290, 1])
    plan = plan_attention(f.cache, f.sequences, [290, 1], causal())
    assert len(plan.tiles) == 4
    assert len(pack(plan.tiles, 4, 2).table) == sum(len(f.cache.groups[0].table(s)) for s in f.sequences)


def test_nothing_packs_to_nothing() -> None:
    packed = pack((), 4, 2)
    assert packed.tiles.shape == (0, 12)
    assert packed.kept == 0


def test_what_it_serves_and_what_not() -> None:
    plain = Request(8, 2, 64, torch.bfloat16, torch.int8, "cpu", sinks=True, return_lse=True)
    assert BACKEND.unsupported(plain) is None
    assert "cuda" in str(BACKEND.unsupported(Request(8, 2, 64, torch.bfloat16, torch.bfloat16, "cuda")))
    assert "float64" in str(BACKEND.unsupported(Request(8, 2, 64, torch.float64, torch.bfloat16, "cpu")))


@pytest.mark.parametrize("mask", [causal(), causal() & window(40)], ids=str)
def test_scores_of_a_long_prefill_are_kept_in_parts(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a tile at once would take gigabytes at a long context."""
    monkeypatch.setattr(cpu, "_SCORES", 4 * 7 * 320)  # seven rows of four heads
    f = filled([300], mask, last=[200])
    q = queries([200], 4, 16)
    score = scores.score(lambda s, b, h, q_idx, kv_idx: s - 0.01 * (q_idx - kv_idx) * (h + 1))
    out = run(f, q, [200], mask, Cpu(), score=score)
    check(out, f, q, [200], mask, score=score, positions_Q=torch.arange(100, 300))
