"""The only door to the kernels: attention over cached keys, and products of activations with integer weights.

`pack_*` chooses once, at load, how a matrix will be read, and says so (`path`); `linear_*` then only runs. What is
packed has memory of its own: it keeps no mapped file and no larger tensor alive. Activations are [rows, inputs] in
bf16, fp16 or fp32; results have their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexdecode.kernels import int4_torch, reference
from flexdecode.kernels.attention import (
    FEW_QUERIES,
    PackedTiles,
    Result,
    ScoreStep,
    attend_few,
    attend_many,
    attend_unsupported,
    isas,
    use_isa,
    use_torch_products,
)
from flexdecode.kernels.int4_torch import PackedInt4
from flexdecode.kernels.reference import dequantize_fp4, dequantize_int4, linear_fp4

__all__ = [
    "FEW_QUERIES",
    "Int4Operand",
    "Int8Operand",
    "PackedTiles",
    "Result",
    "ScoreStep",
    "attend_few",
    "attend_many",
    "attend_unsupported",
    "dequantize_fp4",
    "dequantize_int4",
    "isas",
    "linear_fp4",
    "linear_int4",
    "linear_int8",
    "pack_int4",
    "pack_int8",
    "use_isa",
    "use_torch_products",
]

_FEW_ROWS_INT8 = 16
# torch's int8 product reads whole vectors, and past the end of a row that is no multiple of one: 16 floats in AVX-512.
_INT8_VECTOR = 16


@dataclass(frozen=True)
class Int4Operand:
    """An int4 matrix ready for `linear_int4`. path: "torch" (packed for torch's product) or "dequantize"."""

    path: Literal["torch", "dequantize"]
    packed: PackedInt4 | None
    canonical: tuple[Tensor, Tensor, Tensor] | None

    @property
    def nbytes(self) -> int:
        if self.packed is not None:
            return self.packed.nbytes
        assert self.canonical is not None
        return sum(t.nbytes for t in self.canonical)


def pack_int4(codes_NB: Tensor, scales_NG: Tensor, zeros_NG: Tensor, dtype: torch.dtype) -> Int4Operand:
    """Prepare canonical int4 (see quantization.weights.Int4Weight) for activations of `dtype`.

    bf16 is served by torch's int4 product where its groups allow; everything else is dequantized slab by slab, exact
    in fp32 and slow.
    """
    n, k = codes_NB.shape[0], 2 * codes_NB.shape[1]
    if int4_torch.packable(n, k, k // scales_NG.shape[1], dtype, codes_NB.device):
        return Int4Operand("torch", int4_torch.pack(codes_NB, scales_NG, zeros_NG), None)
    return Int4Operand("dequantize", None, (_own(codes_NB), _own(scales_NG), _own(zeros_NG)))


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def linear_int4(x_MK: Tensor, w: Int4Operand) -> Tensor:
    """x @ w.T. [M, N]."""
    if w.packed is not None:
        return int4_torch.linear(x_MK, w.packed)
    assert w.canonical is not None
    return reference.linear_int4(x_MK, *w.canonical)


@dataclass(frozen=True)
class Int8Operand:
    """An int8 matrix [N, K] with a scale a row, ready for `linear_int8`."""

    path: Literal["torch", "dequantize"]
    codes_NK: Tensor
    scales_N: Tensor
    ones_N: Tensor | None

    @property
    def nbytes(self) -> int:
        ones = 0 if self.ones_N is None else self.ones_N.nbytes
        return self.codes_NK.nbytes + self.scales_N.nbytes + ones


def pack_int8(codes_NK: Tensor, scales_N: Tensor, dtype: torch.dtype) -> Int8Operand:
    """Prepare canonical int8 for activations of `dtype`; bf16 on CPU is served by torch's int8 product where it can
    read the rows."""
    codes_NK, scales_N = _own(codes_NK), _own(scales_N.float())
    n, k = codes_NK.shape
    if dtype == torch.bfloat16 and codes_NK.device.type == "cpu" and k % _INT8_VECTOR == 0:
        return Int8Operand("torch", codes_NK, scales_N, torch.ones(n, dtype=dtype))
    return Int8Operand("dequantize", codes_NK, scales_N, None)


def linear_int8(x_MK: Tensor, w: Int8Operand) -> Tensor:
    """x @ w.T. [M, N]. The scale is applied after the product, in fp32: torch's op would round it to bf16."""
    if w.ones_N is not None and x_MK.shape[0] <= _FEW_ROWS_INT8:
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x_MK.contiguous(), w.codes_NK, w.ones_N)
        return (out.float() * w.scales_N).to(x_MK.dtype)
    return reference.linear_int8(x_MK, w.codes_NK, w.scales_N)
