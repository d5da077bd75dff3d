"""Attention in plain torch, fp32 throughout: the oracle of every other backend, and what serves when none can.

Softmax over what is visible, written out. Shape letters: T packed tokens, Q queries of a tile, L its keys, H heads,
C kv_heads, G heads of a kv head, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexdecode.attention.cache import KVCache
from flexdecode.attention.plan import AttentionPlan, Tile
from flexdecode.attention.scores import ScoreMod

if TYPE_CHECKING:
    from flexdecode.attention.attend import Request

_SCORE_BYTES = 64 << 20  # rows are taken in slabs whose fp32 scores stay under this


class Reference:
    """Serves every request."""

    name = "reference"

    def unsupported(self, request: Request) -> str | None:
        return None

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
        v_head_dim = cache.layers[layer].v_head_dim or cache.layers[layer].head_dim
        out = q_THD.new_empty(*q_THD.shape[:2], v_head_dim)
        lse = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
        for index, tile in enumerate(plan.tiles):
            k_CLD, v_CLD = cache.read(layer, tile.run, torch.float32)
            heads = q_THD.shape[1]
            slab = max(1, _SCORE_BYTES // max(1, 4 * heads * (tile.stop - tile.start)))
            for first in range(0, tile.count, slab):
                rows = slice(first, min(first + slab, tile.count))
                here = slice(tile.row + rows.start, tile.row + rows.stop)
                out[here], lse[here] = _rows(q_THD[here], k_CLD, v_CLD, tile, rows, index, score, sinks_H, scale)
        return out, lse if return_lse else None


def _rows(
    q_QHD: Tensor,
    k_CLD: Tensor,
    v_CLD: Tensor,
    tile: Tile,
    rows: slice,
    index: int,
    score: ScoreMod | None,
    sinks_H: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    queries, heads, _ = q_QHD.shape
    kv_heads, keys, v_dim = v_CLD.shape
    group = heads // kv_heads
    q_CGQD = q_QHD.float().view(queries, kv_heads, group, -1).permute(1, 2, 0, 3)
    s_HQL = (torch.matmul(q_CGQD, k_CLD[:, None].transpose(-1, -2)) * scale).reshape(heads, queries, keys)
    if score is not None:
        device = s_HQL.device
        h = torch.arange(heads, device=device)[:, None, None]
        q_idx = torch.tensor(list(tile.positions[rows]), device=device)[None, :, None]
        kv_idx = torch.arange(tile.start, tile.stop, device=device)[None, None, :]
        s_HQL = score(s_HQL, torch.tensor(index, device=device), h, q_idx, kv_idx).float()
    if tile.visible_QL is not None:
        s_HQL = s_HQL.masked_fill(~tile.visible_QL[None, rows], float("-inf"))
    lse_HQ = torch.logsumexp(s_HQL, dim=-1) if keys else s_HQL.new_full((heads, queries), float("-inf"))
    if sinks_H is not None:
        lse_HQ = torch.logaddexp(lse_HQ, sinks_H.float()[:, None])
    p_HQL = torch.exp(s_HQL - torch.where(lse_HQ.isinf(), 0.0, lse_HQ)[..., None])
    p_CGQL = p_HQL.view(kv_heads, group, queries, keys)
    o_CGQD = torch.matmul(p_CGQL, v_CLD[:, None])
    if tile.visible_QL is not None and not bool(v_CLD.isfinite().all()):
        # 0 · NaN is NaN: a value that is not finite may reach only the rows that see it.
        finite = v_CLD.isfinite()
        clean = torch.matmul(p_CGQL, v_CLD.where(finite, 0.0)[:, None])
        touched = torch.matmul((p_CGQL > 0).float(), (~finite).float()[:, None]) > 0
        o_CGQD = torch.where(touched, o_CGQD, clean)
    return o_CGQD.permute(2, 0, 1, 3).reshape(queries, heads, v_dim).to(q_QHD.dtype), lse_HQ.T
