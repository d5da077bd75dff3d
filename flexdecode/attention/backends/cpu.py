"""Attention by kernels of our own on a CPU: every visible key and value is read once, for all heads that share it.

A plan is packed once into the arrays that the kernels read. Shape letters as in plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdecode.attention.plan import AttentionPlan, Tile
from flexdecode.attention.request import Call, Request
from flexdecode.attention.scores import Score, evaluate, steps
from flexdecode.attention.visible import BLOCK
from flexdecode.kernels import ops
from flexdecode.kernels.ops import PackedTiles

_SCORES = 1 << 26  # kept at a time between two passes, fp32: 256 MB
_ROW_BLOCKS = 1 << 15  # of tiles computed together: what their pieces leave for merging stays below some 100 MB


class Cpu:
    """Any mask, any score modification, sinks, lse; bf16, fp16, fp32 and int8 caches."""

    name = "cpu"

    def unsupported(self, request: Request) -> str | None:
        if request.batch_invariant and request.score is not None and steps(request.score) is None:
            return f"{request.score} is computed by torch, whose bits change with a tensor's shape"
        return ops.attend_unsupported(request.device, request.dtype, request.kv_dtype)

    def run(self, call: Call) -> tuple[Tensor, Tensor | None]:
        q_THD = call.q_THD
        heads, kv_heads = q_THD.shape[1], call.kv.k_CSD.shape[0]
        if isinstance(call.score, Score):
            call.score.check_heads(heads)
        known = () if call.score is None else steps(call.score)
        out_THD = q_THD.new_empty(*q_THD.shape[:2], call.kv.v_CSD.shape[2])
        into = out_THD, torch.empty(q_THD.shape[:2]) if call.return_lse else None
        key = f"{self.name} {heads} {kv_heads} {known is None}"
        packed = call.plan.memo.get(key)
        if not isinstance(packed, list):
            packed = call.plan.memo[key] = _packs(call.plan.tiles, heads, kv_heads, in_passes=known is None)
        for tiles, arrays in packed:
            if known is None:
                _in_passes(call, tiles, arrays, into, self.name)
            else:
                _kernel(call, tiles, arrays, into, steps=known)
        return into


def packed(plan: AttentionPlan) -> PackedTiles:
    """The arrays of a plan, for kernels that attend as a part of what they do, without keeping scores."""
    found = plan.memo.get("cpu packed")
    if not isinstance(found, PackedTiles):
        found = plan.memo["cpu packed"] = pack(plan.tiles, 1, 1)
    return found


def _packs(tiles: tuple[Tile, ...], heads: int, kv_heads: int, in_passes: bool) -> list[tuple[list[Tile], PackedTiles]]:
    """Tiles of few queries and those of many, packed apart; where scores must be kept, so many rows of a tile at a time
    that they do not fill the memory."""
    if in_passes:
        groups = [[part] for tile in tiles for part in _parts(tile, _SCORES // heads)]
    else:
        few = [tile for tile in tiles if tile.count <= ops.FEW_QUERIES]
        groups = [*_bounded(few), [tile for tile in tiles if tile.count > ops.FEW_QUERIES]]
    return [(group, pack(group, heads, kv_heads)) for group in groups if group]


def _bounded(tiles: Sequence[Tile]) -> Iterator[list[Tile]]:
    """Runs of tiles of few queries, of which there are many only where a prompt is cut into such."""
    run: list[Tile] = []
    held = 0
    for tile in tiles:
        size = tile.count * len(tile.seen.blocks_N)
        if run and held + size > _ROW_BLOCKS:
            yield run
            run, held = [], 0
        run.append(tile)
        held += size
    yield run


def _parts(tile: Tile, scores: int) -> Iterator[Tile]:
    """A tile's rows in runs of at most `scores` scores a head."""
    step = max(1, min(tile.count, scores // max(1, len(tile.seen.blocks_N) * BLOCK)))
    for first in range(0, tile.count, step):
        rows = slice(first, first + step)
        bits = tile.seen.bits_MR
        if len(bits):
            own = bits.reshape(len(bits), -1, tile.count)[:, :, rows]
            bits = np.ascontiguousarray(own).reshape(len(bits), -1)
        yield replace(tile, row=tile.row + first, q_idx_Q=tile.q_idx_Q[rows], seen=replace(tile.seen, bits_MR=bits))


def _kernel(call: Call, tiles: list[Tile], arrays: PackedTiles, into: ops.Result, **options: Any) -> None:
    kv = call.kv
    kernel = ops.attend_few if tiles[0].count <= ops.FEW_QUERIES else ops.attend_many
    kernel(
        call.q_THD,
        kv.k_CSD,
        kv.v_CSD,
        kv.k_scale_CS,
        kv.v_scale_CS,
        arrays,
        page=kv.page,
        scale=call.scale,
        sinks_H=call.sinks_H,
        into=into,
        alike=call.plan.batch_invariant,
        **options,
    )


def _in_passes(call: Call, tiles: list[Tile], arrays: PackedTiles, into: ops.Result, name: str) -> None:
    """Scores by the kernel, the user's function on them, softmax and weighted sum by the kernel."""
    assert call.score is not None
    # Memory that was touched before: new pages cost as much as the scores do. The step's layers use it in turn.
    scores = call.plan.memo.get(f"{name} scores")
    if not isinstance(scores, Tensor) or scores.numel() < arrays.kept:
        scores = call.plan.memo[f"{name} scores"] = torch.empty(arrays.kept)
    _kernel(call, tiles, arrays, into, only="score", scores=scores)
    heads, group = call.q_THD.shape[1], call.q_THD.shape[1] // call.kv.k_CSD.shape[0]
    for tile, at in zip(tiles, arrays.tiles[:, -1].tolist(), strict=True):
        h_H = torch.arange(heads) if tile.kv_head is None else torch.arange(group) + tile.kv_head * group
        keys_L = tile.keys_L()
        shape = len(h_H), tile.count, len(tile.seen.blocks_N) * BLOCK
        # What lies past the sequence's end is not asked: a captured table need be no longer than the sequence.
        own_HQL = scores[at : at + math.prod(shape)].view(shape)[..., : len(keys_L)]
        b, q_idx_Q = torch.tensor(tile.batch), torch.from_numpy(tile.q_idx_Q)
        own_HQL.copy_(evaluate(call.score, own_HQL, b, h_H, q_idx_Q, torch.from_numpy(keys_L)))
    _kernel(call, tiles, arrays, into, only="weigh", scores=scores)


def pack(tiles: Sequence[Tile], heads: int, kv_heads: int) -> PackedTiles:
    """The arrays of a plan."""
    rows: list[tuple[int, ...]] = []
    tables: dict[int, int] = {}  # where a sequence's page numbers begin
    pages: list[NDArray[Any]] = []
    blocks: list[NDArray[Any]] = []
    at: list[NDArray[Any]] = []
    words: list[NDArray[Any]] = []
    q_idx: list[NDArray[Any]] = []
    held = dict.fromkeys(("pages", "blocks", "words", "q_idx", "kept"), 0)
    for tile in tiles:
        seen = tile.seen
        offset = -1
        if tile.pages_P is not None:
            key = id(tile.pages_P)  # a sequence's tiles share one array
            if key not in tables:
                tables[key] = held["pages"]
                pages.append(np.maximum(tile.pages_P, 0))
                held["pages"] += len(tile.pages_P)
            offset = tables[key]
        kept_heads = heads if tile.kv_head is None else heads // kv_heads
        kv_head = -1 if tile.kv_head is None else tile.kv_head
        n, bit_rows = len(seen.blocks_N), seen.bits_MR.shape[1]
        row = (tile.row, tile.count, tile.length, kv_head, tile.base, offset, n)
        rows.append((*row, held["blocks"], held["words"], bit_rows, held["q_idx"], held["kept"]))
        blocks.append(seen.blocks_N)
        at.append(seen.bits_at_N)
        words.append(seen.bits_MR.ravel())
        q_idx.append(tile.q_idx_Q)
        held["blocks"] += n
        held["words"] += words[-1].size
        held["q_idx"] += tile.count
        held["kept"] += kept_heads * tile.count * BLOCK * n
    return PackedTiles(
        torch.tensor(rows, dtype=torch.long).view(-1, 12),
        _joined(pages, np.int32),
        _joined(blocks, np.int32),
        _joined(at, np.int32),
        _joined(words, np.uint64).view(torch.long),
        _joined(q_idx, np.int64),
        held["kept"],
    )


def _joined(parts: list[NDArray[Any]], dtype: type) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
