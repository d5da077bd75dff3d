"""Gated feed-forward: down(act(gate(x)) · up(x)), gate and up in one product."""

from __future__ import annotations

from torch import Tensor, nn

from flexdecode.config import Activation
from flexdecode.kernels import ops
from flexdecode.models.linear import Linear


class Mlp(nn.Module):
    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def forward(self, x_TD: Tensor) -> Tensor:
        out: Tensor = self.down(ops.gated(self.gate_up(x_TD), self.activation))
        return out
