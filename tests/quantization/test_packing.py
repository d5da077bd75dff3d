"""Packing for disk: what the readers undo, and what two other packers write."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from flexdecode.checkpoints import int4 as readers
from flexdecode.quantization import packing
from flexdecode.quantization.weights import Int4Weight, Int8Weight
from tests import checkpoints
from tests.test_checkpoints.builders import integers

SHAPES = [(8, 128), (16, 64), (24, 256), (40, 128), (72, 96), (136, 384), (200, 32)]


def canonical(n: int, k: int, group: int, symmetric: bool = False) -> Int4Weight:
    codes, scales, zeros = integers(n, k, group, symmetric=symmetric)
    return Int4Weight.from_codes(codes, scales.half(), zeros.to(torch.uint8))


def same(a: Int4Weight, b: Int4Weight) -> bool:
    return (
        torch.equal(a.codes_NB, b.codes_NB)
        and torch.equal(a.scales_NG.float(), b.scales_NG.float())
        and torch.equal(a.zeros_NG, b.zeros_NG)
    )


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("shape", SHAPES)
def test_awq_gemm(shape: tuple[int, int], group: int) -> None:
    """B39. Rows that are a multiple of 8 and of nothing larger."""
    weight = canonical(*shape, group)
    packed = packing.pack_awq_gemm(weight)
    assert same(readers.decode_awq_gemm(packed["qweight"], packed["qzeros"], packed["scales"]), weight)
    other = checkpoints.pack_awq_gemm(*integers(*shape, group))
    assert all(torch.equal(packed[name], other[name]) for name in other)
    assert {name: t.dtype for name, t in packed.items()} == {name: t.dtype for name, t in other.items()}


def test_awq_gemm_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = canonical(136, 384, 32)
    whole = packing.pack_awq_gemm(weight)["qweight"]
    monkeypatch.setattr(packing, "_SLAB", 10_000)
    assert torch.equal(packing.pack_awq_gemm(weight)["qweight"], whole)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (12, 64), (20, 32), (6, 36), (3, 30)])
def test_pack_quantized(shape: tuple[int, int], symmetric: bool) -> None:
    """Rows that are no multiple of 8, and columns that do not fill a word."""
    group = 32 if shape[1] % 32 == 0 else -1
    weight = canonical(*shape, group, symmetric)
    packed = packing.pack_quantized(weight, torch.float16, symmetric)
    assert ("weight_zero_point" in packed) != symmetric
    read = readers.decode_pack_quantized(
        packed["weight_packed"], packed["weight_scale"], packed.get("weight_zero_point"), shape
    )
    assert same(read, weight)
    codes, _, zeros = integers(*shape, group, symmetric=symmetric)
    assert torch.equal(packed["weight_packed"], pack_to_int32((codes - 8).to(torch.int8), 4))
    if not symmetric:
        assert torch.equal(packed["weight_zero_point"], pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0))


def test_int_quantized() -> None:
    codes = torch.randint(-127, 128, (12, 20), dtype=torch.int8)
    weight = Int8Weight(codes, torch.rand(12).bfloat16().float())
    packed = packing.int_quantized(weight, torch.bfloat16)
    read = readers.decode_int_quantized(packed["weight"], packed["weight_scale"])
    assert torch.equal(read.codes_NK, codes)
    assert torch.equal(read.scales_N, weight.scales_N)
    assert packed["weight_scale"].shape == (12, 1)
