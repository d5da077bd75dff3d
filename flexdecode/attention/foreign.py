"""Masks that come in other forms: torch's BlockMask, a tensor of bools, which keys of a padded batch are there.

Knows no cache and no queries. Shape letters as in masks.py; in `kinds_HQK` Q blocks of queries and K blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdecode.attention.algebra import UNBOUNDED, Bools, Ints, Mask, MaskMod, Queries, Seen, unknown
from flexdecode.attention.functions import mask_values

NONE, PARTIAL, FULL = range(3)  # what a query block sees of a key block


@dataclass(frozen=True, repr=False)
class Everything(Mask):
    """Every query sees every key."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx == q_idx) & (kv_idx == kv_idx)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return Seen(np.ones(len(first_N), np.bool_), np.ones(len(first_N), np.bool_))


@dataclass(frozen=True, repr=False)
class Shifted(Mask):
    """`mask` with positions counted from elsewhere: our position p is its p + `by`."""

    mask: Mask
    by: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask(b, h, q_idx + self.by, kv_idx + self.by)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        stop = q.stop if q.stop == UNBOUNDED else q.stop + self.by
        return self.mask.sees(Queries(q.first + self.by, stop), first_N + self.by, stop_N + self.by)


@dataclass(frozen=True, repr=False, eq=False)
class Lookup(Mask):
    """seen_HQL bool [1 or heads, queries, keys], looked up by position."""

    seen_HQL: Tensor

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.seen_HQL[h.reshape(-1)] if self.per_head else self.seen_HQL
        return seen[:, q_idx.reshape(-1)][:, :, kv_idx]

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return unknown(first_N)

    @property
    def per_head(self) -> bool:
        return self.seen_HQL.shape[0] > 1


@dataclass(frozen=True, repr=False, eq=False)
class Held(Mask):
    """Keys that are there, whoever asks: held_L bool, so that padding is never read."""

    held_L: Bools

    @cached_property
    def _before(self) -> Ints:
        """How many keys before each position are there."""
        return np.concatenate([[0], np.cumsum(self.held_L, dtype=np.int64)])

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.from_numpy(self.held_L)[kv_idx]

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        count = self._before[stop_N] - self._before[first_N]
        return Seen(count > 0, count == stop_N - first_N)


@dataclass(frozen=True, repr=False, eq=False)
class Blocks(Mask):
    """A BlockMask for one batch index: kinds_HQK says which blocks are seen, mask_mod which keys of the partial ones.

    kinds_HQK has one H where the lists are shared by all heads; mask_mod may still tell heads apart.
    """

    kinds_HQK: NDArray[np.uint8]
    size: tuple[int, int]
    mask_mod: MaskMod

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_at, kv_at = q_idx.reshape(-1) // self.size[0], kv_idx // self.size[1]
        kinds = torch.from_numpy(self.kinds_HQK)
        if len(kinds) > 1:
            kinds = kinds[h.reshape(-1)]
        kinds = kinds[:, q_at][:, :, kv_at]
        full, partial = kinds == FULL, kinds == PARTIAL
        return full | partial & mask_values(self.mask_mod, b, h, q_idx, kv_idx) if bool(partial.any()) else full

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        rows = self.kinds_HQK[:, q.first // self.size[0] : (q.stop - 1) // self.size[0] + 1]
        rows_RK = rows.reshape(-1, rows.shape[2])
        some = np.concatenate([[0], np.cumsum((rows_RK != NONE).any(0), dtype=np.int64)])
        every = np.concatenate([[0], np.cumsum((rows_RK == FULL).all(0), dtype=np.int64)])
        first, stop = first_N // self.size[1], (stop_N - 1) // self.size[1] + 1
        return Seen(some[stop] > some[first], every[stop] - every[first] == stop - first)

    @property
    def per_head(self) -> bool:
        return True

    def head(self, h: int) -> Mask:
        return self if len(self.kinds_HQK) == 1 else self._heads[h]

    @cached_property
    def _heads(self) -> list[Mask]:
        return [Blocks(kinds_QK[None], self.size, self.mask_mod) for kinds_QK in self.kinds_HQK]


def blocks_of(block_mask: BlockMask) -> list[Blocks]:
    """A BlockMask's masks, one for each batch index that it tells apart. Raises ValueError where a list names a block
    that is not there."""
    queries, keys = block_mask.seq_lengths
    size = block_mask.BLOCK_SIZE
    rows, columns = -(-queries // size[0]), -(-keys // size[1])
    kinds = np.full((*block_mask.kv_num_blocks.shape[:2], rows, columns), NONE, np.uint8)
    _mark(kinds, block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        _mark(kinds, block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL)
    return [Blocks(kinds_HQK, size, block_mask.mask_mod) for kinds_HQK in kinds]


def _mark(kinds_BHQK: NDArray[np.uint8], num_BHQ: Tensor, at_BHQN: Tensor, kind: int) -> None:
    rows, columns = kinds_BHQK.shape[2:]
    if num_BHQ.shape[2] < rows:
        raise ValueError(f"block_mask lists {num_BHQ.shape[2]} blocks of queries, its seq_lengths need {rows}")
    num, at = num_BHQ[:, :, :rows].numpy(), at_BHQN[:, :, :rows].numpy()
    listed = np.arange(at.shape[3]) < num[..., None]
    if listed.any() and not 0 <= at[listed].min() <= at[listed].max() < columns:
        raise ValueError(f"block_mask lists the block of keys {at[listed].max()}, its seq_lengths have {columns}")
    b, h, q, _ = np.nonzero(listed)
    kinds_BHQK[b, h, q, at[listed]] = kind
