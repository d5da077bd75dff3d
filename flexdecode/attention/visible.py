"""Which blocks of 64 keys a run of queries sees, and the exact bits of those that it sees in part.

Knows positions and masks, no cache and no pages. Shape letters: Q queries, H heads, N blocks, L keys, R rows of bits:
the queries, or (head of the group, query) where heads see different keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from flexdecode.attention.masks import UNBOUNDED, Causal, Ints, Mask, Queries, Seen

BLOCK = 64  # keys that share a word of bits; block n holds positions 64·n … 64·n + 63

Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]

_NO_WORDS = np.empty((0, 1), np.uint64)


@dataclass(frozen=True)
class Visible:
    """Blocks that some row sees, ascending. bits_at_N: -1 where every row sees every key, else a row of bits_MR.

    Bit i of a word is key i of its block. A block's keys end with the sequence.
    """

    blocks_N: Int32s
    bits_at_N: Int32s
    bits_MR: Words


class Settled:
    """What no later query changes: blocks that all of them see whole, and blocks that none sees.

    Only the `open` ones are asked again when a sequence grows, so a plan for one more token costs what is undecided
    under the mask: a window's blocks, the last block of a causal sequence, all under a plain function.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._since, self._known = 0, 0  # first query for which it holds; blocks that were looked at
        self._full_N = np.empty(0, np.int32)
        self._open_N = np.empty(0, np.int32)

    def copy(self) -> Settled:
        twin = Settled()
        twin._since, twin._known, twin._full_N, twin._open_N = self._since, self._known, self._full_N, self._open_N
        return twin

    def truncate(self, length: int) -> None:
        """The sequence has only `length` keys left: of the blocks, those that they fill are known."""
        if length // BLOCK < self._known:
            self._known = length // BLOCK
            self._full_N = self._full_N[: np.searchsorted(self._full_N, self._known)]
            self._open_N = self._open_N[: np.searchsorted(self._open_N, self._known)]

    def advance(self, mask: Mask, first: int, length: int) -> tuple[Int32s, Int32s]:
        """(blocks that queries from `first` on see whole, blocks to ask) of a sequence of `length` keys."""
        if first < self._since:
            self.clear()
        complete = length // BLOCK
        if complete > self._known:
            asked = np.concatenate([self._open_N, np.arange(self._known, complete, dtype=np.int32)])
            seen = _sees(mask, Queries(first, UNBOUNDED), asked, length)
            full = asked[seen.every]
            if len(full):
                self._full_N = np.concatenate([self._full_N, full])
                if len(self._full_N) > len(full) and full[0] < self._full_N[-len(full) - 1]:
                    self._full_N = np.sort(self._full_N)
            self._open_N, self._known, self._since = asked[seen.some & ~seen.every], complete, first
        if length % BLOCK:
            return self._full_N, np.append(self._open_N, np.int32(complete))
        return self._full_N, self._open_N


def visible(
    mask: Mask, batch: int, q_idx_Q: Ints, length: int, heads: int, kv_heads: int, settled: Settled | None = None
) -> list[tuple[int | None, Visible]]:
    """What the queries at `q_idx_Q` see of keys 0 … length - 1: once for all heads, or for each kv head.

    `settled` is the sequence's, for queries that only move on.
    """
    if len(q_idx_Q) == 1 and isinstance(mask, Causal) and int(q_idx_Q[0]) == length - 1:
        return _whole(-(-length // BLOCK))  # decoding, as most do it: there is nothing to find out
    q = Queries(int(q_idx_Q.min()), int(q_idx_Q.max()) + 1)
    group = heads // kv_heads
    if not mask.per_head:
        full, asked = (
            (np.empty(0, np.int32), _all(length)) if settled is None else settled.advance(mask, q.first, length)
        )
        seen = _sees(mask, q, asked, length)
        full, partial = _join(full, asked[seen.every]), asked[seen.some & ~seen.every]
        if not len(partial):
            return [(None, Visible(full, np.full(len(full), -1, np.int32), _NO_WORDS))]
        bits = _bits(mask, batch, np.zeros(1, np.int64), q_idx_Q, partial, length)
        return [(None, _assemble(full, partial, bits[0], length))]
    every_block = _all(length)
    kinds = [tuple(mask.head(h) for h in range(c * group, (c + 1) * group)) for c in range(kv_heads)]
    if all(kind == kinds[0] for kind in kinds):
        full, partial = _classify(kinds[0], q, every_block, length)
        bits = _bits(mask, batch, np.arange(heads), q_idx_Q, partial, length)
        if len(bits) == 1:  # no head differs
            return [(None, _assemble(full, partial, bits[0], length))]
        return [
            (c, _assemble(full, partial, _rows(bits[c * group : (c + 1) * group]), length)) for c in range(kv_heads)
        ]
    found: list[tuple[int | None, Visible]] = []
    for c, kind in enumerate(kinds):
        full, partial = _classify(kind, q, every_block, length)
        bits = _bits(mask, batch, np.arange(c * group, (c + 1) * group), q_idx_Q, partial, length)
        found.append((c, _assemble(full, partial, bits[0] if len(bits) == 1 else _rows(bits), length)))
    return found


@lru_cache(maxsize=128)  # a block's steps share it
def _whole(blocks: int) -> list[tuple[int | None, Visible]]:
    """All of so many blocks, for all heads."""
    return [(None, Visible(np.arange(blocks, dtype=np.int32), np.full(blocks, -1, np.int32), _NO_WORDS))]


def keys_held(mask: Mask, length: int) -> int:
    """Of the keys of a sequence, how many its last query or a later one may see: what a cache must keep."""
    keys = np.arange(length)
    return int(mask.sees(Queries(length - 1, UNBOUNDED), keys, keys + 1).some.sum())


def _all(length: int) -> Int32s:
    return np.arange(-(-length // BLOCK), dtype=np.int32)


def _sees(mask: Mask, q: Queries, blocks_N: Int32s, length: int) -> Seen:
    first = blocks_N.astype(np.int64) * BLOCK
    return mask.sees(q, first, np.minimum(first + BLOCK, length))


def _classify(kind: tuple[Mask, ...], q: Queries, blocks_N: Int32s, length: int) -> tuple[Int32s, Int32s]:
    """(blocks that all of these masks show whole, blocks that some may show in part)."""
    seen = [_sees(mask, q, blocks_N, length) for mask in dict.fromkeys(kind)]
    every = np.logical_and.reduce([s.every for s in seen])
    return blocks_N[every], blocks_N[np.logical_or.reduce([s.some for s in seen]) & ~every]


def _bits(mask: Mask, batch: int, heads_H: Ints, q_idx_Q: Ints, blocks_N: Int32s, length: int) -> Words:
    """uint64 [H or 1, N, Q]: the mask itself at every key of these blocks; beyond the sequence it is not asked."""
    if not len(blocks_N):
        return np.empty((1, 0, len(q_idx_Q)), np.uint64)
    kv_idx = (blocks_N.astype(np.int64)[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    count = len(kv_idx)
    if kv_idx[-1] >= length:
        kv_idx = kv_idx[: length - int(blocks_N[-1]) * BLOCK + count - BLOCK]
    q_idx = torch.from_numpy(q_idx_Q)[:, None]
    heads = torch.from_numpy(heads_H)[:, None, None] if len(heads_H) > 1 else torch.tensor(int(heads_H[0]))
    answer = mask(torch.tensor(batch), heads, q_idx, torch.from_numpy(kv_idx))
    seen = answer if answer.dim() == 3 and answer.shape[0] > 1 else answer.reshape(answer.shape[-2:])[None]
    seen = seen.expand(seen.shape[0], len(q_idx_Q), len(kv_idx))
    flat = np.zeros((*seen.shape[:2], count), np.bool_)
    flat[..., : len(kv_idx)] = seen.numpy()
    words = np.packbits(flat, axis=-1, bitorder="little").view(np.uint64)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


def _rows(bits_GNQ: Words) -> Words:
    """[N, G·Q]: rows in the order (head of the group, query)."""
    return np.ascontiguousarray(bits_GNQ.transpose(1, 0, 2)).reshape(bits_GNQ.shape[1], -1)


def _join(full_N: Int32s, more_N: Int32s) -> Int32s:
    if not len(more_N):
        return full_N
    joined = np.concatenate([full_N, more_N])
    return np.sort(joined) if len(full_N) and more_N[0] < full_N[-1] else joined


def _assemble(full_N: Int32s, partial_N: Int32s, bits_NR: Words, length: int) -> Visible:
    """Merge, leaving out blocks that turned out empty, and without the bits of those that turned out full."""
    whole = np.full(len(partial_N), ~np.uint64(0))
    if len(partial_N) and (int(partial_N[-1]) + 1) * BLOCK > length:
        whole[-1] = np.uint64((1 << (length % BLOCK)) - 1)
    proved = (bits_NR == whole[:, None]).all(1)
    some = bits_NR.any(1) & ~proved
    bits = bits_NR[some]
    blocks = np.concatenate([full_N, partial_N[proved], partial_N[some]])
    at = np.concatenate([np.full(len(blocks) - len(bits), -1, np.int32), np.arange(len(bits), dtype=np.int32)])
    order = np.argsort(blocks, kind="stable")
    return Visible(blocks[order], at[order], bits)
