"""Plans: for one step and one mask, which keys each sequence's queries read, and how.

Made once a step for each distinct mask and shared by all layers that have it. Shape letters: T packed query tokens,
Q queries of one sequence, L keys that any of them sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexdecode.attention.cache import KVCache
from flexdecode.attention.masks import Mask
from flexdecode.kernels.ops import FEW_QUERIES


@dataclass(frozen=True)
class Tile:
    """One sequence's queries: rows [row, row + count) of the packed q, against keys [start, stop).

    `positions` are the queries' own; `pages` are the page numbers from the page of `start` on, and `run` holds the
    keys' slots. `visible_QL` is the exact mask, None where all is
    visible; `causal` says that the mask is the plain lower triangle of a square, for backends that have a path of
    their own for it.
    """

    row: int
    positions: Sequence[int]
    start: int
    stop: int
    pages: Sequence[int]
    run: slice | Tensor
    visible_QL: Tensor | None
    causal: bool = False

    @property
    def count(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class AttentionPlan:
    """The tiles of one step under `mask`, in the order of the packed tokens."""

    mask: Mask
    group: int
    tiles: tuple[Tile, ...]
    rows: int
    # What a backend has derived from the plan, for the other layers of the step.
    memo: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def few(self) -> bool:
        """Whether reading keys is the work (decoding, verifying), and not multiplying (prefill)."""
        return all(tile.count <= FEW_QUERIES for tile in self.tiles)

    @property
    def visible_keys(self) -> int:
        """Keys that the step reads, over all sequences (one layer, one head)."""
        return sum(tile.stop - tile.start for tile in self.tiles)


def plan_attention(
    cache: KVCache,
    sequences: Sequence[int],
    q_lens: Sequence[int],
    mask: Mask,
    q_positions: Sequence[Tensor] | None = None,
) -> AttentionPlan:
    """Plan `q_lens[i]` queries of `sequences[i]`, whose keys the cache already counts (`cache.append`).

    A query's position is length - q_len + i; `q_positions[i]` (int64 [q_lens[i]]) overrides it. Raises ValueError
    where more queries than tokens are asked for, their keys have been given back, or no group of the cache has this
    mask.
    """
    group = next((i for i, g in enumerate(cache.groups) if g.mask == mask), None)
    if group is None:
        raise ValueError(f"the cache has no layers under {mask}; it has {[g.mask for g in cache.groups]}")
    if q_positions is not None and [len(p) for p in q_positions] != list(q_lens):
        raise ValueError(f"q_positions has {[len(p) for p in q_positions]} positions, q_lens is {list(q_lens)}")
    tiles, row = [], 0
    for i, (sequence, count) in enumerate(zip(sequences, q_lens, strict=True)):
        length = cache.length(sequence)
        if not 0 < count <= length:
            raise ValueError(f"{count} queries of a sequence that holds {length} tokens")
        positions = range(length - count, length) if q_positions is None else q_positions[i].tolist()
        tiles.append(_tile(cache, group, sequence, mask, row, positions, i))
        row += count
    return AttentionPlan(mask, group, tuple(tiles), row)


def _tile(
    cache: KVCache, group: int, sequence: int, mask: Mask, row: int, positions: Sequence[int], index: int
) -> Tile:
    length = cache.length(sequence)
    spans = [mask.span(q) for q in positions]
    start = min(length, min(span.start for span in spans))
    stop = max(start, min(length, max(span.stop for span in spans)))
    run = cache.locate(group, sequence, start, stop)
    pages = cache.groups[group].pages_between(sequence, start, stop)
    if all(span.full and span.start <= start and span.stop >= stop for span in spans):
        return Tile(row, positions, start, stop, pages, run, None)
    device = cache.device
    q_idx = torch.tensor(list(positions), device=device)[:, None]
    kv_idx = torch.arange(start, stop, device=device)[None, :]
    visible = mask(torch.tensor(index, device=device), torch.tensor(0, device=device), q_idx, kv_idx)
    visible = visible.expand(len(positions), stop - start)  # a mask need not look at both indices
    triangle = list(positions) == list(range(stop)) and all(
        span == (0, q + 1, True) for q, span in zip(positions, spans, strict=True)
    )
    return Tile(row, positions, start, stop, pages, run, visible, triangle)
