"""Attention in plain torch, fp32 throughout: the oracle of every other backend, and what serves when none can.

Softmax over what is visible, written out. Shape letters: T packed tokens, Q queries of a tile, L its keys, H heads,
C kv_heads, G heads of a kv head, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexdecode.attention.plan import Tile
from flexdecode.attention.request import VARIES, Call, Request
from flexdecode.attention.scores import evaluate

_SCORE_BYTES = 64 << 20  # rows are taken in slabs whose fp32 scores stay under this


class Reference:
    """Serves every request."""

    name = "reference"

    def unsupported(self, request: Request) -> str | None:
        if request.batch_invariant:
            return VARIES
        return None

    def run(self, call: Call) -> tuple[Tensor, Tensor | None]:
        q_THD = call.q_THD
        out = q_THD.new_empty(*q_THD.shape[:2], call.kv.v_CSD.shape[2])
        lse = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
        group = q_THD.shape[1] // call.kv.k_CSD.shape[0]
        for tile in call.plan.tiles:
            keys_L = tile.keys_L()
            k_CLD, v_CLD = call.kv.read(tile.slots(keys_L, call.kv.page), torch.float32)
            heads = slice(None)
            if tile.kv_head is not None:
                k_CLD, v_CLD = k_CLD[tile.kv_head][None], v_CLD[tile.kv_head][None]
                heads = slice(tile.kv_head * group, (tile.kv_head + 1) * group)
            visible = visible_HQL(tile, q_THD.device)
            slab = max(1, _SCORE_BYTES // max(1, 4 * q_THD.shape[1] * len(keys_L)))
            for first in range(0, tile.count, slab):
                rows = slice(first, min(first + slab, tile.count))
                here = slice(tile.row + rows.start, tile.row + rows.stop)
                seen = None if visible is None else visible[:, rows]
                out[here, heads], lse[here, heads] = _rows(call, q_THD[here, heads], k_CLD, v_CLD, tile, rows, seen)
        return out, lse if call.return_lse else None


def visible_HQL(tile: Tile, device: torch.device) -> Tensor | None:
    """A tile's exact mask over `tile.keys_L()`, [1 or heads, Q, L]; None where all is visible."""
    visible = tile.visible_RL()
    return None if visible is None else visible.view(-1, tile.count, visible.shape[1]).to(device)


def _rows(
    call: Call, q_QHD: Tensor, k_CLD: Tensor, v_CLD: Tensor, tile: Tile, rows: slice, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    queries, heads, _ = q_QHD.shape
    kv_heads, keys, v_dim = v_CLD.shape
    group, device = heads // kv_heads, q_QHD.device
    first_head = 0 if tile.kv_head is None else tile.kv_head * group
    q_CGQD = q_QHD.float().view(queries, kv_heads, group, -1).permute(1, 2, 0, 3)
    s_HQL = (torch.matmul(q_CGQD, k_CLD[:, None].transpose(-1, -2)) * call.scale).reshape(heads, queries, keys)
    if call.score is not None:
        h_H = torch.arange(first_head, first_head + heads, device=device)
        q_idx_Q, kv_idx_L = (torch.from_numpy(x).to(device) for x in (tile.q_idx_Q[rows], tile.keys_L()))
        s_HQL = evaluate(call.score, s_HQL, torch.tensor(tile.batch, device=device), h_H, q_idx_Q, kv_idx_L).float()
    if visible is not None:
        s_HQL = s_HQL.masked_fill(~visible, float("-inf"))
    lse_HQ = torch.logsumexp(s_HQL, dim=-1) if keys else s_HQL.new_full((heads, queries), float("-inf"))
    if call.sinks_H is not None:
        sinks_H = call.sinks_H[first_head : first_head + heads]
        lse_HQ = torch.logaddexp(lse_HQ, sinks_H.float()[:, None])
    p_HQL = torch.exp(s_HQL - torch.where(lse_HQ.isinf(), 0.0, lse_HQ)[..., None])
    p_CGQL = p_HQL.view(kv_heads, group, queries, keys)
    o_CGQD = torch.matmul(p_CGQL, v_CLD[:, None])
    if visible is not None and not bool(v_CLD.isfinite().all()):
        # 0 · NaN is NaN: a value that is not finite may reach only the rows that see it.
        finite = v_CLD.isfinite()
        clean = torch.matmul(p_CGQL, v_CLD.where(finite, 0.0)[:, None])
        touched = torch.matmul((p_CGQL > 0).float(), (~finite).float()[:, None]) > 0
        o_CGQD = torch.where(touched, o_CGQD, clean)
    return o_CGQD.permute(2, 0, 1, 3).reshape(queries, heads, v_dim).to(q_QHD.dtype), lse_HQ.T
