"""The door: which way a matrix takes, that every way gives the same product, and how much memory it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.kernels import ops
from flexdecode.kernels.ops import linear_int4, linear_int8, pack_int4, pack_int8, unpack_rows, unpackable
from tests.grids import by_name, pairwise
from tests.kernels.integers import ROUNDOFF, activations, exact, int4, plain_limit

# Groups of 48 columns are none of torch's.
GRID = pairwise(
    n=(1, 8, 24, 136, 200),
    k=(32, 64, 256, 480),
    parts=(1, 2, "g32"),
    m=(1, 3, 17, 64, 200),
    fractional=(False, True),
    half=(False, True),
)
INT8 = pairwise(
    n=(1, 3, 8, 40, 65),
    k=(1, 5, 16, 40, 48, 64, 100, 128, 576),
    m=(1, 2, 3, 4, 5, 16, 17, 64),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which our kernels cannot be compiled."""
    monkeypatch.setattr(ops.linear, "unsupported", lambda *_: "no C++ compiler was found")


@pytest.fixture(params=["compiled", "uncompiled"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "uncompiled":
        request.getfixturevalue("uncompiled")
    return str(request.param)


@pytest.mark.parametrize("group", [8, 32, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_compiled_kernels_come_first(group: int, dtype: torch.dtype) -> None:
    """test_linear holds what they compute; here, that they are chosen and that the operand is theirs."""
    w4, (codes, scales) = int4(24, group, group), matrix8(24, group)
    operand4, operand8 = pack_int4(*w4.canonical, dtype), pack_int8(codes, scales, dtype)
    assert operand4.path == operand8.path == "cpu"
    x = activations(3, group, dtype)
    for got, weight in (
        (linear_int4(x, operand4), w4.weight_NK),
        (linear_int8(x, operand8), codes.double() * scales.double()[:, None]),
    ):
        assert bool(((got.double() - exact(x, weight)).abs() <= plain_limit(x, weight)).all())
    assert pack_int4(*int4(24, 24, 12).canonical, dtype).path == "dequantize"


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", GRID, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_int4(case: dict[str, Any], dtype: torch.dtype) -> None:
    k = case["k"]
    group = 32 if case["parts"] == "g32" else k // case["parts"]
    w = int4(case["n"], k, group, fractional=case["fractional"], half=case["half"])
    operand = pack_int4(*w.canonical, dtype)
    assert operand.path == ("torch" if dtype == torch.bfloat16 and group % 32 == 0 else "dequantize")
    x = activations(case["m"], k, dtype)
    got, y = linear_int4(x, operand), exact(x, w.weight_NK)
    assert got.dtype == dtype
    error = (got.double() - y).abs()
    if dtype == torch.float32:
        assert bool((error <= 1e-6 * exact(x.abs(), w.weight_NK.abs()) + 1e-6 * y.abs()).all())
    elif operand.path == "dequantize":
        assert bool((error <= plain_limit(x, w.weight_NK)).all())
    else:  # the exact bound is test_int4_torch's
        span = exact(x.abs(), 24 * w.per_column(w.scales_NG).abs())
        assert bool((error <= 2 * ROUNDOFF[dtype] * span).all())


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("m", [1, 16, 17, 200])
def test_int4_without_torchs_product(m: int) -> None:
    """A group that divides by none of torch's sizes is dequantized, in bf16, too."""
    w = int4(24, 96, 48, fractional=True)
    operand = pack_int4(*w.canonical, torch.bfloat16)
    assert operand.path == "dequantize"
    x = activations(m, 96, torch.bfloat16)
    assert bool(((linear_int4(x, operand).double() - exact(x, w.weight_NK)).abs() <= plain_limit(x, w.weight_NK)).all())


def matrix8(n: int, k: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(n * 1000 + k)
    return torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8), torch.rand(n, generator=g) / 50 + 1e-3


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", INT8, ids=by_name)
def test_int8(case: dict[str, Any]) -> None:
    """Every width: torch's int8 product reads whole vectors, and on a width that is no multiple of one it returned
    garbage or crashed."""
    codes, scales = matrix8(case["n"], case["k"])
    x = activations(case["m"], case["k"], case["dtype"])
    got = linear_int8(x, pack_int8(codes, scales, case["dtype"]))
    weight = codes.double() * scales.double()[:, None]
    y, u = exact(x, weight), ROUNDOFF[case["dtype"]]
    assert got.dtype == case["dtype"]
    # The codes are exact in every type: the unscaled sum and the result are rounded, sums are fp32.
    limit = 2.01 * u * y.abs() + 2 * case["k"] * 2.0**-24 * exact(x.abs(), weight.abs())
    assert bool(((got.double() - y).abs() <= limit).all())


@pytest.mark.parametrize("m", [1, 4, 16, 17])
def test_int8_scales_are_applied_in_fp32(m: int, way: str) -> None:
    """torch's op would round them to bf16, an error that all of a row shares and no sum averages out."""
    codes = torch.zeros(256, 64, dtype=torch.int8)
    codes[:, 0] = 1
    scales = 1 + torch.arange(256) / 256 / 64  # nearly all of them are no bf16 numbers
    x = torch.zeros(m, 64, dtype=torch.bfloat16)
    x[:, 0] = 1
    got = linear_int8(x, pack_int8(codes, scales, torch.bfloat16))
    assert torch.equal(got, scales.bfloat16().expand(m, -1))
    x[:, 0] = 3
    assert torch.equal(linear_int8(x, pack_int8(codes, scales, torch.bfloat16)), (3 * scales).bfloat16().expand(m, -1))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("k", "path"), [(16, "torch"), (64, "torch"), (576, "torch"), (15, "dequantize"), (40, "dequantize")]
)
def test_int8_paths(k: int, path: str) -> None:
    codes, scales = matrix8(8, k)
    assert pack_int8(codes, scales, torch.bfloat16).path == path
    assert pack_int8(codes, scales, torch.float32).path == "dequantize"
    assert pack_int8(codes, scales, torch.float16).path == "dequantize"


@pytest.mark.parametrize("m", [1, 5, 16, 17, 200])
def test_activations_need_not_lie_in_one_run(m: int, way: str) -> None:
    operand4 = pack_int4(*int4(24, 128, 64).canonical, torch.bfloat16)
    operand8 = pack_int8(*matrix8(24, 128), torch.bfloat16)
    wide = activations(m, 256, torch.bfloat16)
    for view in (wide[:, 128:], wide[:, ::2], wide[:, :128].T.contiguous().T):
        assert torch.equal(linear_int4(view, operand4), linear_int4(view.contiguous(), operand4))
        assert torch.equal(linear_int8(view, operand8), linear_int8(view.contiguous(), operand8))


def test_no_rows(way: str) -> None:
    w4, (codes, scales) = int4(24, 64, 32), matrix8(24, 64)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(0, 64, dtype=dtype)
        assert linear_int4(x, pack_int4(*w4.canonical, dtype)).shape == (0, 24)
        assert linear_int8(x, pack_int8(codes, scales, dtype)).shape == (0, 24)


def held(value: object) -> list[Tensor]:
    """Every tensor in a frozen dataclass, however deep."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [t for v in value for t in held(v)]
    return [t for v in vars(value).values() for t in held(v)] if hasattr(value, "__dataclass_fields__") else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [False, True])
def test_nbytes_is_what_is_held(dtype: torch.dtype, half: bool, way: str) -> None:
    w4, (codes, scales) = int4(128, 64, 32, half=half), matrix8(24, 64)
    for operand in (pack_int4(*w4.canonical, dtype), pack_int8(codes, scales, dtype)):
        assert operand.nbytes == sum(t.nbytes for t in held(operand))
        assert operand.nbytes == sum(t.untyped_storage().nbytes() for t in held(operand))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operand_has_memory_of_its_own(dtype: torch.dtype, way: str) -> None:
    """Codes come as views of mapped files; an operand must not keep the file, nor a larger tensor, alive."""
    w4, (codes, scales) = int4(64, 64, 32), matrix8(64, 64)
    sources = (w4.codes_NB, codes)
    for operand in (
        pack_int4(w4.codes_NB[32:], w4.scales_NG[32:], w4.zeros_NG[32:], dtype),
        pack_int8(codes[32:], scales[32:], dtype),
    ):
        for tensor in held(operand):
            assert all(tensor.untyped_storage().data_ptr() != s.untyped_storage().data_ptr() for s in sources)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_come_back(dtype: torch.dtype, way: str) -> None:
    w4, (codes, scales) = int4(40, 64, 32, fractional=True), matrix8(40, 64)
    operand4, operand8 = pack_int4(*w4.canonical, dtype), pack_int8(codes, scales, dtype)
    ids = torch.tensor([39, 0, 7, 7])
    assert torch.equal(unpack_rows(operand8, ids, dtype), (codes[ids].float() * scales[ids, None]).to(dtype))
    assert unpackable(operand8)
    assert unpackable(operand4) == (operand4.path != "torch")
    if unpackable(operand4):
        got, wanted = unpack_rows(operand4, ids, dtype), w4.weight_NK[ids]
        assert got.dtype == dtype
        assert bool(((got - wanted).abs() <= 1.01 * ROUNDOFF[dtype] * wanted.abs() + 1e-5).all())


def test_everything_public_is_here() -> None:
    assert all(hasattr(ops, name) for name in ops.__all__)
