"""The only door to the kernels: products of activations with integer weights, on every device and in every dtype.

`pack_*` chooses once, at load, how a matrix will be read, and says so (`path`); `linear_*` then only runs. What is
packed has memory of its own: it keeps no mapped file and no larger tensor alive. Activations are [rows, inputs] in
bf16, fp16 or fp32; results have their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexdecode.kernels import build, int4_torch, reference
from flexdecode.kernels.build import KernelsUnavailableError
from flexdecode.kernels.int4_torch import PackedInt4
from flexdecode.kernels.reference import dequantize_fp4, dequantize_int4, linear_fp4

__all__ = [
    "FEW_QUERIES",
    "Int4Operand",
    "Int8Operand",
    "attend_few",
    "attend_few_unsupported",
    "dequantize_fp4",
    "dequantize_int4",
    "isas",
    "linear_fp4",
    "linear_int4",
    "linear_int8",
    "pack_int4",
    "pack_int8",
    "use_isa",
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


FEW_QUERIES = 16  # of one sequence: up to here the work is reading keys, beyond it is multiplying
_ATTEND_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend_few_unsupported(device: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why `attend_few` cannot serve, or None. The first call compiles the kernels where they are not cached."""
    if device != "cpu":
        return f"the CPU kernels do not run on {device}"
    if dtype not in _ATTEND_DTYPES or kv_dtype not in (*_ATTEND_DTYPES, torch.int8):
        return f"the CPU kernels have no path for {dtype} queries on {kv_dtype} keys"
    try:
        build.load()
    except KernelsUnavailableError as problem:
        return str(problem)
    return None


def attend_few(
    q_THD: Tensor,
    k_CSD: Tensor,
    v_CSD: Tensor,
    k_scale_CS: Tensor | None,
    v_scale_CS: Tensor | None,
    tiles: Tensor,
    table: Tensor,
    bits: Tensor,
    *,
    page: int,
    scale: float,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    split: int = 0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of few queries over paged keys: each visible key and value is read once, split over all threads.

    q_THD [tokens, heads, head_dim]; k_CSD and v_CSD [kv_heads, slots, dim] in fp32, bf16, fp16, or int8 with scales
    fp32 [kv_heads, slots]. tiles int64 [sequences, 6]: first row, rows, first key, last key + 1, offset into `table`,
    offset into `bits` or -1. table int32: page numbers from the page of the first key on. bits int64: for each row and
    block of 64 positions (aligned to 64) which keys it sees. softcap 0 is none; sinks_H fp32. A sequence is cut into
    pieces of `split` blocks (0: by its own length), so its result has the same bits whatever else is in the call and
    on any number of threads. Returns out
    [tokens, heads, v_head_dim] in q's dtype, and lse fp32 [tokens, heads] (natural log) or None.
    """
    tokens, heads, head_dim = q_THD.shape
    assert heads % k_CSD.shape[0] == 0
    assert k_CSD.shape[2] == head_dim
    assert k_CSD.is_contiguous()
    assert v_CSD.is_contiguous()
    if q_THD.stride(-1) != 1:
        q_THD = q_THD.contiguous()
    out_THD = q_THD.new_empty(tokens, heads, v_CSD.shape[2])
    lse_TH = torch.empty(tokens, heads) if return_lse else None
    torch.ops.flexdecode.attend_few(
        q_THD,
        k_CSD,
        v_CSD,
        k_scale_CS,
        v_scale_CS,
        tiles,
        table,
        bits,
        page,
        scale,
        softcap,
        sinks_H,
        split,
        out_THD,
        lse_TH,
    )
    return out_THD, lse_TH


def use_isa(name: str | None = None) -> str:
    """The instruction set whose kernels run; a name forces one of those that this machine runs (`isas`)."""
    build.load()
    if name is not None:
        torch.ops.flexdecode.use_isa(name)
    chosen: str = torch.ops.flexdecode.isa()
    return chosen


def isas() -> list[str]:
    """Instruction sets that this machine runs, in the order of preference."""
    build.load()
    names: list[str] = torch.ops.flexdecode.isas()
    return names
