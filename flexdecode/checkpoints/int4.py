"""On-disk int4 and int8 layouts undone: packed tensors to the canonical Int4Weight and Int8Weight.

Pure functions on tensors whose shapes the caller has checked; knows no names, no files and no configs. N rows
(outputs), K columns (inputs), g inputs a group, G = K/g groups, W = N/8 words.

Integers are never widened as a whole: work goes through slabs of a few megabytes, and the layouts that already have
two adjacent columns in a byte (gemv, pack-quantized) are only viewed. Packed words hold eight codes, lowest bits first,
and are read as bytes, which sidesteps the sign of int32.

Layouts: AutoAWQ 0.2.9 (gemm, gemv, gemv_fast; llm-awq's is gemv_fast with `scaled_zeros`), compressed-tensors 0.20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexdecode.quantization.weights import Int4Weight, Int8Weight

_SLAB_BYTES = 1 << 22
# AWQ gemm keeps the eight columns of a word in the order 0 2 4 6 1 3 5 7; so byte b holds these two:
_LOW_COLUMNS = [0, 4, 1, 5]
_HIGH_COLUMNS = [2, 6, 3, 7]


def decode_awq_gemm(qweight_KW: Tensor, qzeros_GW: Tensor, scales_GN: Tensor) -> Int4Weight:
    """AutoAWQ gemm: int32 [K, N/8], int32 [G, N/8], float [G, N]; K even. Zeros are stored as they are, 0 … 15."""
    k, words = qweight_KW.shape
    bytes_KB = qweight_KW.contiguous().view(torch.uint8)
    codes_W8P = torch.empty(words, 8, k // 2, dtype=torch.uint8)  # P: pairs of adjacent columns of the matrix
    slab = max(1, _SLAB_BYTES // (4 * k))
    for w in range(0, words, slab):
        even, odd = bytes_KB[0::2, 4 * w : 4 * (w + slab)], bytes_KB[1::2, 4 * w : 4 * (w + slab)]
        for pairs, columns in (
            ((even & 15) | (odd << 4), _LOW_COLUMNS),
            ((even >> 4) | (odd & 0xF0), _HIGH_COLUMNS),
        ):
            rows = pairs.t().contiguous().view(-1, 4, k // 2)
            for byte, column in enumerate(columns):
                codes_W8P[w : w + slab, column] = rows[:, byte]
    zeros = nibbles(qzeros_GW).view(-1, words, 4, 2)  # [G, W, byte, half]
    zeros_GW8 = torch.empty(zeros.shape[0], words, 8, dtype=torch.uint8)
    zeros_GW8[..., _LOW_COLUMNS] = zeros[..., 0]
    zeros_GW8[..., _HIGH_COLUMNS] = zeros[..., 1]
    zeros_NG = zeros_GW8.view(-1, 8 * words).t().contiguous()
    return Int4Weight(codes_W8P.view(8 * words, k // 2), float_scales(scales_GN.t()), zeros_NG)


def decode_awq_gemv(qweight_NW: Tensor, qzeros_NZ: Tensor, scales_NS: Tensor, groups: int) -> Int4Weight:
    """AutoAWQ gemv: int32 [N, K/8], int32 [N, Z], float [N, 8Z], the last two padded beyond G = `groups`."""
    zeros_NG = nibbles(qzeros_NZ)[:, :groups].contiguous()
    return Int4Weight(_adjacent(qweight_NW), float_scales(scales_NS[:, :groups]), zeros_NG)


def decode_awq_gemv_fast(qweight: Tensor, scaled_zeros_SN: Tensor, scales_SN: Tensor, groups: int) -> Int4Weight:
    """AutoAWQ gemv_fast and llm-awq: int16 [N/4, K], float [S, N] twice with S >= G = `groups`; K a multiple of 64.

    w = code·scale + scaled_zero. Of word (n, 64t + 16r + 8h + j), j < 8, nibble v is row 4n + r, column
    64t + 32h + 8v + j.
    """
    quads, k = qweight.shape
    tiles = k // 64
    codes_NB = torch.empty(4 * quads, k // 2, dtype=torch.uint8)
    slab = max(1, _SLAB_BYTES // (2 * k))
    for n in range(0, quads, slab):
        word = qweight[n : n + slab].contiguous().view(torch.int32)  # two neighbours j, j+1: low and high half
        pairs = (word & 0x0F) | ((word >> 12) & 0xF0)  # v = 0; each byte of `pairs` becomes one v
        for v in (1, 2, 3):
            pairs |= ((word >> (4 * v) & 0x0F) | (word >> (12 + 4 * v) & 0xF0)) << (8 * v)
        view = pairs.view(torch.uint8).view(-1, tiles, 4, 2, 4, 4)  # [n, t, r, h, j/2, v]
        out = codes_NB[4 * n : 4 * (n + slab)].view(-1, 4, tiles, 2, 4, 4)  # [n, r, t, h, v, j/2]
        out.copy_(view.permute(0, 2, 1, 3, 5, 4))
    return from_offsets(codes_NB, scales_SN[:groups].t(), scaled_zeros_SN[:groups].t())


def decode_pack_quantized(
    packed_NW: Tensor, scales: Tensor, zeros: Tensor | None, shape: tuple[int, int]
) -> Int4Weight:
    """compressed-tensors pack-quantized, 4 bits: int32 [N, ⌈K/8⌉], float [N, G] (or [1], one scale for all).

    Codes and zeros are stored plus 8. zeros: int32 [⌈N/8⌉, G] packed along N, or int8 [N, G] as they are (-8 … 7,
    files before packing was introduced), or None for a symmetric matrix. K even.
    """
    n, k = shape
    scales_NG = _per_row(scales, n)
    groups = scales_NG.shape[1]
    if zeros is None:
        zeros_NG = torch.full((n, groups), 8, dtype=torch.uint8)
    elif zeros.dtype == torch.int32:
        zeros_NG = nibbles(zeros.t()).view(groups, -1)[:, :n].t().contiguous()
    else:
        zeros_NG = (_per_row(zeros, n) + 8).to(torch.uint8).contiguous()
    return Int4Weight(_adjacent(packed_NW)[:, : k // 2], float_scales(scales_NG), zeros_NG)


def decode_int_quantized(weight_NK: Tensor, scales: Tensor) -> Int8Weight:
    """compressed-tensors int-quantized, 8 bits symmetric: int8 [N, K], float [N, 1] or [N] (or [1], one for all)."""
    return Int8Weight(weight_NK, _per_row(scales, weight_NK.shape[0]).reshape(-1).float().contiguous())


def from_offsets(codes_NB: Tensor, scales_NG: Tensor, offsets_NG: Tensor) -> Int4Weight:
    """w = code·scale + offset as Int4Weight, with the fractional zero -offset/scale; `codes_NB` may be written to.

    A group of scale 0 is constant and no zero would give its offset back: its codes become 0, its scale the offset and
    its zero -1.
    """
    if scales_NG.dtype != offsets_NG.dtype:
        scales_NG, offsets_NG = scales_NG.float(), offsets_NG.float()
    n, groups = scales_NG.shape
    zeros_NG = torch.neg(offsets_NG.float()).div_(scales_NG.float()).contiguous()
    constant_NG = scales_NG == 0
    if constant_NG.any():
        codes_NB.view(n, groups, -1)[constant_NG] = 0
        scales_NG = torch.where(constant_NG, offsets_NG, scales_NG)
        zeros_NG[constant_NG] = -1.0
    return Int4Weight(codes_NB, float_scales(scales_NG), zeros_NG)


def float_scales(scales: Tensor) -> Tensor:
    """fp16 stays, whatever else becomes fp32 (bf16 would be read as exactly by few kernels); contiguous."""
    return scales.contiguous() if scales.dtype == torch.float16 else scales.float().contiguous()


def nibbles(words: Tensor) -> Tensor:
    """int32 [..., W] to uint8 [..., 8W], lowest nibble first."""
    bytes_ = words.contiguous().view(torch.uint8)
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)


def _adjacent(words_NW: Tensor) -> Tensor:
    """Words of eight consecutive columns are the canonical bytes already: a view."""
    return words_NW.contiguous().view(torch.uint8)


def _per_row(values: Tensor, n: int) -> Tensor:
    """[N, G] from [N, G], [N] or a single value."""
    if values.numel() == 1:
        return values.reshape(1, 1).expand(n, 1)
    return values.reshape(n, -1)
