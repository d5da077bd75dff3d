"""Attention by torch's scaled_dot_product_attention, sequence by sequence.

With few queries the heads of a kv head are laid as rows of one product, so that each key is read once for all of them;
torch's own grouped path reads it once for each. A key or value that some query of a step sees and another does not
must be finite: SDPA multiplies it by 0 where it is masked (`reference` does not). Shape letters as there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdecode.attention.cache import KVCache
from flexdecode.attention.plan import AttentionPlan, Tile
from flexdecode.attention.scores import ScoreMod
from flexdecode.kernels.ops import FEW_QUERIES

if TYPE_CHECKING:
    from flexdecode.attention.attend import Request


class Sdpa:
    """Plain softmax attention under any mask."""

    name = "sdpa"

    def unsupported(self, request: Request) -> str | None:
        if request.score is not None:
            return f"torch's SDPA has no score modification ({request.score})"
        if request.sinks:
            return "torch's SDPA has no attention sinks"
        if request.return_lse:
            return "torch's SDPA does not return the log-sum-exp"
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
        parts = [_tile(q_THD[t.row : t.row + t.count], cache, layer, t, scale) for t in plan.tiles]
        return parts[0] if len(parts) == 1 else torch.cat(parts), None


def _tile(q_QHD: Tensor, cache: KVCache, layer: int, tile: Tile, scale: float) -> Tensor:
    queries, heads, head_dim = q_QHD.shape
    k_CLD, v_CLD = cache.read(layer, tile.run, q_QHD.dtype)
    kv_heads, keys, v_dim = v_CLD.shape
    group = heads // kv_heads
    if keys == 0:
        return q_QHD.new_zeros(queries, heads, v_dim)
    visible = tile.visible_QL
    if visible is not None and not tile.causal:
        seen = visible.any(0)
        if not bool(seen.all()):
            v_CLD = v_CLD.masked_fill(~seen[None, :, None], 0.0)
            k_CLD = k_CLD.masked_fill(~seen[None, :, None], 0.0)
    if queries <= FEW_QUERIES:
        q = q_QHD.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
        mask = None if visible is None else visible.repeat(group, 1)
        out = F.scaled_dot_product_attention(q, k_CLD[None], v_CLD[None], attn_mask=mask, scale=scale)
        out = out.view(kv_heads, group, queries, v_dim).permute(2, 0, 1, 3).reshape(queries, heads, v_dim)
    else:
        out = F.scaled_dot_product_attention(
            q_QHD.transpose(0, 1)[None],
            k_CLD[None],
            v_CLD[None],
            attn_mask=None if tile.causal else visible,
            is_causal=tile.causal,
            scale=scale,
            enable_gqa=group > 1,
        )[0].transpose(0, 1)
    if visible is not None and not tile.causal:
        # A row that sees nothing is 0 by contract, NaN by softmax.
        out = out.masked_fill(~visible.any(1)[:, None, None], 0.0)
    return out
