"""The integer products in plain torch, fp32: the oracle of every kernel, and the path where none can serve.

Shape letters: M rows of activations, N outputs, K inputs, B = K/2 bytes, G groups, g = K/G inputs a group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_SLAB_BYTES = 32 << 20

# The sixteen values of an e2m1 float (OCP Microscaling Formats v1.0), by code.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack_nibbles(codes_NB: Tensor) -> Tensor:
    """uint8 [N, K/2] to uint8 [N, K], low nibble first."""
    n, b = codes_NB.shape
    return torch.stack((codes_NB & 15, codes_NB >> 4), dim=-1).view(n, 2 * b)


def dequantize_int4(codes_NB: Tensor, scales_NG: Tensor, zeros_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """w[n, k] = (code - zero) * scale in fp32, then `dtype` [N, K]."""
    codes_NK = unpack_nibbles(codes_NB)
    n, k = codes_NK.shape
    codes = codes_NK.view(n, scales_NG.shape[1], -1).float()
    return ((codes - zeros_NG.float()[..., None]) * scales_NG.float()[..., None]).view(n, k).to(dtype)


def dequantize_fp4(codes_NB: Tensor, exponents_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4: e2m1 values times 2 ** (exponent - 127), one uint8 exponent a group of 32. [N, K] in `dtype`."""
    table = torch.tensor(FP4_VALUES, dtype=torch.float32, device=codes_NB.device)
    values = table[unpack_nibbles(codes_NB).int()]
    n, k = values.shape
    scale = torch.exp2(exponents_NG.float() - 127)
    return (values.view(n, scale.shape[1], -1) * scale[..., None]).view(n, k).to(dtype)


def row_slabs(n: int, row_bytes: int) -> Iterator[slice]:
    """Slices of [0, n) whose dequantized rows take about 32 MB: the temporary memory of a product."""
    step = max(1, _SLAB_BYTES // max(1, row_bytes))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def linear_int4(x_MK: Tensor, codes_NB: Tensor, scales_NG: Tensor, zeros_NG: Tensor) -> Tensor:
    """x @ w.T in x's dtype, dequantizing slab by slab. [M, N]."""
    k, n = x_MK.shape[1], codes_NB.shape[0]
    out_MN = x_MK.new_empty(x_MK.shape[0], n)
    for s in row_slabs(n, 4 * k):
        out_MN[:, s] = F.linear(x_MK, dequantize_int4(codes_NB[s], scales_NG[s], zeros_NG[s], x_MK.dtype))
    return out_MN


def linear_fp4(x_MK: Tensor, codes_NB: Tensor, exponents_NG: Tensor) -> Tensor:
    """x @ w.T in x's dtype, dequantizing slab by slab. [M, N]."""
    k, n = x_MK.shape[1], codes_NB.shape[0]
    out_MN = x_MK.new_empty(x_MK.shape[0], n)
    for s in row_slabs(n, 4 * k):
        out_MN[:, s] = F.linear(x_MK, dequantize_fp4(codes_NB[s], exponents_NG[s], x_MK.dtype))
    return out_MN


def linear_int8(x_MK: Tensor, codes_NK: Tensor, scales_N: Tensor) -> Tensor:
    """x @ w.T with w = code * scale; the codes are exact in every float type, the scale is applied in fp32. [M, N]."""
    n, k = codes_NK.shape
    out_MN = x_MK.new_empty(x_MK.shape[0], n)
    # A sum that has not been scaled yet is soon beyond fp16, which ends at 65504.
    x_MK = x_MK.float() if x_MK.dtype == torch.float16 else x_MK
    for s in row_slabs(n, 4 * k):
        out_MN[:, s] = F.linear(x_MK, codes_NK[s].to(x_MK.dtype)).float() * scales_N[s].float()
    return out_MN
