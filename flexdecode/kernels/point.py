"""The small operators between products: RMSNorm, gated activation, and what happens to q, k and v before attention.

Each reads its input once, computes in fp32 and rounds once, on a CPU with kernels; elsewhere the same in torch.
Shape letters: T tokens, H heads, C kv_heads, D head_dim, I intermediate_size, S slots.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdecode.kernels.attention import attend_unsupported

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "clamped_swiglu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu", "relu", "clamped_swiglu")


def _served(x: Tensor) -> bool:
    return attend_unsupported(x.device.type, x.dtype, x.dtype) is None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension (Zhang and Sennrich, 2019), weight fp32; in x's dtype."""
    if _served(x):
        y: Tensor = torch.ops.flexdecode.rms_norm(x, weight, eps)
        return y
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def gated(gate_up_TI: Tensor, activation: Activation, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """act(gate) · up for [T, 2·I] holding gate, then up; [T, I]. clamped_swiglu (gpt-oss) is (clamp(up) + 1) ·
    clamp(gate) · sigmoid(alpha · clamp(gate)), clamped by `limit`."""
    if _served(gate_up_TI):
        y_TI: Tensor = torch.ops.flexdecode.gated(gate_up_TI, ACTIVATIONS.index(activation), alpha, limit)
        return y_TI
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


def finish_heads(
    qkv_THD: Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
    norm_all: bool,
    tables: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    slots_T: Tensor,
) -> bool:
    """Norm and rotate q and k of qkv [T, H + 2C, D] in place, and store k and v in the cache's slots; False where no
    kernel does, with nothing done.

    norms: of q and k, fp32 [D], or [H · D] and [C · D] with `norm_all`, and eps. tables: cos and sin fp32 [T, 1, r],
    halves split, for the first 2r dimensions. cache: k and v [C, S, D], and for int8 their scales fp32 [C, S].
    """
    if attend_unsupported(qkv_THD.device.type, qkv_THD.dtype, cache[0].dtype) is not None:
        return False
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    cos, sin = (None, None) if tables is None else tables
    torch.ops.flexdecode.finish_heads(
        qkv_THD, heads, kv_heads, q_norm, k_norm, norm_all, eps, cos, sin, *cache, slots_T
    )
    return True
