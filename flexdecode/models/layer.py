"""One layer of a decoder: attention and feed-forward with the norms around them, each added to the residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flexdecode.config import LayerConfig
from flexdecode.models.attention import Attention, Step
from flexdecode.models.norm import RMSNorm


class Layer(nn.Module):
    """x + post(attention(pre(x))), then the same with the feed-forward. Absent norms are the identity."""

    def __init__(
        self, config: LayerConfig, attention: Attention, ff: nn.Module, norms: Sequence[RMSNorm | None]
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward, self.multiplier = attention, ff, config.residual_multiplier
        self.attention_pre, self.attention_post, self.ff_pre, self.ff_post = norms

    def forward(self, x_TD: Tensor, step: Step) -> Tensor:
        return self.feed(self.attend(x_TD, step), step)

    def attend(self, x_TD: Tensor, step: Step) -> Tensor:
        """The first half."""
        h_TD = self.attention(x_TD if self.attention_pre is None else self.attention_pre(x_TD), step)
        return self._add(x_TD, h_TD, self.attention_post)

    def feed(self, x_TD: Tensor, step: Step) -> Tensor:
        """The second half."""
        h_TD = self.feed_forward(x_TD if self.ff_pre is None else self.ff_pre(x_TD))
        return self._add(x_TD, h_TD, self.ff_post)

    def _add(self, x_TD: Tensor, h_TD: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is not None:
            h_TD = norm(h_TD)
        return torch.add(x_TD, h_TD, alpha=self.multiplier)
