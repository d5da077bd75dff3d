"""Visible blocks against the mask asked key by key, alone and as a sequence grows; and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.attention.masks import Ints, Mask, Queries, Seen, causal, chunked, window
from flexdecode.attention.visible import BLOCK, Settled, Visible, keys_held, visible
from tests.attention.dense import Blurred, ByBatch, ByHead, Counting, Ends, Holes, Keys, Stripes
from tests.attention.dense import visible as dense


@dataclass(frozen=True)
class Late(Mask):
    """Causal; the first `size` keys are shown to queries from `start` on."""

    size: int
    start: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & ((kv_idx >= self.size) | (q_idx >= self.start))

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        some = (first_N < q.stop) & ((stop_N > self.size) | (q.stop > self.start))
        every = (stop_N <= q.first + 1) & ((first_N >= self.size) | (q.first >= self.start))
        return Seen(some, every)


SIZES = st.one_of(st.integers(1, 20), st.integers(60, 200))
ONE = st.one_of(
    st.just(causal()),
    SIZES.map(lambda n: causal() & window(n)),
    SIZES.map(lambda n: causal() & chunked(n)),
    SIZES.map(window),
    SIZES.map(chunked),
    SIZES.map(Keys),
    st.integers(2, 4).map(Holes),
    st.integers(2, 4).map(lambda n: Holes(n, exact=True)),
    st.tuples(st.integers(1, 9), SIZES).map(lambda x: Stripes(*x)),
    st.tuples(SIZES, SIZES).map(lambda x: Ends(*x)),
    st.tuples(SIZES, SIZES).map(lambda x: Late(*x)),
    st.just(ByBatch()),
)
HEADS = st.tuples(st.lists(ONE, min_size=1, max_size=3), st.booleans()).map(lambda x: ByHead(tuple(x[0]), x[1]))
SIMPLE = st.one_of(ONE, ONE.map(Blurred))
ANY = st.one_of(SIMPLE, HEADS, HEADS.map(Blurred), st.tuples(ONE, HEADS).map(lambda pair: pair[0] & pair[1]))
LENGTHS = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 127, 128, 129, 192]), st.integers(1, 330))
SHAPES = st.sampled_from([(1, 1), (2, 2), (6, 2), (4, 1), (6, 3)])  # heads, kv heads


def shown(seen: Visible, count: int, length: int) -> Tensor:
    """bool [rows, L] by unpacking the words one bit at a time; one row for each query where all is visible to all."""
    rows = seen.bits_MR.shape[1] if len(seen.bits_MR) else count
    unpacked = torch.zeros(rows, length, dtype=torch.bool)
    for block, at in zip(seen.blocks_N.tolist(), seen.bits_at_N.tolist(), strict=True):
        keys = range(block * BLOCK, min(length, (block + 1) * BLOCK))
        for row in range(rows):
            word = -1 if at < 0 else int(seen.bits_MR[at, row])
            unpacked[row, keys.start : keys.stop] = torch.tensor([bool(word >> i & 1) for i in range(len(keys))])
    return unpacked


def check_form(seen: Visible, length: int) -> None:
    """There is one way to write down what is visible: no block that nobody sees, no bits where all see all."""
    blocks, at, bits = seen.blocks_N, seen.bits_at_N, seen.bits_MR
    assert [x.dtype.name for x in (blocks, at, bits)] == ["int32", "int32", "uint64"]
    assert bits.flags.c_contiguous
    assert bool((np.diff(blocks) > 0).all())
    if len(blocks):
        assert blocks[0] >= 0
        assert blocks[-1] * BLOCK < length
    assert at[at >= 0].tolist() == list(range(len(bits)))
    assert bool((at[at < 0] == -1).all())
    assert bits.shape[1] > 0
    for block, words in zip(blocks[at >= 0].tolist(), bits, strict=True):
        whole = (1 << min(BLOCK, length - block * BLOCK)) - 1
        assert not any(int(word) & ~whole for word in words)
        assert any(int(word) for word in words)
        assert not all(int(word) == whole for word in words)


def check(
    found: list[tuple[int | None, Visible]],
    mask: Mask,
    q_idx: Tensor,
    length: int,
    heads: int = 1,
    kv_heads: int = 1,
    batch: int = 0,
) -> None:
    wanted = dense(mask, q_idx, length, heads=heads, batch=batch)
    group = heads // kv_heads
    assert [kv_head for kv_head, _ in found] in ([None], list(range(kv_heads)))
    for kv_head, seen in found:
        check_form(seen, length)
        got = shown(seen, len(q_idx), length).view(-1, len(q_idx), length)
        assert len(got) in (1, group if kv_head is not None else 1)
        own = wanted if kv_head is None else wanted[kv_head * group : (kv_head + 1) * group]
        assert torch.equal(got.expand(len(own), -1, -1), own)


def same(a: list[tuple[int | None, Visible]], b: list[tuple[int | None, Visible]]) -> None:
    assert [kv_head for kv_head, _ in a] == [kv_head for kv_head, _ in b]
    for (_, one), (_, two) in zip(a, b, strict=True):
        for field in fields(Visible):
            x, y = getattr(one, field.name), getattr(two, field.name)
            assert x.dtype == y.dtype
            # Without bits there are no rows of bits either.
            assert np.array_equal(x, y) or len(x) == len(y) == 0


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_what_is_visible_is_the_masks_key_by_key(data: st.DataObject) -> None:
    """Under any mask, by head or not, one that cannot answer for a block, and for queries in any order, with gaps,
    more than once, and beyond the keys."""
    mask, length, (heads, kv_heads) = data.draw(ANY), data.draw(LENGTHS), data.draw(SHAPES)
    batch = data.draw(st.integers(0, 3))
    run = st.tuples(st.integers(0, length), st.integers(1, 20)).map(lambda x: list(range(x[0], sum(x))))
    q_idx = data.draw(st.one_of(run, st.lists(st.integers(0, length + 3), min_size=1, max_size=6)))
    found = visible(mask, batch, np.array(q_idx), length, heads, kv_heads)
    check(found, mask, torch.tensor(q_idx), length, heads, kv_heads, batch)


@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_what_is_settled_changes_nothing(data: st.DataObject) -> None:
    """A sequence grows token by token, in chunks, forks, is cut and grows again: each plan is as one made afresh."""
    mask = data.draw(SIMPLE)
    twins = [(Settled(), 0)]
    for _ in range(data.draw(st.integers(1, 12))):
        i = data.draw(st.integers(0, len(twins) - 1))
        settled, length = twins[i]
        what = data.draw(st.sampled_from(["grow", "grow", "grow", "decode", "fork", "cut", "back"]))
        if what == "fork":
            twins.append((settled.copy(), length))
        elif what == "cut":
            settled.clear()
            twins[i] = settled, data.draw(st.integers(0, length))
        else:
            steps = [1] * data.draw(st.integers(1, 70)) if what == "decode" else [data.draw(st.integers(1, 150))]
            for count in steps:
                length += count
                # Asked again for earlier queries, too: what was settled without them does not hold for them.
                first = length - count if what != "back" else data.draw(st.integers(0, length - 1))
                q_idx = np.arange(first, min(length, first + 20))
                got = visible(mask, 1, q_idx, length, 2, 2, settled)
                same(got, visible(mask, 1, q_idx, length, 2, 2))
                check(got, mask, torch.from_numpy(q_idx), length, 2, 2, 1)
            twins[i] = settled, length


def test_blocks_may_settle_in_any_order() -> None:
    """The first keys are shown last: their blocks are settled after those behind them, and stay before them."""
    mask, settled = Late(130, 400), Settled()
    for length in range(1, 700):
        q_idx = np.array([length - 1])
        same(visible(mask, 0, q_idx, length, 1, 1, settled), visible(mask, 0, q_idx, length, 1, 1))


def test_a_fork_goes_its_own_way() -> None:
    """Twins share what was settled when they parted, and nothing after."""
    mask = causal() & window(70)
    one = Settled()
    visible(mask, 0, np.arange(190, 200), 200, 1, 1, one)
    two = one.copy()
    for length in (300, 400, 500):
        visible(mask, 0, np.arange(length - 100, length), length, 1, 1, one)
    q_idx = np.array([210])
    same(visible(mask, 0, q_idx, 211, 1, 1, two), visible(mask, 0, q_idx, 211, 1, 1))


COSTS = [
    (causal(), 0),
    (causal() & window(1), 1),
    (causal() & window(64), 64),
    (causal() & window(200), 200),
    (causal() & chunked(100), 100),
    (Ends(4, 100), 104),
    (Ends(500, 100), 104),  # the first keys are full blocks: settled
]


@pytest.mark.parametrize(("mask", "open_keys"), COSTS, ids=str)
@pytest.mark.parametrize("start", [0, 1, 1000, 4096])
def test_one_more_token_costs_what_is_undecided(mask: Mask, open_keys: int, start: int) -> None:
    """Blocks asked, and keys evaluated, do not grow with the context, whether it was decoded or came in one prompt."""
    counting, settled = Counting(mask), Settled()
    if start:
        visible(counting, 0, np.arange(start), start, 1, 1, settled)
    most = 2 * (open_keys // BLOCK + 3)  # once to settle them, once for the step; ends that are cut count twice
    for length in range(start + 1, start + 2000):
        counting.blocks.clear()
        counting.keys.clear()
        ((_, seen),) = visible(counting, 0, np.array([length - 1]), length, 1, 1, settled)
        if length >= start + 2 * BLOCK:  # what a prompt left open is settled when the next blocks are whole
            assert sum(counting.blocks) <= most
        assert sum(counting.keys) <= most * BLOCK
        assert len(seen.bits_MR) <= 3


def test_cutting_what_came_last_keeps_what_is_settled() -> None:
    """Guesses that were wrong: the next plan is right, and asks no more than if they had not been there."""
    for mask in (causal(), causal() & window(200), causal() & chunked(100)):
        counting, settled, length = Counting(mask), Settled(), 1000
        visible(counting, 0, np.arange(length), length, 1, 1, settled)
        for step in range(2000):
            counting.blocks.clear()
            q_idx = np.arange(length, length + 9)
            got = visible(counting, 0, q_idx, length + 9, 1, 1, settled)
            same(got, visible(mask, 0, q_idx, length + 9, 1, 1))
            assert step < 100 or sum(counting.blocks) <= 14
            length += 1 + step % 3
            settled.truncate(length)


def test_many_chunks_cost_what_is_undecided() -> None:
    """Chunked prefill: a chunk's own blocks and the window behind it, not all before."""
    for mask in (causal(), causal() & window(200)):
        counting, settled = Counting(mask), Settled()
        for length in range(256, 32_768, 256):
            counting.blocks.clear()
            for first in range(length - 256, length, 128):
                visible(counting, 0, np.arange(first, first + 128), length, 1, 1, settled)
            assert sum(counting.blocks) <= 40


def test_a_function_is_asked_for_every_block() -> None:
    """What cannot answer for blocks is evaluated key by key, each once; nothing is skipped on a guess."""
    counting, settled = Counting(Blurred(causal() & window(5))), Settled()
    for length in (10, 64, 65, 200):
        counting.keys.clear()
        visible(counting, 0, np.array([length - 1]), length, 1, 1, settled)
        assert counting.keys == [length]


@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("opaque", [False, True])
def test_heads_that_see_the_same_are_told_once(heads: tuple[int, int], opaque: bool) -> None:
    """A mask that might differ by head and does not look at it costs what one that cannot costs."""
    for q_idx in (np.array([99]), np.arange(50, 100)):
        found = visible(ByHead((causal(),), opaque), 0, q_idx, 100, *heads)
        same(found, visible(causal(), 0, q_idx, 100, *heads))


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("length", [1, 64, 128])
def test_heads_that_differ_where_nothing_is_partial(opaque: bool, length: int) -> None:
    """Every block is seen whole or not at all by each head of a group, so there are no bits to lay out."""
    mask = ByHead((Keys(0), window(1000)), opaque)
    check(visible(mask, 0, np.arange(3), length, 4, 2), mask, torch.arange(3), length, 4, 2)
    exact = ByHead((causal(), causal() & window(1000)))
    found = visible(exact, 0, np.array([length - 1]), length, 4, 2)
    check(found, exact, torch.tensor([length - 1]), length, 4, 2)


def test_every_kv_head_reads_what_its_own_heads_see() -> None:
    """One head with a short window and one without, each with a kv head of its own: the first reads a window."""
    mask = ByHead((causal() & window(64), causal()))
    (_, short), (_, long) = visible(mask, 0, np.array([6399]), 6400, 2, 2)
    assert short.blocks_N.tolist() == [99]
    assert len(long.blocks_N) == 100


LAST = 700  # beyond the last query that sees any of the keys below, where there is one


@given(mask=st.one_of(SIMPLE, HEADS), length=st.integers(1, 150))
@settings(deadline=None, max_examples=100)
def test_keys_held_are_those_that_the_last_query_or_a_later_one_sees(mask: Mask, length: int) -> None:
    seen = dense(mask, torch.arange(length - 1, LAST), length, heads=6, batch=1)
    wanted = int(seen.flatten(0, 1).any(0).sum())
    assert keys_held(mask, length) >= wanted


@pytest.mark.parametrize(
    ("mask", "length", "held"),
    [
        (causal(), 100, 100),
        (causal() & window(7), 100, 7),
        (causal() & window(7), 3, 3),
        (causal() & chunked(16), 100, 4),  # positions 96 to 99
        (causal() & chunked(16), 97, 1),
        (Ends(4, 10), 100, 14),
        (window(7), 100, 7),
    ],
    ids=str,
)
def test_keys_held_of_masks_that_know(mask: Mask, length: int, held: int) -> None:
    assert keys_held(mask, length) == held
