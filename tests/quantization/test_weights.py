"""The canonical integer forms against their definitions, number by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.quantization.weights import Fp4Weight, Int4Weight, Int8Weight

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 += [-x for x in FP4]


def codes_and_parameters(
    n: int,
    groups: int,
    group: int,
    zeros: torch.dtype = torch.uint8,
    scales: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, groups * group), generator=g)
    scale = (torch.rand(n, groups, generator=g) + 0.1).to(scales)
    zero = torch.rand(n, groups, generator=g) * 15
    return codes, scale, (zero.round() if zeros == torch.uint8 else zero).to(zeros)


def int4(n: int, groups: int, group: int, **options: Any) -> Int4Weight:
    return Int4Weight.from_codes(*codes_and_parameters(n, groups, group, **options))


def int8(n: int, k: int, seed: int = 0) -> Int8Weight:
    g = torch.Generator().manual_seed(seed)
    return Int8Weight(torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8), torch.rand(n, generator=g))


def fp4(n: int, k: int, seed: int = 0) -> Fp4Weight:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    return Fp4Weight(codes, torch.randint(110, 140, (n, k // 32), generator=g, dtype=torch.uint8))


Make = tuple[Int4Weight | Int8Weight | Fp4Weight, int, int]
KINDS: dict[str, Make] = {
    "int4": (int4(6, 2, 32), 6, 64),
    "int4 fractional": (int4(6, 2, 32, zeros=torch.float32), 6, 64),
    "int4 fp16 scales": (int4(6, 1, 64, scales=torch.float16), 6, 64),
    "int8": (int8(6, 10), 6, 10),
    "fp4": (fp4(6, 64), 6, 64),
}
every_kind = pytest.mark.parametrize("name", KINDS)


@given(
    n=st.integers(1, 9),
    groups=st.integers(1, 4),
    half=st.integers(1, 20),
    dtype=st.sampled_from([torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_codes_come_back(n: int, groups: int, half: int, dtype: torch.dtype, seed: int) -> None:
    codes, scales, zeros = codes_and_parameters(n, groups, 2 * half, seed=seed)
    weight = Int4Weight.from_codes(codes.to(dtype), scales, zeros)
    assert torch.equal(weight.codes_NK().long(), codes)
    assert weight.codes_NB.is_contiguous()
    assert weight.shape == (n, 2 * half * groups)
    assert weight.group_size == 2 * half


def test_a_byte_holds_its_even_column_low() -> None:
    codes = torch.tensor([[1, 2, 3, 15], [0, 15, 8, 0]])
    weight = Int4Weight.from_codes(codes, torch.ones(2, 1), torch.zeros(2, 1))
    assert weight.codes_NB.tolist() == [[0x21, 0xF3], [0xF0, 0x08]]


@pytest.mark.parametrize("zeros", [torch.uint8, torch.float32])
@pytest.mark.parametrize("scales", [torch.float32, torch.float16])
def test_int4_by_its_definition(zeros: torch.dtype, scales: torch.dtype) -> None:
    codes, s, z = codes_and_parameters(5, 3, 8, zeros=zeros, scales=scales)
    weight = Int4Weight.from_codes(codes, s, z)
    wanted = [[(int(codes[n, k]) - float(z[n, k // 8])) * float(s[n, k // 8]) for k in range(24)] for n in range(5)]
    torch.testing.assert_close(weight.dequantize().double(), torch.tensor(wanted, dtype=torch.float64))
    assert torch.equal(weight.dequantize(torch.bfloat16), weight.dequantize().bfloat16())


def test_int8_by_its_definition() -> None:
    weight = int8(5, 7)
    wanted = [[int(weight.codes_NK[n, k]) * float(weight.scales_N[n]) for k in range(7)] for n in range(5)]
    torch.testing.assert_close(weight.dequantize().double(), torch.tensor(wanted, dtype=torch.float64))
    assert torch.equal(weight.dequantize(torch.float16), weight.dequantize().half())


def test_fp4_by_its_definition() -> None:
    weight = fp4(3, 64)
    codes = torch.stack((weight.codes_NB & 15, weight.codes_NB >> 4), -1).flatten(1).tolist()
    exponents = weight.exponents_NG.tolist()
    wanted = [[FP4[codes[n][k]] * 2.0 ** (exponents[n][k // 32] - 127) for k in range(64)] for n in range(3)]
    assert torch.equal(weight.dequantize(), torch.tensor(wanted))


@every_kind
def test_shape_and_bytes(name: str) -> None:
    weight, n, k = KINDS[name]
    assert weight.shape == (n, k)
    assert weight.nbytes == sum(t.nbytes for t in vars(weight).values())


@pytest.mark.parametrize(
    ("zeros", "scales", "nbytes"),
    [
        (torch.uint8, torch.float32, 64 * 64 + 64 * 4 * 5),
        (torch.float32, torch.float32, 64 * 64 + 64 * 4 * 8),
        (torch.uint8, torch.float16, 64 * 64 + 64 * 4 * 3),
    ],
)
def test_int4_takes_half_a_byte_a_weight(zeros: torch.dtype, scales: torch.dtype, nbytes: int) -> None:
    assert int4(64, 4, 32, zeros=zeros, scales=scales).nbytes == nbytes


@every_kind
@pytest.mark.parametrize("index", [slice(0, 6), slice(1, 4), torch.tensor([5, 0, 0, 3]), torch.tensor([4])], ids=str)
def test_rows_in_the_given_order(name: str, index: slice | Tensor) -> None:
    weight, _, k = KINDS[name]
    rows = weight.rows(index)
    wanted = weight.dequantize()[index]
    assert rows.shape == (len(wanted), k)
    assert torch.equal(rows.dequantize(), wanted)


@every_kind
def test_concat_is_one_below_the_other(name: str) -> None:
    weight, n, k = KINDS[name]
    parts: list[Any] = [weight.rows(slice(0, 2)), weight.rows(slice(2, 3)), weight.rows(slice(3, n))]
    whole = type(weight).concat(parts)
    assert whole.shape == (n, k)
    for a, b in zip(vars(whole).values(), vars(weight).values(), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


@pytest.mark.parametrize("zeros", [(torch.uint8, torch.float32), (torch.float32, torch.uint8)])
@pytest.mark.parametrize("scales", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_concat_of_different_parameter_types_loses_nothing(
    zeros: tuple[torch.dtype, torch.dtype], scales: tuple[torch.dtype, torch.dtype]
) -> None:
    """q_proj with whole zeros beside a k_proj with fractional ones: cat in the first one's type would cut them off."""
    parts = [int4(3, 2, 8, zeros=z, scales=s, seed=i) for i, (z, s) in enumerate(zip(zeros, scales, strict=True))]
    whole = Int4Weight.concat(parts)
    assert whole.zeros_NG.dtype == whole.scales_NG.dtype == torch.float32
    assert torch.equal(whole.dequantize(), torch.cat([p.dequantize() for p in parts]))


@every_kind
def test_to_a_device_keeps_everything(name: str) -> None:
    weight, _, _ = KINDS[name]
    for a, b in zip(vars(weight.to("cpu")).values(), vars(weight).values(), strict=True):
        assert torch.equal(a, b)
    assert all(t.device.type == "meta" for t in vars(weight.to("meta")).values())


def test_our_own_mistakes_are_caught() -> None:
    codes, ones = torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 2)
    for broken in (
        (codes.int(), ones, ones),
        (codes, ones, torch.ones(4, 1)),
        (codes, torch.ones(3, 2), torch.ones(3, 2)),
        (codes, torch.ones(4, 3), torch.ones(4, 3)),
    ):
        with pytest.raises(AssertionError):
            Int4Weight(*broken)
