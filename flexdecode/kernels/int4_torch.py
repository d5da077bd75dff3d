"""torch's own int4 product, and what it takes to use it: its packed layout, learnt by asking.

`aten::_weight_int4pack_mm_for_cpu` wants weights in a layout that differs by instruction set and is documented
nowhere. We pack small matrices whose codes spell out their own row and column, read off where each went, and so can
unpack any matrix again: one copy of the weights serves the product for few rows and a dequantizing GEMM for many.
Shape letters as in `reference`; P rows of one packed block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from flexdecode.kernels import reference

GROUPS = (32, 64, 128, 256)
_FEW_ROWS = 128  # measured: from about here a dequantizing GEMM is quicker than torch's int4 product
_SLAB = 2 << 20  # weights dequantized at a time: 4 MB in bf16, which a shared cache holds
_CUDA_INNER_K = 8


@dataclass(frozen=True)
class Layout:
    """Blocks [N / rows, K, rows / 2] of bytes; low nibbles, then high nibbles, hold the block's rows in `order`."""

    rows: int
    order: tuple[int, ...]


@cache
def cpu_layout() -> Layout | None:
    """How this machine packs, or None where the layout is none that we can undo."""
    n, k = 128, 32
    rows, columns = torch.arange(n)[:, None].expand(n, k), torch.arange(k)[None, :].expand(n, k)

    def nibbles(codes: Tensor) -> tuple[Tensor, Tensor]:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int().contiguous(), 1).flatten().int()
        return packed & 15, packed >> 4

    halves = [nibbles(x) for x in (rows % 16, rows // 16, columns % 16, columns // 16)]
    row_at, column_at = ([halves[a][i] + 16 * halves[a + 1][i] for i in (0, 1)] for a in (0, 2))
    for block in (16, 32, 64, 128):
        shape = (n // block, k, block // 2)
        r = torch.cat([x.view(shape) for x in row_at], dim=-1)
        c = torch.cat([x.view(shape) for x in column_at], dim=-1)
        order = r[0, 0]
        expected = torch.arange(0, n, block)[:, None, None] + order
        if torch.equal(r, expected.expand_as(r)) and torch.equal(c, torch.arange(k)[None, :, None].expand_as(c)):
            return Layout(block, tuple(order.tolist()))
    return None


@dataclass(frozen=True)
class PackedInt4:
    """An int4 matrix [N, K] as torch's product reads it. `scale_zero_GN2` (bf16) has w = (code - 8) * s + z; torch's
    op wants both in the activations' type, so scales are rounded to bf16 here."""

    data: Tensor
    scale_zero_GN2: Tensor
    n: int
    k: int
    group: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale_zero_GN2.nbytes


def packable(n: int, k: int, group: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's int4 product serves this shape at speed; else `reference.linear_int4` does."""
    if dtype != torch.bfloat16 or _usable_group(k, group) is None:
        return False
    if device.type == "cuda":
        return n % 8 == 0 and k % (16 * _CUDA_INNER_K) == 0
    return device.type == "cpu" and cpu_layout() is not None


def _usable_group(k: int, group: int) -> int | None:
    """The largest group that the op knows and that divides the weight's own: splitting a group changes nothing."""
    return next((g for g in reversed(GROUPS) if group % g == 0 and k % g == 0), None)


def pack(codes_NB: Tensor, scales_NG: Tensor, zeros_NG: Tensor) -> PackedInt4:
    """Pack on the device where `codes_NB` lies. Rows are filled up to whole blocks with zeros."""
    n, b = codes_NB.shape
    k = 2 * b
    own = k // scales_NG.shape[1]
    group = _usable_group(k, own)
    assert group is not None
    scales = scales_NG.float().repeat_interleave(own // group, dim=1)
    zeros = zeros_NG.float().repeat_interleave(own // group, dim=1)
    scale_zero = torch.stack((scales, (8.0 - zeros) * scales), dim=-1).transpose(0, 1).bfloat16()
    if codes_NB.device.type == "cuda":
        swapped = (codes_NB << 4) | (codes_NB >> 4)  # the CUDA packer wants the even column in the high nibble
        data = torch.ops.aten._convert_weight_to_int4pack(swapped, _CUDA_INNER_K)
        return PackedInt4(data, scale_zero.contiguous(), n, k, group)
    layout = cpu_layout()
    assert layout is not None
    filled = -(-n // layout.rows) * layout.rows
    scale_zero = F.pad(scale_zero, (0, 0, 0, filled - n)).contiguous()
    data = torch.empty(filled, b, dtype=torch.uint8)
    blocks = max(1, _SLAB // (layout.rows * k)) * layout.rows
    for start in range(0, filled, blocks):
        # The packer takes int32 codes, eight times their size: never for the whole matrix at once.
        codes = reference.unpack_nibbles(codes_NB[start : start + blocks]).int()
        codes = F.pad(codes, (0, 0, 0, min(blocks, filled - start) - codes.shape[0]))
        part = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        data[start : start + part.shape[0]] = part
    return PackedInt4(data, scale_zero, n, k, group)


def linear(x_MK: Tensor, w: PackedInt4) -> Tensor:
    """x @ w.T for bf16 x. [M, N]."""
    out: Tensor
    x_MK = x_MK.contiguous()  # torch's op takes no other
    if x_MK.device.type == "cuda":
        out = torch.ops.aten._weight_int4pack_mm(x_MK, w.data, w.group, w.scale_zero_GN2)
        return out
    if x_MK.shape[0] <= _FEW_ROWS:
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x_MK, w.data, w.group, w.scale_zero_GN2)
        return out if out.shape[1] == w.n else out[:, : w.n]
    out = x_MK.new_empty(x_MK.shape[0], w.n)
    layout = cpu_layout()
    assert layout is not None
    columns = _columns(layout)
    filled = w.data.shape[0]
    step = max(1, _SLAB // (layout.rows * w.k)) * layout.rows
    for start in range(0, filled, step):
        stop = min(start + step, filled)
        part = torch.mm(x_MK, dequantize_rows(w, start, stop))
        if columns != tuple(range(layout.rows)):
            back = torch.tensor(columns).argsort()
            part = part.view(part.shape[0], -1, layout.rows)[..., back].reshape(part.shape)
        out[:, start : min(stop, w.n)] = part[:, : w.n - start]
    return out


def _columns(layout: Layout) -> tuple[int, ...]:
    """The row of a block at each column that `dequantize_rows` writes: nibble by nibble of little-endian words."""
    half = layout.rows // 2
    low, high = layout.order[:half], layout.order[half:]
    return (*low[0::2], *high[0::2], *low[1::2], *high[1::2])


def dequantize_rows(w: PackedInt4, start: int, stop: int) -> Tensor:
    """Rows [start, stop), whole blocks, of a CPU matrix, transposed: bf16 [K, stop - start], each block's rows in the
    order of `_columns`.

    A nibble q put into the mantissa of bf16 128.0 reads as 128 + q, so no integer is ever converted; all but the last
    step is exact.
    """
    layout = cpu_layout()
    assert layout is not None
    blocks, words = (stop - start) // layout.rows, layout.rows // 4
    words_KPW = w.data[start:stop].view(torch.int16).view(blocks, w.k, words).permute(1, 0, 2)
    bits = torch.empty(w.k, blocks, 4, words, dtype=torch.int16)
    for nibble in range(4):
        torch.bitwise_and(words_KPW >> (4 * nibble), 15, out=bits[:, :, nibble])
    values = bits.bitwise_or_(0x4300).view(torch.bfloat16).view(w.k // w.group, w.group, stop - start)
    values.sub_(136.0)
    order = torch.tensor(_columns(layout))
    scale_zero = w.scale_zero_GN2[:, start:stop].view(-1, blocks, layout.rows, 2)[:, :, order]
    scale, zero = (t.reshape(-1, 1, stop - start) for t in scale_zero.unbind(-1))
    torch.addcmul(zero, values, scale, out=values)
    return values.view(w.k, stop - start)
