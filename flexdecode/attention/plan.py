"""Plans: for one step and one mask, which blocks of keys each run of queries reads, and the bits of those read in part.

Made once a step for each distinct mask and shared by all layers that have it. Shape letters: T packed query tokens,
Q queries of a tile, L keys, N blocks of keys, H heads, C kv_heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdecode.attention.cache import KVCache
from flexdecode.attention.masks import Ints, Mask
from flexdecode.attention.pages import GIVEN_BACK
from flexdecode.attention.visible import BLOCK, Settled, Visible, visible
from flexdecode.kernels.ops import FEW_QUERIES

MANY_ROWS = 128  # queries of a tile where they are many: a block of keys is skipped for all of them or for none


@dataclass(frozen=True)
class Tile:
    """A run of one sequence's queries, rows [row, row + count) of the packed q, and what they see.

    `batch` is the caller's index of the sequence, the b of mods; `length` how many keys it holds. `kv_head` is the one
    kv head that this tile is for, None where all see the same. `pages_P` are page numbers by logical page; None where
    position p lies in slot `base` + p.
    """

    row: int
    q_idx_Q: Ints
    batch: int
    length: int
    seen: Visible
    kv_head: int | None = None
    pages_P: NDArray[np.int32] | None = None
    base: int = 0

    @property
    def count(self) -> int:
        return len(self.q_idx_Q)

    def keys_L(self) -> Ints:
        """Positions of the keys of the visible blocks, ascending."""
        keys: Ints = (self.seen.blocks_N.astype(np.int64)[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        return keys[keys < self.length]

    def slots(self, keys_L: Ints, page: int) -> Ints:
        """Where keys lie. A key that was given back lies nowhere, and no row sees it: any slot will do for it."""
        if self.pages_P is None:
            return keys_L + self.base
        numbers = np.maximum(self.pages_P[keys_L // page], 0).astype(np.int64)
        return numbers * page + keys_L % page

    def visible_RL(self) -> Tensor | None:
        """bool [rows, keys_L]: the exact mask, None where all is visible. Rows are the tile's queries, or (head of the
        group, query) where heads differ."""
        bits_at = self.seen.bits_at_N
        if not len(bits_at) or int(bits_at.max()) < 0:
            return None
        rows = self.seen.bits_MR.shape[1]
        words = np.full((len(bits_at), rows), ~np.uint64(0))
        words[bits_at >= 0] = self.seen.bits_MR[bits_at[bits_at >= 0]]
        bits = np.unpackbits(np.ascontiguousarray(words.T).view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : len(self.keys_L())].view(np.bool_))


@dataclass(frozen=True)
class AttentionPlan:
    """The tiles of one step under `mask`, in the order of the packed tokens; `group` is the cache's of that mask."""

    mask: Mask
    group: int
    tiles: tuple[Tile, ...]
    rows: int
    heads: int | None = None  # of the queries, where the mask may differ by head
    batch_invariant: bool = False
    # What a backend has derived from the plan, for the other layers of the step.
    memo: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def few(self) -> bool:
        """Whether reading keys is the work (decoding, verifying), and not multiplying (prefill)."""
        return all(tile.count <= FEW_QUERIES for tile in self.tiles)

    def visible_keys(self, kv_heads: int) -> int:
        """Keys that the step reads, over all sequences and kv heads of one layer."""
        return sum(len(tile.keys_L()) * (kv_heads if tile.kv_head is None else 1) for tile in self.tiles)


def plan_attention(
    cache: KVCache,
    sequences: Sequence[int],
    q_lens: Sequence[int],
    mask: Mask,
    q_positions: Sequence[Tensor] | None = None,
    *,
    heads: int | None = None,
    batch: Sequence[int] | None = None,
    batch_invariant: bool = False,
) -> AttentionPlan:
    """Plan `q_lens[i]` queries of `sequences[i]`, whose keys the cache already counts (`cache.append`).

    A query's position is length - q_len + i; `q_positions[i]` (int64 [q_lens[i]]) overrides it. `heads` is the number
    of query heads, wanted where the mask may differ by head. `batch[i]` is the b that mods are called with, i by
    default. `batch_invariant`: a query's result is to have the same bits whatever other queries come with it.

    Raises ValueError where more queries than tokens are asked for, their keys have been given back, or no group of the
    cache has this mask.
    """
    group = next((i for i, g in enumerate(cache.groups) if g.mask == mask), None)
    if group is None:
        raise ValueError(f"the cache has no layers under {mask}; it has {[g.mask for g in cache.groups]}")
    if q_positions is not None and [len(p) for p in q_positions] != list(q_lens):
        raise ValueError(f"q_positions has {[len(p) for p in q_positions]} positions, q_lens is {list(q_lens)}")
    kv_heads = sorted({x.kv_heads for x, g in zip(cache.layers, cache.group_of, strict=True) if g == group})
    if mask.per_head and len(kv_heads) > 1:
        raise ValueError(
            f"{mask} may differ by head, and its layers have {kv_heads} kv_heads: one plan cannot serve both"
        )
    tiles: list[Tile] = []
    row = 0
    for i, (sequence, count) in enumerate(zip(sequences, q_lens, strict=True)):
        length = cache.length(sequence)
        if not 0 < count <= length:
            raise ValueError(f"{count} queries of a sequence that holds {length} tokens")
        q_idx = np.arange(length - count, length) if q_positions is None else q_positions[i].cpu().numpy()
        own = plan_tiles(
            mask,
            q_idx,
            length,
            heads=heads,
            kv_heads=kv_heads[0],
            row=row,
            batch=i if batch is None else batch[i],
            settled=cache.settled(group, sequence),
            pages_P=cache.groups[group].numbers(sequence),
            many=not batch_invariant,
        )
        if cache.groups[group].has_holes(sequence):
            for tile in own:
                _check_held(tile, cache, group, sequence)
        tiles += own
        row += count
    return AttentionPlan(mask, group, tuple(tiles), row, heads if mask.per_head else None, batch_invariant)


def plan_tiles(
    mask: Mask,
    q_idx_Q: Ints,
    length: int,
    *,
    heads: int | None,
    kv_heads: int,
    row: int = 0,
    batch: int = 0,
    settled: Settled | None = None,
    pages_P: NDArray[np.int32] | None = None,
    base: int = 0,
    many: bool = True,
) -> list[Tile]:
    """The tiles of one sequence: one for few queries, else one for each MANY_ROWS, or without `many` for each
    FEW_QUERIES; by kv head where they differ."""
    if heads is None:
        if mask.per_head:
            raise ValueError(f"{mask} may differ by head: tell the plan how many query heads there are (heads=)")
        heads = kv_heads
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} kv_heads: the one must divide the other")
    mask.check_heads(heads)
    step = MANY_ROWS if many and len(q_idx_Q) > FEW_QUERIES else FEW_QUERIES
    tiles = []
    for first in range(0, len(q_idx_Q), step):
        q_idx = q_idx_Q[first : first + step]
        for kv_head, seen in visible(mask, batch, q_idx, length, heads, kv_heads, settled):
            tiles.append(Tile(row + first, q_idx, batch, length, seen, kv_head, pages_P, base))
    return tiles


def _check_held(tile: Tile, cache: KVCache, group: int, sequence: int) -> None:
    """Every key that some row sees must still be there."""
    assert tile.pages_P is not None
    if cache.page % BLOCK == 0 and (tile.pages_P[tile.seen.blocks_N // (cache.page // BLOCK)] != GIVEN_BACK).all():
        return  # a page of whole blocks is there or is not
    keys = tile.keys_L()
    gone = tile.pages_P[keys // cache.page] == GIVEN_BACK
    if not gone.any():
        return
    seen = tile.visible_RL()
    if seen is not None:
        gone &= seen.any(0).numpy()
    cache.groups[group].slots(sequence, keys[gone])
