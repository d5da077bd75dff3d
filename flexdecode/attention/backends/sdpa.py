"""Attention by torch's scaled_dot_product_attention, sequence by sequence.

With few queries the heads of a kv head are laid as rows of one product, so that each key is read once for all of them;
torch's own grouped path reads it once for each. A key or value that some query of a step sees and another does not
must be finite: SDPA multiplies it by 0 where it is masked (`reference` does not). Shape letters as there.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flexdecode.attention.backends.reference import visible_HQL
from flexdecode.attention.plan import Tile
from flexdecode.attention.request import VARIES, Call, Request
from flexdecode.kernels.ops import FEW_QUERIES


class Sdpa:
    """Plain softmax attention under any mask."""

    name = "sdpa"

    def unsupported(self, request: Request) -> str | None:
        if request.batch_invariant:
            return VARIES
        if request.score is not None:
            return f"torch's SDPA has no score modification ({request.score})"
        if request.sinks:
            return "torch's SDPA has no attention sinks"
        if request.return_lse:
            return "torch's SDPA does not return the log-sum-exp"
        return None

    def run(self, call: Call) -> tuple[Tensor, Tensor | None]:
        q_THD, kv_heads = call.q_THD, call.kv.k_CSD.shape[0]
        group = q_THD.shape[1] // kv_heads
        out = q_THD.new_empty(*q_THD.shape[:2], call.kv.v_CSD.shape[2])
        for tile in call.plan.tiles:
            rows, heads = slice(tile.row, tile.row + tile.count), slice(None)
            k_CLD, v_CLD = call.kv.read(tile.slots(tile.keys_L(), call.kv.page), q_THD.dtype)
            if tile.kv_head is not None:
                k_CLD, v_CLD = k_CLD[tile.kv_head][None], v_CLD[tile.kv_head][None]
                heads = slice(tile.kv_head * group, (tile.kv_head + 1) * group)
            out[rows, heads] = _tile(q_THD[rows, heads], k_CLD, v_CLD, tile, call.scale)
        return out, None


def _tile(q_QHD: Tensor, k_CLD: Tensor, v_CLD: Tensor, tile: Tile, scale: float) -> Tensor:
    queries, heads, head_dim = q_QHD.shape
    kv_heads, keys, v_dim = v_CLD.shape
    group = heads // kv_heads
    if keys == 0:
        return q_QHD.new_zeros(queries, heads, v_dim)
    visible = visible_HQL(tile, q_QHD.device)  # [1 or heads, Q, L]
    if visible is not None:
        seen = visible.flatten(0, 1).any(0)
        if not bool(seen.all()):
            v_CLD = v_CLD.masked_fill(~seen[None, :, None], 0.0)
            k_CLD = k_CLD.masked_fill(~seen[None, :, None], 0.0)
    if queries <= FEW_QUERIES:
        q = q_QHD.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
        mask = None if visible is None else visible.expand(group, queries, keys).reshape(-1, keys)
        out = F.scaled_dot_product_attention(q, k_CLD[None], v_CLD[None], attn_mask=mask, scale=scale)
        out = out.view(kv_heads, group, queries, v_dim).permute(2, 0, 1, 3).reshape(queries, heads, v_dim)
    else:
        out = F.scaled_dot_product_attention(
            q_QHD.transpose(0, 1)[None],
            k_CLD[None],
            v_CLD[None],
            attn_mask=visible,
            scale=scale,
            enable_gqa=group > 1,
        )[0].transpose(0, 1)
    if visible is not None:
        # A row that sees nothing is 0 by contract, NaN by softmax.
        out = out.masked_fill(~visible.any(-1).T[..., None], 0.0)
    return out
