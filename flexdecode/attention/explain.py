"""What a mask shows: the blocks of a plan as full, partial or skipped, the keys of one query, and what decided each.

Plain data; how it looks is the command line's business. The blocks are those of the plan that a step would make
(`plan_tiles`); what decided them is in reasons.py. Knows no cache and no model.
Shape letters: T tiles, N blocks, Q queries, L keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdecode.attention.cache import CacheLayer, bytes_per_token
from flexdecode.attention.masks import And, Bools, Ints, Mask, Not, Or, PerHead, Queries, Seen
from flexdecode.attention.plan import Tile, plan_tiles
from flexdecode.attention.reasons import Runs, State, States, normal, parts_of, told
from flexdecode.attention.visible import BLOCK


@dataclass(frozen=True)
class Span:
    """Neighbouring blocks or keys, `first` to `last`, of one state, decided by the same parts of the mask."""

    first: int
    last: int
    state: State
    by: tuple[Mask, ...]


@dataclass(frozen=True)
class BlockMap:
    """What one query head sees, tile by tile of queries and block by block of BLOCK keys.

    `by[by_TN[t, n]]` are the parts of the mask that decided block n of tile t: of a skipped block those that hide it,
    of a full one those that show it, of a partial one those that show a part of it. `queries` are the positions that
    each tile reaches over; `pairs` of `all_pairs` pairs of query and key are visible, and `keys_read` counts the keys
    of the visible blocks, summed over tiles: what must be read.
    """

    mask: Mask
    length: int
    head: int
    queries: tuple[Queries, ...]
    states_TN: States
    by: tuple[tuple[Mask, ...], ...]
    by_TN: NDArray[np.int32]
    pairs: int
    all_pairs: int
    keys_read: int

    @property
    def density(self) -> float:
        """The visible share of all pairs of query and key."""
        return self.pairs / self.all_pairs

    def count(self, state: State) -> int:
        """How many blocks are in this state, over all tiles."""
        return int((self.states_TN == state).sum())

    def deciders(self, state: State) -> dict[tuple[Mask, ...], int]:
        """How many blocks in this state each set of parts decided, the most first."""
        counts = np.bincount(self.by_TN[self.states_TN == state], minlength=len(self.by))
        return dict(Counter({self.by[i]: int(n) for i, n in enumerate(counts) if n}).most_common())

    def spans(self, tile: int) -> list[Span]:
        """The blocks of a tile, neighbours alike in state and reason together."""
        return _spans(np.arange(self.states_TN.shape[1]), self.states_TN[tile], self.by_TN[tile], self.by)

    def bytes_read(self, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Keys and values that one layer reads where all heads see what this one sees."""
        return self.keys_read * bytes_per_token(CacheLayer(kv_heads, head_dim, self.mask), dtype)


@dataclass(frozen=True)
class _OfHead(Mask):
    """What one query head sees, to a plan that knows a single head."""

    mask: Mask
    number: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask(b, torch.tensor(self.number), q_idx, kv_idx)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return self.mask.sees(q, first_N, stop_N)


def explain(mask: Mask, length: int, q_idx_Q: Ints | None = None, *, head: int = 0, batch: int = 0) -> BlockMap:
    """What query head `head` sees of a sequence of `length` keys, and why.

    q_idx_Q int64: positions of the queries, by default all of them, which is a prefill. `batch` is the b that mods are
    called with. Raises ValueError where the mask has no such head, or a function in it fails.
    """
    _check_length(length)
    own = mask.head(head)
    form = normal(own)
    parts = parts_of(form)
    tiles = _tiles(own, length, np.arange(length) if q_idx_Q is None else q_idx_Q, head, batch)
    by: dict[tuple[Mask, ...], int] = {}
    by_TN = np.empty((len(tiles), -(-length // BLOCK)), np.int32)
    states_TN = np.zeros(by_TN.shape, np.int8)
    for t, tile in enumerate(tiles):
        runs = _blocks(own, tile, head)
        states_TN[t, tile.seen.blocks_N] = np.where(tile.seen.bits_at_N < 0, State.FULL, State.PARTIAL)
        by_TN[t] = _numbered(told(form, parts, runs).why_FN, parts, by)
    return BlockMap(
        mask=own,
        length=length,
        head=head,
        queries=tuple(Queries(int(tile.q_idx_Q.min()), int(tile.q_idx_Q.max()) + 1) for tile in tiles),
        states_TN=states_TN,
        by=tuple(by),
        by_TN=by_TN,
        pairs=sum(_pairs(tile) for tile in tiles),
        all_pairs=sum(tile.count for tile in tiles) * length,
        keys_read=sum(len(tile.keys_L()) for tile in tiles),
    )


def explain_row(mask: Mask, length: int, position: int, *, head: int = 0, batch: int = 0) -> list[Span]:
    """Which of `length` keys the query at `position` sees, as runs of keys that are FULL (seen) or SKIPPED (hidden),
    and which parts of the mask decided each. Raises ValueError as `explain` does."""
    _check_length(length)
    own = mask.head(head)
    form = normal(own)
    parts = parts_of(form)
    (tile,) = _tiles(own, length, np.array([position]), head, batch)
    blocks = _blocks(own, tile, head)
    by: dict[tuple[Mask, ...], int] = {}
    whole = told(form, parts, blocks)
    counts_N = blocks.stop_N - blocks.first_N
    states_L = np.repeat(whole.states_N, counts_N)
    by_L = np.repeat(_numbered(whole.why_FN, parts, by), counts_N)
    if len(keys := blocks.keys_K):  # in blocks seen in part, key by key
        single = Runs(tile.q_idx_Q, keys, keys + 1, np.ones(len(keys), np.bool_), head, batch)
        each = told(form, parts, single)
        states_L[keys], by_L[keys] = each.states_N, _numbered(each.why_FN, parts, by)
    return _spans(np.arange(length), states_L, by_L, tuple(by))


def shown(mask: Mask, length: int, q_idx_Q: Ints | None = None, *, head: int = 0, batch: int = 0) -> Bools:
    """bool [Q, L]: the exact mask of one query head, as a plan holds it."""
    _check_length(length)
    q_idx = np.arange(length) if q_idx_Q is None else q_idx_Q
    shown_QL = np.zeros((len(q_idx), length), np.bool_)
    for tile in _tiles(mask.head(head), length, q_idx, head, batch):
        bits = tile.visible_RL()
        shown_QL[tile.row : tile.row + tile.count, tile.keys_L()] = True if bits is None else bits.numpy()
    return shown_QL


def heads_wanted(mask: Mask) -> int | None:
    """For how many query heads the mask was made, None where for any number."""
    if isinstance(mask, PerHead):
        return len(mask.masks)
    inner = mask.parts if isinstance(mask, (And, Or)) else (mask.mask,) if isinstance(mask, Not) else ()
    return next((heads for part in inner if (heads := heads_wanted(part)) is not None), None)


def alike_heads(mask: Mask, length: int, q_idx_Q: Ints, heads: int, *, batch: int = 0) -> list[list[int]]:
    """Query heads that see exactly the same, together, in the order of their first."""
    if not mask.per_head:
        return [list(range(heads))]
    mask.check_heads(heads)
    by_mask: dict[Mask, object] = {}
    groups: dict[object, list[int]] = {}
    for head in range(heads):
        own = mask.head(head)
        if own.per_head or own not in by_mask:  # a plain function of the head must be asked for each
            seen = [tile.seen for tile in _tiles(own, length, q_idx_Q, head, batch)]
            by_mask[own] = tuple((x.blocks_N.tobytes(), x.bits_at_N.tobytes(), x.bits_MR.tobytes()) for x in seen)
        groups.setdefault(by_mask[own], []).append(head)
    return list(groups.values())


def keys_seen(tiles: Sequence[Tile], kv_heads: int) -> int:
    """Keys that some query head sees, summed over tiles and kv heads: exact, where a plan counts whole blocks."""
    total = 0
    for tile in tiles:
        bits = tile.visible_RL()
        seen = len(tile.keys_L()) if bits is None else int(bits.any(0).sum())
        total += seen * (kv_heads if tile.kv_head is None else 1)
    return total


def _check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"a sequence of {length} keys has nothing to see; the length is at least 1")


def _tiles(own: Mask, length: int, q_idx_Q: Ints, head: int, batch: int) -> list[Tile]:
    return plan_tiles(_OfHead(own, head), q_idx_Q, length, heads=None, kv_heads=1, batch=batch)


def _blocks(own: Mask, tile: Tile, head: int) -> Runs:
    """The blocks of a sequence for a tile's queries; asked are those for which the mask promises nothing."""
    first_N = np.arange(0, tile.length, BLOCK)
    stop_N = np.minimum(first_N + BLOCK, tile.length)
    seen = own.sees(Queries(int(tile.q_idx_Q.min()), int(tile.q_idx_Q.max()) + 1), first_N, stop_N)
    return Runs(tile.q_idx_Q, first_N, stop_N, seen.some & ~seen.every, head, tile.batch)


def _pairs(tile: Tile) -> int:
    bits = tile.visible_RL()
    return tile.count * len(tile.keys_L()) if bits is None else int(bits.sum())


def _numbered(why_FN: Bools, parts: Sequence[Mask], by: dict[tuple[Mask, ...], int]) -> NDArray[np.int32]:
    """Each column's set of parts as its number in `by`, which takes the new ones."""
    columns, index_N = np.unique(np.packbits(why_FN, axis=0), axis=1, return_inverse=True)
    sets = np.unpackbits(columns, axis=0)[: len(parts)].astype(np.bool_)
    numbers = [
        by.setdefault(tuple(part for part, decided in zip(parts, column, strict=True) if decided), len(by))
        for column in sets.T
    ]
    return np.array(numbers, np.int32)[index_N.ravel()]


def _spans(places: Ints, states: States, by_index: NDArray[np.int32], by: Sequence[tuple[Mask, ...]]) -> list[Span]:
    new = np.flatnonzero((np.diff(states) != 0) | (np.diff(by_index) != 0)) + 1
    starts, ends = [0, *new.tolist()], [*(new - 1).tolist(), len(places) - 1]
    return [
        Span(int(places[a]), int(places[b]), State(int(states[a])), by[by_index[a]])
        for a, b in zip(starts, ends, strict=True)
    ]
