"""The only door to the kernels: attention over cached keys, and products of activations with integer weights.

`pack_*` chooses once, at load, how a matrix will be read, and says so (`path`); `linear_*` then only runs. What is
packed has memory of its own: it keeps no mapped file and no larger tensor alive. Activations are [rows, inputs] in
bf16, fp16 or fp32; results have their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdecode.kernels import int4_torch, linear, reference
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
from flexdecode.kernels.linear import Int4Tiles, Int8Tiles
from flexdecode.kernels.point import finish_heads, gated, rms_norm
from flexdecode.kernels.reference import dequantize_fp4, dequantize_int4
from flexdecode.kernels.stack import AttentionBlock, Frame, Matrix, MlpBlock, Operand, Stack

__all__ = [
    "DENSE_ROWS",
    "FEW_QUERIES",
    "AttentionBlock",
    "Frame",
    "Int4Operand",
    "Int8Operand",
    "Matrix",
    "MlpBlock",
    "Operand",
    "PackedTiles",
    "Result",
    "ScoreStep",
    "Stack",
    "attend_few",
    "attend_many",
    "attend_unsupported",
    "dequantize_fp4",
    "dequantize_int4",
    "finish_heads",
    "gated",
    "held",
    "isas",
    "linear_dense",
    "linear_fp4",
    "linear_int4",
    "linear_int8",
    "pack_int4",
    "pack_int8",
    "rms_norm",
    "unpack_rows",
    "unpackable",
    "use_isa",
    "use_torch_products",
]

DENSE_ROWS = 8  # of activations, up to which our product with a matrix of floats is the quicker one
_FEW_ROWS_INT8 = 16
# torch's int8 product reads whole vectors, and past the end of a row that is no multiple of one: 16 floats in AVX-512.
_INT8_VECTOR = 16


@dataclass(frozen=True)
class Int4Operand:
    """An int4 matrix ready for `linear_int4`. path: "cpu" (our kernels), "torch" (packed for torch's product) or
    "dequantize"."""

    path: Literal["cpu", "torch", "dequantize"]
    tiles: Int4Tiles | None
    packed: PackedInt4 | None
    canonical: tuple[Tensor, Tensor, Tensor] | None

    @property
    def nbytes(self) -> int:
        if self.tiles is not None:
            return self.tiles.nbytes
        if self.packed is not None:
            return self.packed.nbytes
        assert self.canonical is not None
        return sum(t.nbytes for t in self.canonical)


def pack_int4(codes_NB: Tensor, scales_NG: Tensor, zeros_NG: Tensor, dtype: torch.dtype) -> Int4Operand:
    """Prepare canonical int4 (see quantization.weights.Int4Weight) for activations of `dtype`.

    Our kernels serve every dtype on a CPU where they can be compiled; else bf16 is served by torch's int4 product where
    its groups allow, and everything else is dequantized slab by slab, exact in fp32 and slow.
    """
    n, k = codes_NB.shape[0], 2 * codes_NB.shape[1]
    group = k // scales_NG.shape[1]
    if linear.unsupported(codes_NB.device, k, group) is None:
        return Int4Operand("cpu", linear.pack_int4(codes_NB, scales_NG, zeros_NG), None, None)
    if int4_torch.packable(n, k, group, dtype, codes_NB.device):
        return Int4Operand("torch", None, int4_torch.pack(codes_NB, scales_NG, zeros_NG), None)
    return Int4Operand("dequantize", None, None, (_own(codes_NB), _own(scales_NG), _own(zeros_NG)))


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def linear_int4(
    x_MK: Tensor, w: Int4Operand, bias_N: Tensor | None = None, out: torch.dtype | None = None, alike: bool = False
) -> Tensor:
    """x @ w.T + bias [M, N], bias fp32, in `out` or x's dtype. `alike`: a row's bits do not depend on how many rows
    there are, which only the path "cpu" can do."""
    if w.tiles is not None:
        return linear.linear_int4(x_MK, w.tiles, bias_N, out, alike)
    assert not alike
    if w.packed is not None:
        return _finished(int4_torch.linear(x_MK, w.packed), bias_N, out)
    assert w.canonical is not None
    return _finished(reference.linear_int4(x_MK, *w.canonical), bias_N, out)


def _finished(y_MN: Tensor, bias_N: Tensor | None, out: torch.dtype | None) -> Tensor:
    if bias_N is not None:
        y_MN = y_MN.add_(bias_N)
    return y_MN if out is None else y_MN.to(out)


@dataclass(frozen=True)
class Int8Operand:
    """An int8 matrix [N, K] with a scale a row, ready for `linear_int8`. path: "cpu" (our kernels), "torch" (torch's
    int8 product, which wants scales of its own: `ones_N`) or "dequantize"."""

    path: Literal["cpu", "torch", "dequantize"]
    tiles: Int8Tiles | None
    canonical: tuple[Tensor, Tensor] | None
    ones_N: Tensor | None

    @property
    def nbytes(self) -> int:
        if self.tiles is not None:
            return self.tiles.nbytes
        assert self.canonical is not None
        ones = 0 if self.ones_N is None else self.ones_N.nbytes
        return sum(t.nbytes for t in self.canonical) + ones


def pack_int8(codes_NK: Tensor, scales_N: Tensor, dtype: torch.dtype) -> Int8Operand:
    """Prepare canonical int8 for activations of `dtype`. Our kernels serve every dtype on a CPU where they can be
    compiled; else bf16 is served by torch's int8 product where it can read the rows."""
    n, k = codes_NK.shape
    if linear.unsupported(codes_NK.device, k, k) is None:
        return Int8Operand("cpu", linear.pack_int8(codes_NK, scales_N), None, None)
    canonical = _own(codes_NK), _own(scales_N.float())
    if dtype == torch.bfloat16 and codes_NK.device.type == "cpu" and k % _INT8_VECTOR == 0:
        return Int8Operand("torch", None, canonical, torch.ones(n, dtype=dtype))
    return Int8Operand("dequantize", None, canonical, None)


def linear_int8(
    x_MK: Tensor, w: Int8Operand, bias_N: Tensor | None = None, out: torch.dtype | None = None, alike: bool = False
) -> Tensor:
    """x @ w.T + bias [M, N], bias fp32, in `out` or x's dtype. The scale is applied after the product, in fp32: torch's
    op would round it to bf16. `alike` as above."""
    if w.tiles is not None:
        return linear.linear_int8(x_MK, w.tiles, bias_N, out, alike)
    assert w.canonical is not None
    assert not alike
    if w.ones_N is not None and x_MK.shape[0] <= _FEW_ROWS_INT8:
        codes_NK, scales_N = w.canonical
        sums: Tensor = torch.ops.aten._weight_int8pack_mm(x_MK.contiguous(), codes_NK, w.ones_N)
        return _finished((sums.float() * scales_N).to(x_MK.dtype), bias_N, out)
    return _finished(reference.linear_int8(x_MK, *w.canonical), bias_N, out)


def linear_dense(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, out: torch.dtype | None = None, alike: bool = False
) -> Tensor:
    """x @ w.T + bias [M, N], bias fp32, in `out` or x's dtype. A few rows on a CPU go through our kernels, which reach
    up to twice the read rate of torch's product, and any number where rows are to be `alike` (as above)."""
    k = w_NK.shape[1]
    few = x_MK.shape[0] <= DENSE_ROWS and w_NK.stride(1) == 1 and linear.unsupported(w_NK.device, k, k) is None
    if few or alike:
        return linear.linear_dense(x_MK, w_NK, bias_N, out, alike)
    y_MN = F.linear(x_MK, w_NK, None if bias_N is None else bias_N.to(x_MK.dtype))
    return y_MN if out is None else y_MN.to(out)


def held(parts: Tensor | Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight, or parts one below the other, copied to `dtype` on `device`, contiguous and in memory of its own, on a
    CPU with kernels in large pages. A view of a mapped file would keep the file's pages, one of a larger tensor all of
    it."""
    parts = [parts] if isinstance(parts, Tensor) else parts
    if linear.unsupported(device, 1, 1) is None and all(part.device.type == "cpu" for part in parts):
        return linear.held(parts, dtype)
    if len(parts) > 1:
        return torch.cat(list(parts)).to(device=device, dtype=dtype)
    return parts[0].to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def linear_fp4(
    x_MK: Tensor,
    codes_NB: Tensor,
    exponents_NG: Tensor,
    bias_N: Tensor | None = None,
    out: torch.dtype | None = None,
) -> Tensor:
    """x @ w.T + bias [M, N], bias fp32, in `out` or x's dtype; w is dequantized slab by slab at each use."""
    return _finished(reference.linear_fp4(x_MK, codes_NB, exponents_NG), bias_N, out)


def unpackable(w: Int4Operand | Int8Operand) -> bool:
    """Whether `unpack_rows` serves: not where a matrix lies as torch's int4 product wants it."""
    return w.tiles is not None or w.canonical is not None


def unpack_rows(w: Int4Operand | Int8Operand, ids_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `ids_T` of w, [T, K], computed in fp32: an embedding out of a head's matrix, where it is `unpackable`."""
    if w.tiles is not None:
        return linear.unpack_rows(w.tiles, ids_T, dtype)
    assert w.canonical is not None
    if isinstance(w, Int8Operand):
        codes_NK, scales_N = w.canonical
        return (codes_NK[ids_T].float() * scales_N[ids_T, None]).to(dtype)
    codes_NB, scales_NG, zeros_NG = w.canonical
    return dequantize_int4(codes_NB[ids_T], scales_NG[ids_T], zeros_NG[ids_T], dtype)
