"""The integer products in plain torch against fp64 and against hand-made tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.kernels import reference
from flexdecode.kernels.reference import (
    dequantize_fp4,
    dequantize_int4,
    linear_fp4,
    linear_int4,
    linear_int8,
    row_slabs,
    unpack_nibbles,
)
from tests.kernels.integers import ROUNDOFF, activations, exact, int4, plain_limit

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# OCP Microscaling Formats v1.0, table 5: sign, two bits of exponent, one of mantissa.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_unpacking_puts_the_low_nibble_first() -> None:
    packed = torch.tensor([[0x21, 0x43], [0xF0, 0x0F]], dtype=torch.uint8)
    assert unpack_nibbles(packed).tolist() == [[1, 2, 3, 4], [0, 15, 15, 0]]
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    assert unpack_nibbles(every).tolist() == [[b % 16, b // 16] for b in range(256)]


@pytest.mark.parametrize("fractional", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("n", "k", "group"), [(8, 64, 32), (3, 96, 32), (5, 48, 48), (1, 256, 128), (16, 32, 2)])
def test_int4_dequantized(n: int, k: int, group: int, fractional: bool, half: bool) -> None:
    w = int4(n, k, group, fractional=fractional, half=half)
    got = dequantize_int4(*w.canonical, torch.float32)
    # Two fp32 operations: one rounding of the difference, one of the product.
    difference = (w.codes_NK.double() - w.per_column(w.zeros_NG)).abs() * w.per_column(w.scales_NG).abs()
    assert bool(((got.double() - w.weight_NK).abs() <= 2.01 * 2.0**-24 * difference).all())
    for dtype in DTYPES:
        assert torch.equal(dequantize_int4(*w.canonical, dtype), got.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 3, 17])
@pytest.mark.parametrize("slab", [1, 5000, 32 << 20])
def test_int4_product(dtype: torch.dtype, m: int, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SLAB_BYTES", slab)
    w, x = int4(24, 96, 32, fractional=True), activations(m, 96, dtype)
    got = linear_int4(x, *w.canonical)
    assert got.dtype == dtype
    assert got.shape == (m, 24)
    assert bool(((got.double() - exact(x, w.weight_NK)).abs() <= plain_limit(x, w.weight_NK)).all())


def bytes_of(codes: list[int]) -> Tensor:
    return torch.tensor([[codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)]], dtype=torch.uint8)


def test_fp4_every_code() -> None:
    """All sixteen, at the exponents whose factor is 1, 2 and a half."""
    codes = list(range(16)) * 2
    wanted = torch.tensor([(E2M1 + [-x for x in E2M1]) * 2], dtype=torch.float32)
    for exponent, factor in ((127, 1.0), (128, 2.0), (126, 0.5)):
        got = dequantize_fp4(bytes_of(codes), torch.tensor([[exponent]], dtype=torch.uint8), torch.float32)
        assert torch.equal(got, wanted * factor)
        assert torch.equal(got.signbit(), wanted.signbit())  # -0.0 is code 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp4_every_exponent(dtype: torch.dtype) -> None:
    """0 … 254 against powers of two made by Python: also where the product is subnormal, and infinite where fp32
    ends. (255 is the format's NaN, which no weight file holds.)"""
    codes = torch.cat([bytes_of(list(range(16)) * 2)] * 255)
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    table = [[x * 2.0 ** (e - 127) for x in (E2M1 + [-x for x in E2M1]) * 2] for e in range(255)]
    wanted = torch.tensor(table, dtype=torch.float64).float().to(dtype)
    assert torch.equal(dequantize_fp4(codes, exponents, dtype), wanted)


def test_fp4_groups_have_their_own_exponents() -> None:
    codes = torch.full((2, 32), 0x22, dtype=torch.uint8)  # 64 times the value 1
    got = dequantize_fp4(codes, torch.tensor([[127, 130], [120, 127]], dtype=torch.uint8), torch.float32)
    wanted = torch.tensor([[1.0, 8.0], [2.0**-7, 1.0]]).repeat_interleave(32, dim=1)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 17])
@pytest.mark.parametrize("slab", [1, 3000, 32 << 20])
def test_fp4_product(dtype: torch.dtype, m: int, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SLAB_BYTES", slab)
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (24, 48), generator=g, dtype=torch.uint8)
    exponents = torch.randint(120, 128, (24, 3), generator=g, dtype=torch.uint8)
    x = activations(m, 96, dtype)
    weight = dequantize_fp4(codes, exponents, torch.float32)
    got = linear_fp4(x, codes, exponents)
    assert got.dtype == dtype
    assert bool(((got.double() - exact(x, weight)).abs() <= plain_limit(x, weight)).all())


def int8(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
    codes[0, 0], codes[-1, -1] = -128, 127
    return codes, torch.rand(n, generator=g) / 100 + 1e-4


@pytest.mark.parametrize("m", [0, 1, 3, 17])
@pytest.mark.parametrize("slab", [1, 3000, 32 << 20])
def test_int8_product_of_whole_numbers_is_exact(m: int, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of integers fit into fp32, so there is nothing to round but the scale."""
    monkeypatch.setattr(reference, "_SLAB_BYTES", slab)
    codes, scales = int8(24, 100)
    x = torch.randint(-50, 51, (m, 100), generator=torch.Generator().manual_seed(1)).float()
    got = linear_int8(x, codes, scales)
    assert torch.equal(got, (x.double() @ codes.double().T).float() * scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_product(dtype: torch.dtype) -> None:
    codes, scales = int8(24, 100)
    x = activations(5, 100, dtype)
    weight = codes.double() * scales.double()[:, None]
    got = linear_int8(x, codes, scales)
    assert got.dtype == dtype
    # The codes are exact, so only sums (fp32), the unscaled result and the scaled one are rounded.
    u, y = ROUNDOFF[dtype], exact(x, weight)
    limit = 2.01 * u * y.abs() + 200 * 2.0**-24 * exact(x.abs(), weight.abs())
    assert bool(((got.double() - y).abs() <= limit).all())


def test_int8_product_in_fp16_does_not_overflow_before_its_scale() -> None:
    """fp16 ends at 65504, and a sum of unscaled codes is soon beyond: 4096 inputs of 20 times a code of 100 make
    8 million, which the scale brings back to 8."""
    x = torch.full((1, 4096), 20.0, dtype=torch.float16)
    codes = torch.full((4, 4096), 100, dtype=torch.int8)
    got = linear_int8(x, codes, torch.full((4,), 1e-6))
    torch.testing.assert_close(got.float(), torch.full((1, 4), 8.192), atol=0, rtol=2.0**-10)


@given(n=st.integers(0, 2000), row_bytes=st.integers(0, 1 << 26))
@settings(deadline=None)
def test_slabs_cover_each_row_once_within_their_size(n: int, row_bytes: int) -> None:
    slabs = list(row_slabs(n, row_bytes))
    assert [i for s in slabs for i in range(s.start, s.stop)] == list(range(n))
    assert all((s.stop - s.start) * row_bytes <= max(32 << 20, row_bytes) for s in slabs)
