"""Mixture of experts: a router picks a few gated experts for each token.

Tokens are gathered expert by expert, so an expert's weights are read once a step however many tokens chose it, and
those of idle experts not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flexdecode.config import MoeConfig
from flexdecode.kernels.ops import gated
from flexdecode.models.linear import Linear


class Moe(nn.Module):
    def __init__(self, config: MoeConfig, router: Linear, experts: Sequence[tuple[Linear, Linear]]) -> None:
        super().__init__()
        self.config, self.router = config, router
        self.gate_up = nn.ModuleList(gate_up for gate_up, _ in experts)
        self.down = nn.ModuleList(down for _, down in experts)

    @property
    def read_bytes(self) -> int:
        """What one token reads: the router, and as many experts of average size as it uses."""
        experts = sum(m.nbytes for part in (self.gate_up, self.down) for m in part if isinstance(m, Linear))
        return self.router.nbytes + experts * self.config.experts_per_token // self.config.experts

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights fp32 and numbers of the chosen experts, both [T, experts_per_token]."""
        logits_TE = self.router(x_TD).float()
        count = self.config.experts_per_token
        if self.config.select_first:
            chosen, index = logits_TE.topk(count, dim=-1)
            return chosen.softmax(dim=-1), index
        weights, index = logits_TE.softmax(dim=-1).topk(count, dim=-1)
        if self.config.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, index

    def forward(self, x_TD: Tensor) -> Tensor:
        c = self.config
        weights, index = self.route(x_TD)
        out = torch.zeros_like(x_TD)
        for e in index.unique().tolist():
            tokens, place = torch.where(index == e)
            hidden = gated(self.gate_up[e](x_TD[tokens]), c.activation, c.swiglu_alpha, c.swiglu_limit)
            y = self.down[e](hidden) * weights[tokens, place, None].to(x_TD.dtype)
            out.index_add_(0, tokens, y)
        return out
