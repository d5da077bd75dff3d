"""Plans against the mask itself: each query must be shown exactly the keys that the mask shows, read from the right
slots, whatever the plan skips, fills or leaves out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import Mask, causal, chunked, window
from flexdecode.attention.plan import AttentionPlan, Tile, plan_attention
from tests.attention.dense import Holes, Keys, Stripes, visible

ONE = st.one_of(
    st.just(causal()),
    st.integers(1, 70).map(lambda n: causal() & window(n)),
    st.integers(1, 70).map(lambda n: causal() & chunked(n)),
    st.integers(1, 70).map(window),
    st.integers(1, 70).map(chunked),
    st.integers(0, 70).map(Keys),
    st.integers(2, 4).map(Holes),
    st.integers(2, 4).map(lambda n: Holes(n, exact=True)),
    st.integers(2, 9).flatmap(lambda n: st.integers(0, 40).map(lambda first: Stripes(n, first))),
)
MASKS = st.one_of(ONE, st.tuples(ONE, ONE).map(lambda pair: pair[0] & pair[1]))


def numbered(lengths: list[int], q_lens: list[int], mask: Mask, page: int) -> tuple[KVCache, list[int]]:
    """A cache whose keys tell sequence and position; the last q_lens tokens of each come in one step."""
    cache = KVCache([CacheLayer(1, 2, mask)], sum(lengths) + page * len(lengths), page=page, dtype=torch.float32)
    sequences = [cache.new() for _ in lengths]
    starts = [n - q for n, q in zip(lengths, q_lens, strict=True)]
    for parts in ([(0, start) for start in starts], list(zip(starts, lengths, strict=True))):
        slots = cache.append(sequences, [b - a for a, b in parts])
        keys = torch.cat([torch.tensor([[i, p] for p in range(a, b)]).view(-1, 2) for i, (a, b) in enumerate(parts)])
        cache.write(0, slots, keys.float()[:, None], keys.float()[:, None])
    return cache, sequences


def shown(tile: Tile, length: int) -> Tensor:
    """bool [Q, L]: what the tile lets its queries see."""
    seen = torch.zeros(tile.count, length, dtype=torch.bool)
    seen[:, tile.start : tile.stop] = True if tile.visible_QL is None else tile.visible_QL
    return seen


def check(cache: KVCache, plan: AttentionPlan, lengths: list[int], positions: list[Tensor]) -> None:
    row = 0
    for i, (tile, length, where) in enumerate(zip(plan.tiles, lengths, positions, strict=True)):
        assert tile.row == row
        assert list(tile.positions) == where.tolist()
        row += tile.count
        assert 0 <= tile.start <= tile.stop <= length
        assert tile.visible_QL is None or tile.visible_QL.shape == (tile.count, tile.stop - tile.start)
        assert torch.equal(shown(tile, length), visible(plan.mask, where, length))
        keys, _ = cache.read(0, tile.run, torch.float32)
        assert keys[0].tolist() == [[i, p] for p in range(tile.start, tile.stop)]
        if tile.causal:
            assert tile.visible_QL is not None
            assert tile.start == 0
            assert torch.equal(tile.visible_QL, torch.ones(tile.count, tile.count, dtype=torch.bool).tril())
    assert plan.rows == row
    assert plan.visible_keys == sum(t.stop - t.start for t in plan.tiles)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_visible_keys_are_the_masks(data: st.DataObject) -> None:
    mask, page = data.draw(MASKS), data.draw(st.sampled_from([1, 3, 16, 64]))
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=4))
    q_lens = [data.draw(st.integers(1, n)) for n in lengths]
    cache, sequences = numbered(lengths, q_lens, mask, page)
    positions = [torch.arange(n - q, n) for n, q in zip(lengths, q_lens, strict=True)]
    check(cache, plan_attention(cache, sequences, q_lens, mask), lengths, positions)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_positions_may_be_the_callers(data: st.DataObject) -> None:
    """A tree of drafts: siblings share a position, and order says nothing."""
    mask = data.draw(MASKS)
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=3))
    q_lens = [data.draw(st.integers(1, n)) for n in lengths]
    cache, sequences = numbered(lengths, q_lens, mask, page=16)
    positions = [
        torch.tensor(data.draw(st.lists(st.integers(n - q, n + 3), min_size=q, max_size=q)))
        for n, q in zip(lengths, q_lens, strict=True)
    ]
    check(cache, plan_attention(cache, sequences, q_lens, mask, positions), lengths, positions)


@pytest.mark.parametrize("mask", [causal(), causal() & window(6), causal() & chunked(8)], ids=str)
def test_a_decode_step_needs_no_bits(mask: Mask) -> None:
    """Its keys are one interval, all visible: nothing is evaluated and nothing else is read."""
    cache, sequences = numbered([30], [1], mask, page=4)
    (tile,) = plan_attention(cache, sequences, [1], mask).tiles
    assert tile.visible_QL is None
    assert not tile.causal
    start, stop, _ = mask.span(29)
    assert (tile.start, tile.stop) == (start, min(stop, 30))


@pytest.mark.parametrize(
    ("mask", "length", "q_len", "is_triangle"),
    [
        (causal(), 20, 20, True),
        (causal(), 20, 19, False),  # not a square: the queries stand at its end
        (causal(), 1, 1, False),  # a square of one needs no mask at all
        (causal() & window(20), 20, 20, True),  # a window that reaches all the way back
        (causal() & window(19), 20, 20, False),
        (causal() & chunked(20), 20, 20, True),
        (causal() & chunked(19), 20, 20, False),
        (window(50), 20, 20, False),
        (Holes(3), 20, 20, False),
        (Holes(3, exact=True), 20, 20, False),
        (Stripes(1), 20, 20, False),  # is one, but its span does not promise it
    ],
    ids=str,
)
def test_the_causal_flag_means_a_plain_triangle(mask: Mask, length: int, q_len: int, is_triangle: bool) -> None:
    cache, sequences = numbered([length], [q_len], mask, page=16)
    (tile,) = plan_attention(cache, sequences, [q_len], mask).tiles
    assert tile.causal == is_triangle


def test_a_permuted_triangle_is_none() -> None:
    cache, sequences = numbered([6], [6], causal(), page=4)
    (tile,) = plan_attention(cache, sequences, [6], causal(), [torch.tensor([0, 1, 2, 3, 5, 4])]).tiles
    assert not tile.causal


def test_one_mask_serves_every_length() -> None:
    """Elsewhere a causal mask that captured one length failed on the next. Ours is a value without lengths."""
    mask = causal() & window(100)
    cache = KVCache([CacheLayer(1, 2, mask)], 512, page=16, dtype=torch.float32)
    sequence = cache.new()
    for length in range(1, 300):
        cache.append([sequence], [1])
        (tile,) = plan_attention(cache, [sequence], [1], mask).tiles
        assert (tile.start, tile.stop) == (max(0, length - 100), length)


def test_scattered_pages_have_int64_slots() -> None:
    """The report behind this: int32 offsets into the pool wrapped, silently."""
    cache = KVCache([CacheLayer(1, 2, causal())], 64, page=2, dtype=torch.float32)
    a, b = cache.new(), cache.new()
    for _ in range(6):
        cache.append([a, b], [1, 1])
    plan = plan_attention(cache, [a, b], [1, 1], causal())
    for tile in plan.tiles:
        assert isinstance(tile.run, Tensor)
        assert tile.run.dtype == torch.int64


def test_the_group_is_that_of_the_mask() -> None:
    masks = [causal(), causal() & window(4)]
    cache = KVCache([CacheLayer(1, 2, m) for m in masks], 16, dtype=torch.float32)
    sequence = cache.new()
    cache.append([sequence], [3])
    assert [plan_attention(cache, [sequence], [3], m).group for m in masks] == [0, 1]
    with pytest.raises(ValueError, match=r"no layers under .*Window\(size=5\).*it has .*Window\(size=4\)"):
        plan_attention(cache, [sequence], [3], causal() & window(5))


@pytest.mark.parametrize("count", [0, -1, 4])
def test_queries_that_are_not_there(count: int) -> None:
    cache, sequences = numbered([3], [3], causal(), page=4)
    with pytest.raises(ValueError, match=f"{count} queries of a sequence that holds 3 tokens"):
        plan_attention(cache, sequences, [count], causal())


@pytest.mark.parametrize(
    "positions", [[torch.tensor([1, 2, 3])], [torch.tensor([0])], [], [torch.tensor([0, 1]), torch.tensor([2])]]
)
def test_positions_must_be_as_many_as_queries(positions: list[Tensor]) -> None:
    """One position too many would shift every sequence behind it by a row."""
    cache, sequences = numbered([5], [2], causal(), page=4)
    with pytest.raises(ValueError, match="q_positions"):
        plan_attention(cache, sequences, [2], causal(), positions)


@pytest.mark.parametrize("positions", [None, [torch.tensor([3])]])
def test_queries_whose_keys_are_gone(positions: list[Tensor] | None) -> None:
    """Asked again for queries of earlier steps, whose window has moved on: an error that says so."""
    mask = causal() & window(2)
    cache, sequences = numbered([9], [1], mask, page=1)
    q_len = 4 if positions is None else 1
    with pytest.raises(ValueError, match=r"given back.*Window\(size=2\)"):
        plan_attention(cache, sequences, [q_len], mask, positions)


def test_a_plan_is_frozen() -> None:
    cache, sequences = numbered([3], [3], causal(), page=4)
    plan = plan_attention(cache, sequences, [3], causal())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rows = 4  # type: ignore[misc]
