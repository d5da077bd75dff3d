"""Int4Weight, Int8Weight, Fp4Weight: the forms in which every quantized file meets.

Knows no file layout and no device packing: layouts are undone in `checkpoints`, packing happens in `models.linear`.
Shapes: N rows (outputs), K columns (inputs), g inputs a group, G = K/g groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexdecode.kernels.reference import dequantize_fp4, dequantize_int4, unpack_nibbles


@dataclass(frozen=True)
class Int4Weight:
    """w[n, k] = (code[n, k] - zeros[n, k // g]) * scales[n, k // g], codes 0 … 15.

    codes_NB: uint8 [N, K/2], two codes a byte: byte b of a row holds column 2b in its low nibble, 2b+1 in its high.
    scales_NG: fp32 (or fp16 where the file holds fp16) [N, G]. zeros_NG: fp32 [N, G], fractional zeros allowed
    (GGUF Q4_1 has w = code·d + m, so zero = -m/d), or uint8 where every zero is a whole number 0 … 15.
    """

    codes_NB: Tensor
    scales_NG: Tensor
    zeros_NG: Tensor

    def __post_init__(self) -> None:
        n, b = self.codes_NB.shape
        assert self.codes_NB.dtype == torch.uint8
        assert self.scales_NG.shape == self.zeros_NG.shape
        assert self.scales_NG.shape[0] == n
        assert (2 * b) % self.scales_NG.shape[1] == 0

    @property
    def shape(self) -> tuple[int, int]:
        n, b = self.codes_NB.shape
        return n, 2 * b

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales_NG.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes_NB.nbytes + self.scales_NG.nbytes + self.zeros_NG.nbytes

    def codes_NK(self) -> Tensor:
        """The codes one a byte, uint8 [N, K]."""
        return unpack_nibbles(self.codes_NB)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] in `dtype`, computed in fp32."""
        return dequantize_int4(self.codes_NB, self.scales_NG, self.zeros_NG, dtype)

    def rows(self, index: slice | Tensor) -> Int4Weight:
        """The given rows, in the given order."""
        return Int4Weight(self.codes_NB[index], self.scales_NG[index], self.zeros_NG[index])

    def to(self, device: torch.device | str) -> Int4Weight:
        return Int4Weight(self.codes_NB.to(device), self.scales_NG.to(device), self.zeros_NG.to(device))

    @staticmethod
    def concat(parts: Sequence[Int4Weight]) -> Int4Weight:
        """Rows of `parts` one below the other. Groups must agree."""
        zeros = [p.zeros_NG for p in parts]
        if len({z.dtype for z in zeros}) > 1:
            zeros = [z.float() for z in zeros]
        scales = [p.scales_NG for p in parts]
        if len({s.dtype for s in scales}) > 1:
            scales = [s.float() for s in scales]
        return Int4Weight(torch.cat([p.codes_NB for p in parts]), torch.cat(scales), torch.cat(zeros))

    @staticmethod
    def from_codes(codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor) -> Int4Weight:
        """From codes one an element (any integer dtype, values 0 … 15)."""
        c = codes_NK.to(torch.uint8)
        return Int4Weight((c[:, 0::2] | (c[:, 1::2] << 4)).contiguous(), scales_NG, zeros_NG)


@dataclass(frozen=True)
class Int8Weight:
    """w[n, k] = codes_NK[n, k] * scales_N[n]; codes int8, scales fp32, one a row."""

    codes_NK: Tensor
    scales_N: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes_NK.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return self.codes_NK.nbytes + self.scales_N.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.codes_NK.float() * self.scales_N.float()[:, None]).to(dtype)

    def rows(self, index: slice | Tensor) -> Int8Weight:
        return Int8Weight(self.codes_NK[index], self.scales_N[index])

    def to(self, device: torch.device | str) -> Int8Weight:
        return Int8Weight(self.codes_NK.to(device), self.scales_N.to(device))

    @staticmethod
    def concat(parts: Sequence[Int8Weight]) -> Int8Weight:
        return Int8Weight(torch.cat([p.codes_NK for p in parts]), torch.cat([p.scales_N for p in parts]))


@dataclass(frozen=True)
class Fp4Weight:
    """MXFP4 (OCP Microscaling Formats v1.0): e2m1 floats in groups of 32 that share a power of two.

    codes_NB: uint8 [N, K/2], low nibble first. exponents_NG: uint8 [N, K/32], the group's factor is 2 ** (e - 127).
    """

    codes_NB: Tensor
    exponents_NG: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        n, b = self.codes_NB.shape
        return n, 2 * b

    @property
    def nbytes(self) -> int:
        return self.codes_NB.nbytes + self.exponents_NG.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize_fp4(self.codes_NB, self.exponents_NG, dtype)

    def rows(self, index: slice | Tensor) -> Fp4Weight:
        return Fp4Weight(self.codes_NB[index], self.exponents_NG[index])

    def to(self, device: torch.device | str) -> Fp4Weight:
        return Fp4Weight(self.codes_NB.to(device), self.exponents_NG.to(device))

    @staticmethod
    def concat(parts: Sequence[Fp4Weight]) -> Fp4Weight:
        return Fp4Weight(torch.cat([p.codes_NB for p in parts]), torch.cat([p.exponents_NG for p in parts]))


Weight = Tensor | Int4Weight | Int8Weight | Fp4Weight
