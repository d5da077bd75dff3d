"""Gated feed-forward: down(act(gate(x)) · up(x)), gate and up in one product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdecode.config import Activation
from flexdecode.models.linear import Linear


def gated(gate_up_TI: Tensor, activation: Activation, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """act(gate) · up for [T, 2·I] holding gate, then up; [T, I]. `alpha` and `limit` serve clamped_swiglu."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "gelu":
        return F.gelu(gate) * up
    if activation == "relu":
        return F.relu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


class Mlp(nn.Module):
    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, x_TD: Tensor) -> Tensor:
        out: Tensor = self.down(gated(self.gate_up(x_TD), self.activation))
        return out
