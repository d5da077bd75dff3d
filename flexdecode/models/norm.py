"""RMSNorm (Zhang and Sennrich, 2019): x / rms(x) · w, in fp32 whatever the dtype of x, weights fp32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Over the last dimension. `weight` already contains any offset (Gemma's 1 + w)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight.float(), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape[-1:], self.weight, self.eps).to(x.dtype)
