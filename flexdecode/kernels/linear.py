"""Products of our own on a CPU: with integer matrices, packed once into the order in which the kernels read them, and
with matrices of floats as they are.

How they lie in memory is told in cpu/linear.h. Knows nothing of other ways to multiply them (`ops` chooses).
Shape letters: M rows of activations, N outputs, K inputs, B = K/2 bytes, G groups, I tiles of 32 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdecode.kernels import build
from flexdecode.kernels.build import KernelsUnavailableError

TILE = 32
_WORD = 8  # columns of int4 in 32 bits: a group is whole words, or the row is one group and filled up


@dataclass(frozen=True)
class Int4Tiles:
    """An int4 matrix [n, k]: w = (code - 8 + offset) * scale.

    codes int32 [I, words of 8 columns, 32]; scales fp32, or fp16 where that holds them exactly, [I, G, 32]; offsets
    likewise, int8 where they are whole numbers, else fp32, and None where all are 0: every zero is 8.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)


@dataclass(frozen=True)
class Int8Tiles:
    """An int8 matrix [n, k], w = code * scale: codes int8 [I, K, 32], scales fp32 [I, 32]."""

    codes: Tensor
    scales: Tensor
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def unsupported(device: torch.device, k: int, group: int) -> str | None:
    """Why the kernels cannot serve a matrix, or None. The first call compiles them where they are not cached."""
    if device.type != "cpu":
        return f"the CPU kernels do not run on {device.type}"
    if group % _WORD and group != k:
        return f"the CPU kernels have no int4 product for groups of {group} columns, which is no multiple of {_WORD}"
    try:
        build.load()
    except KernelsUnavailableError as problem:
        return str(problem)
    return None


def pack_int4(codes_NB: Tensor, scales_NG: Tensor, zeros_NG: Tensor) -> Int4Tiles:
    """From the canonical form (quantization.weights.Int4Weight)."""
    n, b = codes_NB.shape
    offsets_NG = 8.0 - zeros_NG.float()
    if not bool(offsets_NG.any()):
        offsets = None
    else:
        whole = bool((offsets_NG == offsets_NG.round()).all()) and bool((offsets_NG.abs() <= 127).all())
        offsets = _tiles(offsets_NG.to(torch.int8) if whole else offsets_NG)
    half = scales_NG.half()
    scales = half if torch.equal(half.float(), scales_NG.float()) else scales_NG.float()
    return Int4Tiles(torch.ops.flexdecode.pack_int4(codes_NB), _tiles(scales), offsets, n, 2 * b)


def pack_int8(codes_NK: Tensor, scales_N: Tensor) -> Int8Tiles:
    """From codes [N, K] and a scale a row."""
    n, k = codes_NK.shape
    scales = _tiles(scales_N.float()[:, None])[:, 0]
    return Int8Tiles(torch.ops.flexdecode.pack_int8(codes_NK), scales, n, k)


def _tiles(x_NG: Tensor) -> Tensor:
    """[N, G] to [I, G, 32], filled up with zeros, in memory of its own."""
    n, g = x_NG.shape
    filled = F.pad(x_NG, (0, 0, 0, -n % TILE)).view(-1, TILE, g)
    return held([filled.transpose(1, 2)], x_NG.dtype)


def held(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """CPU tensors one below the other, copied to `dtype`, in memory made for what is read whole in every step."""
    copy: Tensor = torch.ops.flexdecode.held(parts, dtype)
    return copy


def linear_int4(
    x_MK: Tensor, w: Int4Tiles, bias_N: Tensor | None = None, out: torch.dtype | None = None, alike: bool = False
) -> Tensor:
    """x @ w.T + bias (fp32), in `out` or x's dtype; exact but for sums in fp32. Where bf16 rows are so many that
    torch's product is quicker (never with AMX, else from 193 on, and from 17 or 33 on without AVX-512), weights are
    rounded to bf16 first, and the result before the bias. `alike`: a row's bits do not depend on how many there are."""
    y_MN: Tensor = torch.ops.flexdecode.linear_int4(x_MK, w.codes, w.scales, w.offsets, bias_N, w.n, w.k, out, alike)
    return y_MN


def linear_int8(
    x_MK: Tensor, w: Int8Tiles, bias_N: Tensor | None = None, out: torch.dtype | None = None, alike: bool = False
) -> Tensor:
    """x @ w.T + bias (fp32), in `out` or x's dtype; exact but for sums in fp32. Where bf16 rows are so many that
    torch's product is quicker, the sum is rounded to bf16 before the scale, too. `alike` as above."""
    y_MN: Tensor = torch.ops.flexdecode.linear_int8(x_MK, w.codes, w.scales, bias_N, w.n, out, alike)
    return y_MN


def linear_dense(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, out: torch.dtype | None = None, alike: bool = False
) -> Tensor:
    """x @ w.T + bias (fp32), in `out` or x's dtype, by fp32 sums; for few rows: w is read once for each four. `alike`
    as above."""
    y_MN: Tensor = torch.ops.flexdecode.linear_dense(x_MK, w_NK, bias_N, out, alike)
    return y_MN


def unpack_rows(w: Int4Tiles | Int8Tiles, ids_T: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows `ids_T` of w [T, K], computed in fp32: an embedding."""
    codes_TK: Tensor = torch.ops.flexdecode.unpack_rows(w.codes, ids_T.long(), w.k)
    tile, row = ids_T // TILE, ids_T % TILE
    if isinstance(w, Int8Tiles):
        return codes_TK.float().mul_(w.scales[tile, row, None]).to(dtype)
    scales_TG = w.scales[tile, :, row].float()
    values_TGg = codes_TK.float().view(*scales_TG.shape, w.k // scales_TG.shape[1])
    if w.offsets is not None:
        values_TGg += w.offsets[tile, :, row].float()[..., None]
    values_TGg *= scales_TG[..., None]
    return values_TGg.view(codes_TK.shape).to(dtype)
