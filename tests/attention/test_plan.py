"""Plans against the mask itself: each query must be shown exactly the keys that the mask shows, read from the right
slots, whatever the plan skips, fills or leaves out."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import Mask, causal, chunked, window
from flexdecode.attention.pages import GIVEN_BACK
from flexdecode.attention.plan import MANY_ROWS, AttentionPlan, Tile, plan_attention, plan_tiles
from flexdecode.attention.visible import BLOCK
from flexdecode.kernels.ops import FEW_QUERIES
from tests.attention.dense import Blurred, ByBatch, ByHead, Counting, Ends, Holes, Keys, Stripes, visible

SIZES = st.integers(1, 70)
ONE = st.one_of(
    st.just(causal()),
    SIZES.map(lambda n: causal() & window(n)),
    SIZES.map(lambda n: causal() & chunked(n)),
    SIZES.map(window),
    SIZES.map(chunked),
    SIZES.map(Keys),
    st.integers(2, 4).map(Holes),
    st.integers(2, 4).map(lambda n: Holes(n, exact=True)),
    st.tuples(st.integers(2, 9), SIZES).map(lambda x: Stripes(*x)),
    st.tuples(SIZES, SIZES).map(lambda x: Ends(*x)),
    st.just(ByBatch()),
)
ALIKE = st.one_of(ONE, ONE.map(Blurred), st.tuples(ONE, ONE).map(lambda pair: pair[0] & pair[1]))
MASKS = st.one_of(ALIKE, st.tuples(st.lists(ONE, min_size=1, max_size=3), st.booleans()).map(lambda x: by_head(*x)))
HEADS, KV_HEADS = 4, 2


def by_head(masks: list[Mask], opaque: bool) -> Mask:
    return ByHead(tuple(masks), opaque)


def numbered(lengths: list[int], q_lens: list[int], mask: Mask, page: int) -> tuple[KVCache, list[int]]:
    """A cache whose keys tell sequence and position, in pages torn apart; the last q_lens tokens come in one step."""
    tokens = 2 * sum(lengths) + 4 * page * len(lengths)
    cache = KVCache([CacheLayer(KV_HEADS, 2, mask)], tokens, page=page, dtype=torch.float32)
    decoy = cache.new()
    sequences = [cache.new() for _ in lengths]
    starts = [n - q for n, q in zip(lengths, q_lens, strict=True)]
    cache.append([decoy], [page])
    for i, parts in enumerate(([(0, start) for start in starts], list(zip(starts, lengths, strict=True)))):
        slots = cache.append(sequences, [b - a for a, b in parts])
        keys = torch.cat([torch.tensor([[i, p] for p in range(a, b)]).view(-1, 2) for i, (a, b) in enumerate(parts)])
        keys_TCD = keys.float()[:, None].expand(-1, KV_HEADS, 2)
        cache.write(0, slots, keys_TCD, keys_TCD)
        if i == 0:
            cache.free(decoy)
    return cache, sequences


def shown(tile: Tile, heads: int) -> Tensor:
    """bool [H, Q, L]: what the tile lets its queries see, of its own heads."""
    keys = torch.from_numpy(tile.keys_L())
    seen = torch.zeros(heads, tile.count, tile.length, dtype=torch.bool)
    bits = tile.visible_RL()
    seen[:, :, keys] = True if bits is None else bits.view(-1, tile.count, len(keys))
    return seen


def check(
    cache: KVCache, plan: AttentionPlan, lengths: list[int], positions: list[Tensor], batch: list[int] | None = None
) -> None:
    """Row for row and head for head: the tiles show what the mask shows, once, and name the slots where it lies."""
    firsts = [sum(len(p) for p in positions[:i]) for i in range(len(positions))]
    page, group = cache.page, HEADS // KV_HEADS
    got = [torch.zeros(HEADS, len(p), n, dtype=torch.bool) for p, n in zip(positions, lengths, strict=True)]
    covered = torch.zeros(plan.rows, KV_HEADS, dtype=torch.long)
    assert [t.row for t in plan.tiles] == sorted(t.row for t in plan.tiles)
    for tile in plan.tiles:
        i = max(i for i, first in enumerate(firsts) if first <= tile.row)
        rows = slice(tile.row - firsts[i], tile.row - firsts[i] + tile.count)
        assert tile.length == lengths[i]
        assert tile.batch == (i if batch is None else batch[i])
        assert tile.q_idx_Q.tolist() == positions[i][rows].tolist()
        assert tile.count <= MANY_ROWS
        here = slice(None) if tile.kv_head is None else tile.kv_head
        covered[tile.row : tile.row + tile.count, here] += 1
        heads = range(HEADS) if tile.kv_head is None else range(tile.kv_head * group, (tile.kv_head + 1) * group)
        seen = shown(tile, len(heads))
        got[i][heads.start : heads.stop, rows] = seen
        keys = tile.keys_L()
        assert keys.dtype == np.int64
        slots = tile.slots(keys, page)
        assert slots.dtype == np.int64
        assert not len(slots) or 0 <= slots.min() <= slots.max() < cache.kv(0).k_CSD.shape[1]
        k, _ = cache.kv(0).read(slots, torch.float32)
        needed = seen.flatten(0, 1).any(0)[torch.from_numpy(keys)]
        wanted = torch.tensor([[i, p] for p in keys.tolist()]).view(-1, 2)[needed]
        assert k[0][needed].tolist() == wanted.tolist()
    assert bool((covered == 1).all())
    assert plan.rows == sum(len(p) for p in positions)
    for i, (seen, where, length) in enumerate(zip(got, positions, lengths, strict=True)):
        b = i if batch is None else batch[i]
        assert torch.equal(seen, visible(plan.mask, where, length, heads=HEADS, batch=b))


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_visible_keys_are_the_masks(data: st.DataObject) -> None:
    mask, page = data.draw(MASKS), data.draw(st.sampled_from([1, 3, 16, 64]))
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=4))
    q_lens = [data.draw(st.integers(1, n)) for n in lengths]
    cache, sequences = numbered(lengths, q_lens, mask, page)
    positions = [torch.arange(n - q, n) for n, q in zip(lengths, q_lens, strict=True)]
    batch = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    plan = plan_attention(cache, sequences, q_lens, mask, heads=HEADS, batch=batch)
    check(cache, plan, lengths, positions, batch)


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
    check(cache, plan_attention(cache, sequences, q_lens, mask, positions, heads=HEADS), lengths, positions)


@pytest.mark.parametrize("count", [FEW_QUERIES, FEW_QUERIES + 1, MANY_ROWS, MANY_ROWS + 1, 2 * MANY_ROWS + 3, 400])
@pytest.mark.parametrize(
    "mask", [causal(), causal() & window(70), Ends(5, 70), Blurred(Stripes(3)), ByHead((causal(), Keys(7)))], ids=str
)
def test_many_queries_are_cut(mask: Mask, count: int) -> None:
    """A run of rows that sees nothing of a block of keys does not read it: a prefill reads the triangle."""
    lengths, q_lens = [count + 10, 30], [count, 2]
    cache, sequences = numbered(lengths, q_lens, mask, page=16)
    plan = plan_attention(cache, sequences, q_lens, mask, heads=HEADS)
    check(cache, plan, lengths, [torch.arange(10, count + 10), torch.arange(28, 30)])
    first = [t for t in plan.tiles if t.length == count + 10 and t.kv_head in (None, 0)]
    step = count if count <= FEW_QUERIES else MANY_ROWS
    assert [t.row for t in first] == list(range(0, count, step))
    assert plan.few == (count <= FEW_QUERIES)
    if mask == causal():
        for tile in first:
            assert len(tile.keys_L()) <= tile.q_idx_Q[-1] + BLOCK
    if mask == causal() & window(70):
        assert all(len(tile.keys_L()) <= tile.count + 70 + 2 * BLOCK for tile in first)


@pytest.mark.parametrize("mask", [causal(), causal() & window(64), causal() & chunked(64), Ends(64, 64)], ids=str)
def test_a_decode_step_needs_no_bits_where_its_blocks_are_whole(mask: Mask) -> None:
    """Nothing is evaluated, no bit is held, and nothing else is read."""
    counting = Counting(mask)
    cache, sequences = numbered([640], [1], counting, page=16)
    (tile,) = plan_attention(cache, sequences, [1], counting).tiles
    assert counting.keys == []
    assert tile.visible_RL() is None
    assert len(tile.seen.bits_MR) == 0
    wanted = visible(mask, torch.tensor([639]), 640)[0]
    assert tile.keys_L().tolist() == torch.nonzero(wanted).flatten().tolist()


@pytest.mark.parametrize(("mask", "most"), [(causal(), 3), (causal() & window(100), 5), (Ends(100, 100), 6)], ids=str)
def test_one_more_token_costs_what_is_undecided(mask: Mask, most: int) -> None:
    """Blocks and pages asked, and keys evaluated, in a step of decoding: the window's, however long the context."""
    counting = Counting(mask)
    cache = KVCache([CacheLayer(1, 1, counting)], 8192, page=64, dtype=torch.float32)
    sequence = cache.new()
    cache.append([sequence], [1500])
    plan_attention(cache, [sequence], [1500], counting)
    for step in range(3000):
        counting.blocks.clear()
        counting.keys.clear()
        cache.append([sequence], [1])
        plan_attention(cache, [sequence], [1], counting)
        if step >= 2 * BLOCK:
            assert sum(counting.blocks) <= 3 * most  # pages, what is settled, and the step itself
        assert sum(counting.keys) <= most * BLOCK


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_a_plan_that_goes_on_is_one_made_afresh(data: st.DataObject) -> None:
    """What a cache remembers of a sequence makes plans cheap and must not show: through chunks, forks and cuts."""
    mask, page = data.draw(MASKS), data.draw(st.sampled_from([1, 16, 64]))
    cache = KVCache([CacheLayer(KV_HEADS, 1, mask)], 40_000, page=page, dtype=torch.float32)
    sequences, dice = [cache.new()], random.Random(data.draw(st.integers(0, 999)))
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["append", "append", "append", "decode", "fork", "cut"]))
        if what == "fork":
            sequences.append(cache.fork(dice.choice(sequences)))
            continue
        if what == "cut":
            sequence = dice.choice(sequences)
            try:
                cache.truncate(sequence, dice.randint(0, cache.length(sequence)))
            except ValueError:
                cache.truncate(sequence, 0)
            continue
        for _ in range(1 if what == "append" else dice.randint(1, 70)):
            some = dice.sample(sequences, dice.randint(1, len(sequences)))
            counts = [dice.randint(1, 40) if what == "append" else 1 for _ in some]
            cache.append(some, counts)
            plan = plan_attention(cache, some, counts, mask, heads=HEADS)
            afresh: list[Tile] = []
            for i, (sequence, count) in enumerate(zip(some, counts, strict=True)):
                length = cache.length(sequence)
                q_idx = np.arange(length - count, length)
                afresh += plan_tiles(mask, q_idx, length, heads=HEADS, kv_heads=KV_HEADS, row=sum(counts[:i]), batch=i)
            for tile, wanted in zip(plan.tiles, afresh, strict=True):
                assert (tile.row, tile.batch, tile.length) == (wanted.row, wanted.batch, wanted.length)
                assert tile.kv_head == wanted.kv_head
                assert np.array_equal(tile.q_idx_Q, wanted.q_idx_Q)
                assert np.array_equal(tile.seen.blocks_N, wanted.seen.blocks_N)
                assert np.array_equal(tile.seen.bits_at_N, wanted.seen.bits_at_N)
                if len(tile.seen.bits_MR) or len(wanted.seen.bits_MR):
                    assert np.array_equal(tile.seen.bits_MR, wanted.seen.bits_MR)


@pytest.mark.parametrize("mask", [causal(), causal() & window(70), Blurred(Stripes(3))], ids=str)
@pytest.mark.parametrize("chunk", [1, 40, 64, 300])
@pytest.mark.parametrize("cut", [0, 40, 63, 64, 100, 299])
def test_what_was_cut_is_planned_anew(mask: Mask, chunk: int, cut: int) -> None:
    """Blocks that were whole before are not any more, also where no earlier query is asked for than was before."""
    cache = KVCache([CacheLayer(1, 1, mask)], 1024, page=512, dtype=torch.float32)
    sequence = cache.new()
    for first in range(0, 300, chunk):
        count = min(chunk, 300 - first)
        cache.append([sequence], [count])
        plan_attention(cache, [sequence], [count], mask)
    cache.truncate(sequence, cut)
    for length in range(cut + 1, cut + 100):
        cache.append([sequence], [1])
        (tile,) = plan_attention(cache, [sequence], [1], mask).tiles
        assert torch.equal(shown(tile, 1)[0], visible(mask, torch.tensor([length - 1]), length))


def test_one_mask_serves_every_length() -> None:
    """Elsewhere a causal mask that captured one length failed on the next. Ours is a value without lengths."""
    mask = causal() & window(100)
    cache = KVCache([CacheLayer(1, 2, mask)], 512, page=16, dtype=torch.float32)
    sequence = cache.new()
    for length in range(1, 300):
        cache.append([sequence], [1])
        (tile,) = plan_attention(cache, [sequence], [1], mask).tiles
        keys, seen = tile.keys_L(), tile.visible_RL()
        keys = keys if seen is None else keys[seen[0].numpy()]
        assert keys.tolist() == list(range(max(0, length - 100), length))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128])
@pytest.mark.parametrize("base", [0, 5, 2**33])
def test_tiles_without_a_page_table(length: int, base: int) -> None:
    """Keys as one tensor: position p lies in slot base + p, whatever a page would be. Offsets beyond 32 bits."""
    (tile,) = plan_tiles(causal(), np.array([length - 1]), length, heads=2, kv_heads=1, row=3, batch=2, base=base)
    assert (tile.row, tile.batch, tile.count, tile.pages_P) == (3, 2, 1, None)
    assert tile.keys_L().tolist() == list(range(length))
    for page in (1, 64):
        assert tile.slots(tile.keys_L(), page).tolist() == list(range(base, base + length))
    assert tile.slots(np.array([], np.int64), 16).tolist() == []


def test_pages_beyond_32_bits() -> None:
    """The report behind this: int32 offsets into the pool wrapped, silently."""
    pages = np.array([0, 2**25, GIVEN_BACK], np.int32)
    (tile,) = plan_tiles(causal(), np.array([191]), 192, heads=1, kv_heads=1, pages_P=pages)
    slots = tile.slots(np.array([0, 64, 127, 128]), 64)
    assert slots.dtype == np.int64
    assert slots.tolist()[:3] == [0, 2**31, 2**31 + 63]
    assert 0 <= slots[3] < 64  # lies nowhere: any slot that exists


def test_visible_keys_counts_what_is_read() -> None:
    """By kv head where they differ, else the same for each; whole blocks, which is what reading them costs."""
    alike = ByHead((causal(), causal() & window(64)))
    cache, sequences = numbered([640, 64], [1, 1], alike, page=16)
    # With a head of each kind for both kv heads each reads all; with one kind each, the second reads a window.
    assert plan_attention(cache, sequences, [1, 1], alike, heads=4).visible_keys(2) == 2 * 640 + 2 * 64
    assert plan_attention(cache, sequences, [1, 1], alike, heads=2).visible_keys(2) == 640 + 64 + 2 * 64
    cache, sequences = numbered([640, 64], [1, 1], causal(), page=16)
    assert plan_attention(cache, sequences, [1, 1], causal()).visible_keys(2) == 2 * (640 + 64)


def test_the_group_is_that_of_the_mask() -> None:
    masks = [causal(), causal() & window(4)]
    cache = KVCache([CacheLayer(1, 2, m) for m in masks], 16, dtype=torch.float32)
    sequence = cache.new()
    cache.append([sequence], [3])
    assert [plan_attention(cache, [sequence], [3], m).group for m in masks] == [0, 1]
    with pytest.raises(ValueError, match=r"(?i)no layers under .*window\W(size=)?5.*it has .*window\W(size=)?4"):
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
    with pytest.raises(ValueError, match=r"(?i)given back.*window\W(size=)?2"):
        plan_attention(cache, sequences, [q_len], mask, positions)


def test_queries_of_the_middle_that_was_given_back() -> None:
    """Keys on both sides are held; the query that still needs what lay between is refused, the others are not."""
    mask = Ends(3, 4)
    cache, sequences = numbered([30], [2], mask, page=2)
    assert GIVEN_BACK in cache.groups[0].table(sequences[0])
    check(cache, plan_attention(cache, sequences, [2], mask, heads=HEADS), [30], [torch.arange(28, 30)])
    plan_attention(cache, sequences, [1], mask, [torch.tensor([1])])
    with pytest.raises(ValueError, match="given back"):
        plan_attention(cache, sequences, [1], mask, [torch.tensor([12])])
    with pytest.raises(ValueError, match="given back"):
        plan_attention(cache, sequences, [2], mask, [torch.tensor([29, 12])])


def test_what_one_head_of_many_needs_is_needed() -> None:
    """Only the second head looks back; a plan of every kv head's own tiles still sees that its keys are gone."""
    mask = ByHead((causal() & window(1), causal() & window(8)))
    cache, sequences = numbered([64], [1], mask, page=1)
    check(cache, plan_attention(cache, sequences, [1], mask, heads=HEADS), [64], [torch.tensor([63])])
    with pytest.raises(ValueError, match="given back"):
        plan_attention(cache, sequences, [1], mask, [torch.tensor([60])], heads=HEADS)


@pytest.mark.parametrize("mask", [ByHead((causal(), causal() & window(5))), ByHead((causal(),), opaque=True)], ids=str)
def test_a_mask_by_head_wants_the_number_of_heads(mask: Mask) -> None:
    cache, sequences = numbered([9], [3], mask, page=4)
    with pytest.raises(ValueError, match=r"may differ by head.*\(heads=\)"):
        plan_attention(cache, sequences, [3], mask)
    assert plan_attention(cache, sequences, [3], mask, heads=HEADS).rows == 3


def test_layers_that_differ_in_kv_heads_share_no_plan_by_head() -> None:
    """Its tiles are each for one kv head: of a layer that has more of them some would be left out."""
    for mask, fits in ((causal(), True), (ByHead((causal(), causal() & window(5))), False)):
        cache = KVCache([CacheLayer(2, 4, mask), CacheLayer(4, 4, mask)], 16, dtype=torch.float32)
        sequence = cache.new()
        cache.append([sequence], [3])
        if fits:
            assert plan_attention(cache, [sequence], [3], mask, heads=4).rows == 3
            continue
        with pytest.raises(ValueError, match=r"may differ by head.*\[2, 4\] kv_heads"):
            plan_attention(cache, [sequence], [3], mask, heads=4)


@pytest.mark.parametrize("batch", [None, [4, 0, 4]])
def test_b_is_the_callers_index(batch: list[int] | None) -> None:
    """The index in the call, not a slot of some pool: with `batch`, the caller's own; two sequences may share one."""
    mask, lengths, q_lens = ByBatch(), [20, 70, 5], [2, 1, 5]
    cache, sequences = numbered(lengths, q_lens, mask, page=4)
    positions = [torch.arange(n - q, n) for n, q in zip(lengths, q_lens, strict=True)]
    check(cache, plan_attention(cache, sequences, q_lens, mask, batch=batch), lengths, positions, batch)


def test_a_plan_is_frozen() -> None:
    cache, sequences = numbered([3], [3], causal(), page=4)
    plan = plan_attention(cache, sequences, [3], causal())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rows = 4  # type: ignore[misc]
