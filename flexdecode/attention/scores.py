"""Score modifications: FlexAttention score_mods, `score_mod(score, b, h, q_idx, kv_idx) -> score`.

`score` is the scaled product, fp32; indices are absolute positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ScoreMod(Protocol):
    """What FlexAttention calls a score_mod."""

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Softcap:
    """cap · tanh(score / cap): bounded scores (Gemma 2, Grok)."""

    cap: float

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"softcap({self.cap}): the cap must be greater than 0")

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.tanh(score / self.cap) * self.cap


def softcap(cap: float) -> Softcap:
    """Bound every score to (-cap, cap)."""
    return Softcap(cap)
