"""RMSNorm (Zhang and Sennrich, 2019): x / rms(x) · w, in fp32 whatever the dtype of x, weights fp32."""

from __future__ import annotations

from torch import Tensor, nn

from flexdecode.kernels import ops


class RMSNorm(nn.Module):
    """Over the last dimension. `weight` already contains any offset (Gemma's 1 + w)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight.float(), eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)
