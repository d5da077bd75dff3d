"""A plan as FlexAttention reads it: which pages of the pool each tile sees, their bits, and the way back to positions.

Shapes depend on the pool, on the model's heads and on buckets: queries of a tile in powers of two, tiles of a call in
powers of four. What pads them sees nothing and costs next to nothing; a further shape would cost a compilation.
Knows no keys. Shape letters: B tiles of a call, Q their queries, G query heads of a kv head, R rows G·Q, N blocks of
rows, P pages of the pool, W rows of bits; T rows of the packed q. C is 1 where all kv heads see the same.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdecode.attention.masks import Ints
from flexdecode.attention.plan import MANY_ROWS, AttentionPlan, Tile
from flexdecode.attention.visible import BLOCK, Int32s, Words
from flexdecode.kernels.ops import FEW_QUERIES

_ALL, _OWN = 1, 2  # rows of bits: 0 shows nothing, 1 everything, and here the plan's own begin
_TILES = 4  # of a call with many queries


class Tables(NamedTuple):
    """What a compiled function reads beside q, k and v."""

    partial_BCN: Tensor  # int32: how many pages are seen in part,
    partial_BCNP: Tensor  # and which
    full_BCN: Tensor
    full_BCNP: Tensor
    at_BCP: Tensor  # int64: which row of words a page has
    words_WR: Tensor  # int64: bit i is key i of a page
    logical_BP: Tensor  # int64: which page of the sequence a page is
    last_B: Tensor  # int64: the sequence's last position
    q_idx_BR: Tensor
    batch_B: Tensor


class Batch(NamedTuple):
    """Tiles that go in one call, of `queries` rows for each query head."""

    queries: int
    source: Tensor  # int64 [B·Q]: row of the packed q; padding repeats row 0
    rows_T: Tensor  # int64: rows of the packed q that are here,
    take_T: Tensor  # and where they lie in [B·Q]
    tails: Tensor  # int64: slots past the end of a sequence, in pages that are read
    tables: Tables


def lay_out(plan: AttentionPlan, group: int, kv_heads: int, pages: int, device: torch.device) -> tuple[Batch, ...]:
    """The calls of a plan over a pool of `pages` pages: tiles of a bucket in one call, or where queries are many in
    fours. Every tile has pages."""
    many = {tile.batch for tile in plan.tiles if tile.count > FEW_QUERIES}
    by_queries: dict[int, list[tuple[Tile, ...]]] = defaultdict(list)
    for _, of_same_rows in groupby(plan.tiles, lambda tile: tile.row):
        tiles = tuple(of_same_rows)  # one, or one for each kv head
        queries = MANY_ROWS if tiles[0].batch in many else _power(tiles[0].count, 2)
        # A single row would get torch's split decode kernel on a CPU. There a partition that shows nothing counts as if
        # its largest score were 0, beside which real scores of -100 vanish; and where there is none, the result is NaN.
        by_queries[max(queries, 2 if group == 1 else 1)].append(tiles)
    wide = kv_heads if plan.mask.per_head else 1
    return tuple(
        _batch(entries[first : first + step], queries, group, wide, pages, device)
        for queries, entries in by_queries.items()
        for step in (_TILES if queries == MANY_ROWS else len(entries),)
        for first in range(0, len(entries), step)
    )


def row_block(rows: int) -> int:
    """Rows of a block of FlexAttention's mask: Triton's tiles of rows, powers of two from 16 to 128, must divide it."""
    return min(128, max(16, _power(rows, 2)))


def _power(least: int, base: int) -> int:
    """The smallest power of `base` that is not less."""
    power = 1
    while power < least:
        power *= base
    return power


def _batch(
    entries: list[tuple[Tile, ...]], queries: int, group: int, wide: int, pages: int, device: torch.device
) -> Batch:
    size = _TILES if queries == MANY_ROWS else _power(len(entries), 4)
    rows = group * queries
    source, q_idx = np.zeros((2, size, queries), np.int64)
    last, batch = np.zeros((2, size), np.int64)
    logical = np.zeros((size, pages), np.int64)
    rows_T, take_T = [], []
    tails: dict[int, Ints] = {}
    for b, (tile, *_) in enumerate(entries):
        assert tile.pages_P is not None
        here = np.arange(tile.row, tile.row + tile.count)
        source[b, : tile.count] = here
        q_idx[b] = tile.q_idx_Q[0]
        q_idx[b, : tile.count] = tile.q_idx_Q
        last[b], batch[b] = tile.length - 1, tile.batch
        held = np.flatnonzero(tile.pages_P >= 0)
        logical[b, tile.pages_P[held]] = held
        rows_T.append(here)
        take_T.append(b * queries + np.arange(tile.count))
        if tile.length % BLOCK and any(_is_short(tile) for tile in entries[b]):
            end = int(tile.pages_P[tile.length // BLOCK]) * BLOCK
            tails[end] = end + np.arange(tile.length % BLOCK, BLOCK)
    lists = _Lists(size, wide, -(-rows // row_block(rows)), pages)
    for b, tiles in enumerate(entries):
        for tile in tiles:
            lists.add(b, tile, group, queries)

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    # Room for the bits of every page: a mask that settles no block needs no other shape, and what is not filled is
    # never touched.
    words_WR = torch.empty(size * wide * pages + _OWN, rows, dtype=torch.long, device=device)
    own = [np.zeros((1, rows), np.uint64), np.full((1, rows), ~np.uint64(0)), *lists.words]
    words_WR[: lists.next_word] = tensor(np.concatenate(own).view(np.int64))
    return Batch(
        queries,
        tensor(source.ravel()),
        tensor(np.concatenate(rows_T)),
        tensor(np.concatenate(take_T)),
        tensor(np.concatenate([*tails.values(), np.empty(0, np.int64)])),
        Tables(
            tensor(lists.partial),
            tensor(lists.partial_at),
            tensor(lists.full),
            tensor(lists.full_at),
            tensor(lists.at),
            words_WR,
            tensor(logical),
            tensor(last),
            tensor(np.tile(q_idx, group)),
            tensor(batch),
        ),
    )


class _Lists:
    """Pages that are seen, while they are gathered."""

    def __init__(self, size: int, wide: int, row_blocks: int, pages: int) -> None:
        self.partial, self.full = np.zeros((2, size, wide, row_blocks), np.int32)
        self.partial_at, self.full_at = np.zeros((2, size, wide, row_blocks, pages), np.int32)
        self.at = np.zeros((size, wide, pages), np.int64)
        self.words: list[Words] = []
        self.next_word = _OWN

    def add(self, b: int, tile: Tile, group: int, queries: int) -> None:
        partial, full, words = _pages(tile, group, queries)
        here: Any = (b, slice(None) if tile.kv_head is None else tile.kv_head)
        self.partial[here], self.full[here] = len(partial), len(full)
        self.partial_at[here][..., : len(partial)] = partial
        self.full_at[here][..., : len(full)] = full
        at = self.at[here]
        at[..., full] = _ALL
        at[..., partial] = np.arange(self.next_word, self.next_word + len(words))
        self.words.append(words)
        self.next_word += len(words)


def _pages(tile: Tile, group: int, queries: int) -> tuple[Int32s, Int32s, Words]:
    """(pages seen in part, pages seen whole, bits [pages seen in part, R])."""
    assert tile.pages_P is not None
    at_N, bits_MR = tile.seen.bits_at_N, tile.seen.bits_MR
    pages_N, in_part = tile.pages_P[tile.seen.blocks_N], at_N >= 0
    # All there is of a short block may be visible; its page goes on.
    cut = _is_short(tile) and not in_part[-1]
    words = np.zeros((int(in_part.sum()) + cut, group, queries), np.uint64)
    if len(bits_MR):
        own = bits_MR[at_N[in_part]]
        words[: len(own), :, : tile.count] = own.reshape(len(own), own.shape[1] // tile.count, tile.count)
    if cut:
        in_part[-1] = True
        words[-1, :, : tile.count] = (1 << (tile.length % BLOCK)) - 1
    return pages_N[in_part], pages_N[~in_part], words.reshape(len(words), group * queries)


def _is_short(tile: Tile) -> bool:
    """Whether the last block that is seen ends with the sequence, before its page does."""
    blocks_N = tile.seen.blocks_N
    return len(blocks_N) > 0 and (int(blocks_N[-1]) + 1) * BLOCK > tile.length
