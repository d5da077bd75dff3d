"""Canonical integer weights to the tensors of a file: the ways back of what `checkpoints.int4` undoes.

Knows neither names nor configs. N rows (outputs), K columns (inputs), G groups, W = N/8 words. Layouts: AutoAWQ 0.2.9
gemm; compressed-tensors 0.20 pack-quantized and int-quantized.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexdecode.quantization.weights import Int4Weight, Int8Weight

# Byte b of an AWQ gemm word holds column LOW[b] of the word's eight in its low nibble and HIGH[b] in its high one.
_LOW = [0, 4, 1, 5]
_HIGH = [2, 6, 3, 7]
_SLAB = 1 << 22  # codes at a time


def pack_awq_gemm(weight: Int4Weight) -> dict[str, Tensor]:
    """qweight int32 [K, N/8], qzeros int32 [G, N/8], scales fp16 [G, N]. N a multiple of 8, zeros whole numbers."""
    n, k = weight.shape
    assert n % 8 == 0
    assert weight.zeros_NG.dtype == torch.uint8
    qweight = torch.empty(k, n // 8, dtype=torch.int32)
    slab = max(1, _SLAB // k) * 8
    for row in range(0, n, slab):
        part = weight.rows(slice(row, row + slab))
        qweight[:, row // 8 : (row + slab) // 8] = _awq_words(part.codes_NK())
    return {
        "qweight": qweight,
        "qzeros": _awq_words(weight.zeros_NG),
        "scales": weight.scales_NG.t().to(torch.float16).contiguous(),
    }


def pack_quantized(weight: Int4Weight, scale_dtype: torch.dtype, symmetric: bool) -> dict[str, Tensor]:
    """weight_packed int32 [N, ⌈K/8⌉], weight_scale [N, G], weight_shape int64 [2], and unless `symmetric`
    weight_zero_point int32 [⌈N/8⌉, G], packed along N. Codes and zeros are stored as they are, which is their signed
    value plus 8."""
    n, k = weight.shape
    packed = {
        "weight_packed": _words(weight.codes_NB),
        "weight_scale": weight.scales_NG.to(scale_dtype).contiguous(),
        "weight_shape": torch.tensor([n, k], dtype=torch.int64),
    }
    if symmetric:
        assert bool((weight.zeros_NG == 8).all())
        return packed
    assert weight.zeros_NG.dtype == torch.uint8
    zeros_GN = weight.zeros_NG.t()
    if n % 8:
        zeros_GN = torch.nn.functional.pad(zeros_GN, (0, 8 - n % 8))
    pairs = zeros_GN[:, 0::2] | (zeros_GN[:, 1::2] << 4)
    return packed | {"weight_zero_point": _words(pairs).t().contiguous()}


def int_quantized(weight: Int8Weight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """weight int8 [N, K], weight_scale [N, 1]."""
    return {"weight": weight.codes_NK.contiguous(), "weight_scale": weight.scales_N.to(scale_dtype)[:, None]}


def _awq_words(codes_NK: Tensor) -> Tensor:
    """uint8 [N, K] of 0 … 15 to int32 [K, N/8]."""
    n, k = codes_NK.shape
    eight_K8W = codes_NK.view(n // 8, 8, k)
    bytes_W4K = eight_K8W[:, _LOW] | (eight_K8W[:, _HIGH] << 4)
    return _as_words(bytes_W4K.permute(2, 0, 1)).view(k, n // 8)


def _words(bytes_NB: Tensor) -> Tensor:
    """uint8 [N, B], two codes a byte, to int32 [N, ⌈B/4⌉], the last word of a row filled up with 0."""
    spare = -bytes_NB.shape[1] % 4
    if spare:
        bytes_NB = torch.nn.functional.pad(bytes_NB, (0, spare))
    return _as_words(bytes_NB)


def _as_words(bytes_: Tensor) -> Tensor:
    """uint8 [..., 4n] to int32 [..., n]; copied, as a dimension of 1 may have any stride and still be contiguous."""
    return bytes_.clone(memory_format=torch.contiguous_format).view(torch.int32)
