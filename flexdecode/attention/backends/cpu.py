"""Attention by kernels of our own on a CPU: every visible key and value is read once, for all heads that share it.

Queries of a sequence go in tiles of a few rows, each with the pages, the key range and, where its mask has holes, the
exact bits that it needs; the kernel cuts them into pieces for the threads, by each sequence's length alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexdecode.attention.cache import KVCache
from flexdecode.attention.plan import AttentionPlan, Tile
from flexdecode.attention.scores import ScoreMod, Softcap
from flexdecode.kernels import ops

if TYPE_CHECKING:
    from flexdecode.attention.attend import Request

_BLOCK = 64  # positions whose bits share a word; the kernel's block of keys


@dataclass(frozen=True)
class PackedPlan:
    """A plan as `ops.attend_few` reads it."""

    tiles: Tensor
    table: Tensor
    bits: Tensor


class Cpu:
    """Any mask, softcap, sinks, lse; bf16, fp16, fp32 and int8 caches."""

    name = "cpu"

    def unsupported(self, request: Request) -> str | None:
        if request.score is not None and not isinstance(request.score, Softcap):
            return f"the CPU kernels know one score modification, softcap, and not {request.score}"
        return ops.attend_few_unsupported(request.device, request.dtype, request.kv_dtype)

    def run(
        self,
        q_THD: Tensor,
        cache: KVCache,
        layer: int,
        plan: AttentionPlan,
        score: ScoreMod | None,
        sinks_H: Tensor | None,
        scale: float,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        packed = plan.memo.get(self.name)
        if not isinstance(packed, PackedPlan):
            packed = plan.memo[self.name] = pack(plan, cache.page)
        k_CSD, k_scale_CS, v_CSD, v_scale_CS = cache.storage(layer)
        return ops.attend_few(
            q_THD,
            k_CSD,
            v_CSD,
            k_scale_CS,
            v_scale_CS,
            packed.tiles,
            packed.table,
            packed.bits,
            page=cache.page,
            scale=scale,
            softcap=score.cap if isinstance(score, Softcap) else 0.0,
            sinks_H=sinks_H,
            return_lse=return_lse,
        )


def pack(plan: AttentionPlan, page: int) -> PackedPlan:
    """Cut each tile into pieces of at most FEW_QUERIES rows, and each piece's keys to those that its rows see."""
    tiles: list[list[int]] = []
    pages: list[int] = []
    words: list[Tensor] = []
    held = 0  # words so far
    for tile in plan.tiles:
        at = len(pages)
        pages.extend(tile.pages)
        for first in range(0, tile.count, ops.FEW_QUERIES):
            rows = range(first, min(first + ops.FEW_QUERIES, tile.count))
            start, stop, bits = _piece(tile, rows)
            offset = -1
            if bits is not None:
                offset, held = held, held + bits.numel()
                words.append(bits.flatten())
            skipped = start // page - tile.start // page
            tiles.append([tile.row + first, len(rows), start, stop, at + skipped, offset])
    return PackedPlan(
        torch.tensor(tiles, dtype=torch.long).view(-1, 6),
        torch.tensor(pages, dtype=torch.int32),
        torch.cat(words) if words else torch.empty(0, dtype=torch.long),
    )


def _piece(tile: Tile, rows: range) -> tuple[int, int, Tensor | None]:
    """First key, last key + 1, and the bits [rows, blocks] of a tile's rows; None where they see all between."""
    if tile.visible_QL is None:
        return tile.start, tile.stop, None
    visible = tile.visible_QL[rows.start : rows.stop]
    seen = visible.any(0).nonzero()
    if len(seen) == 0:
        return tile.start, tile.start, None
    low, high = int(seen[0]), int(seen[-1]) + 1
    visible = visible[:, low:high]
    start, stop = tile.start + low, tile.start + high
    return start, stop, None if bool(visible.all()) else _words(visible, start)


def _words(visible_QL: Tensor, start: int) -> Tensor:
    """int64 [Q, blocks]: bit i of a word is position i of its block of 64, blocks aligned to positions."""
    before = start % _BLOCK
    length = visible_QL.shape[1]
    after = -(before + length) % _BLOCK
    bits = torch.nn.functional.pad(visible_QL, (before, after)).view(len(visible_QL), -1, _BLOCK)
    return (bits.long() << torch.arange(_BLOCK)).sum(-1)
