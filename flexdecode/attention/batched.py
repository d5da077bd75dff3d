"""Attention over batches in torch's layout, [batch, heads, tokens, dim]: keys and values are read where they lie.

Any strides will do if the last is 1 and the sequences lie a whole number of keys apart; others are copied. Shape
letters: B batch, H query heads, C kv_heads, Q queries, L keys, D head_dim, T = B·Q rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from flexdecode.attention.attend import choose, missing_kernels
from flexdecode.attention.cache import KV
from flexdecode.attention.masks import Ints, Mask
from flexdecode.attention.plan import AttentionPlan, Tile, plan_tiles
from flexdecode.attention.request import Call, Request
from flexdecode.attention.scores import ScoreMod
from flexdecode.config import FlexdecodeWarning

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def in_slots(k_BCLD: Tensor, v_BCLD: Tensor) -> tuple[KV, int]:
    """(keys and values as slots [C, S, D], step): position p of sequence b lies in slot b · step + p."""
    step, other = _step(k_BCLD), _step(v_BCLD)
    if step is None or step != other:
        k_BCLD, v_BCLD = (x.clone(memory_format=torch.contiguous_format) for x in (k_BCLD, v_BCLD))
        step = _step(k_BCLD)
        assert step is not None
    return KV(_slots(k_BCLD, step), _slots(v_BCLD, step)), step


def _step(x_BCLD: Tensor) -> int | None:
    """How many keys apart sequences lie; None where they lie in no such way."""
    (batch, _, length, dim), (s_b, _, s_l, s_d) = x_BCLD.shape, x_BCLD.stride()
    if not length:
        return 0
    if (dim > 1 and s_d != 1) or (length > 1 and s_l == 0):
        return None
    if batch <= 1 or s_b == 0:
        return 0
    return s_b // s_l if s_l and s_b % s_l == 0 else None


def _slots(x_BCLD: Tensor, step: int) -> Tensor:
    batch, kv_heads, length, dim = x_BCLD.shape
    if not x_BCLD.numel():
        return x_BCLD.new_empty(kv_heads, 0, dim)
    slots = (batch - 1) * step + length
    return x_BCLD.as_strided((kv_heads, slots, dim), (x_BCLD.stride(1), x_BCLD.stride(2), 1))


def plan_batch(
    masks: Mask | Sequence[Mask], batch: int, q_idx_Q: Ints, length: int, heads: int, kv_heads: int, step: int
) -> AttentionPlan:
    """Plan queries at positions q_idx_Q of each of `batch` sequences of `length` keys, `step` slots apart.

    `masks` has one for each sequence; a single one is the same for all, whatever b it is called with.
    """
    tiles: list[Tile] = []
    count = len(q_idx_Q)
    each = masks if isinstance(masks, Sequence) else [masks]
    for b, mask in enumerate(each):
        tiles += plan_tiles(
            mask, q_idx_Q, length, heads=heads, kv_heads=kv_heads, row=b * count, batch=b, base=b * step
        )
    if isinstance(masks, Mask):
        alike = list(tiles)
        for b in range(1, batch):
            tiles += [replace(tile, row=tile.row + b * count, batch=b, base=b * step) for tile in alike]
    return AttentionPlan(
        Mask(), 0, tuple(tiles), batch * count
    )  # its mask is in the tiles: nothing here holds on to it


def run(
    q_BHQD: Tensor,
    kv: KV,
    plan: AttentionPlan,
    scale: float,
    *,
    score: ScoreMod | None = None,
    sinks_H: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """out [B, Q, H, D] in q's dtype and lse fp32 [B, Q, H]. Warns once where the kernels cannot be had."""
    batch, heads, queries, dim = q_BHQD.shape
    request = Request(
        heads,
        kv.k_CSD.shape[0],
        dim,
        q_BHQD.dtype,
        kv.k_CSD.dtype,
        q_BHQD.device.type,
        score,
        sinks_H is not None,
        return_lse,
        "few",
    )
    backend = choose(request)
    if (reason := missing_kernels(request)) is not None:
        _warn_once(backend.name, reason)
    q_THD = q_BHQD.transpose(1, 2).reshape(batch * queries, heads, dim)
    out, lse = backend.run(Call(q_THD, kv, plan, scale, score, sinks_H, return_lse))
    return out.view(batch, queries, heads, -1), None if lse is None else lse.view(batch, queries, heads)


@cache
def _warn_once(backend: str, reason: str) -> None:
    warnings.warn(
        f"attention runs on {backend}, many times slower over a long context: {reason}",
        FlexdecodeWarning,
        stacklevel=4,
    )
