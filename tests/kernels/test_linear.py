"""Our integer products, on every instruction set that this machine runs, against fp64 of the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.kernels import build, ops
from flexdecode.kernels.build import KernelsUnavailableError
from flexdecode.kernels.linear import linear_int4, linear_int8, pack_int4, pack_int8, unpack_rows, unsupported
from flexdecode.kernels.reference import dequantize_int4
from tests.grids import by_name, pairwise
from tests.kernels.integers import ROUNDOFF, Int4, activations, exact, int4, plain_limit

CPU = torch.device("cpu")
ISAS = ops.isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64, 300)
INT4 = pairwise(
    m=ROWS,
    n=(1, 8, 24, 64, 1000),
    group=(8, 32, 40, 64, 128, "channel"),
    groups=(1, 2, 3, 7),
    fractional=(False, True),
    half=(False, True),
    dtype=DTYPES,
    isa=ISAS,
    threads=(1, 2, 3),
)
INT8 = pairwise(
    m=ROWS, n=(1, 8, 24, 64, 1000), k=(1, 2, 7, 15, 64, 101, 576), dtype=DTYPES, isa=ISAS, threads=(1, 2, 3)
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The instruction set and the threads are those of the whole process."""
    isa, threads = ops.use_isa(), torch.get_num_threads()
    yield
    ops.use_isa(isa)
    torch.set_num_threads(threads)


def limit(x_MK: Tensor, span_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Nothing is rounded but sums in fp32 (e), of terms no larger than `span`, and the result (u): K e |x| @ span.T +
    u |y|. Many rows in bf16 may round the weights, or the sum before its scale, too."""
    u, e, k = ROUNDOFF[x_MK.dtype], ROUNDOFF[torch.float32], x_MK.shape[1]
    y = exact(x_MK, weight_NK).abs()
    least = 2.0**-25 if x_MK.dtype == torch.float16 else 1e-30  # below fp16's normal numbers steps are 2 ** -24
    exactly = 1.01 * ((k + 8) * e * exact(x_MK.abs(), span_NK) + u * y) + least
    if x_MK.dtype != torch.bfloat16 or x_MK.shape[0] <= 16:
        return exactly
    return exactly + plain_limit(x_MK, weight_NK) + u * y


def span(w: Int4) -> Tensor:
    """Codes are multiplied less 8, and the zero's distance from 8 apart from them."""
    return ((w.codes_NK.double() - 8).abs() + (8 - w.per_column(w.zeros_NG)).abs()) * w.per_column(w.scales_NG).abs()


def with_zeros(w: Int4, zeros_NG: Tensor) -> Int4:
    weight_NK = (w.codes_NK.double() - w.per_column(zeros_NG)) * w.per_column(w.scales_NG)
    return Int4(w.codes_NB, w.scales_NG, zeros_NG, w.codes_NK, weight_NK)


def matrix8(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes, with both ends of their range in the first row, and scales."""
    g = torch.Generator().manual_seed(n * 1000 + k)
    codes = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
    codes[0, 0], codes[0, -1] = 127, -128
    return codes, torch.rand(n, generator=g) / 50 + 1e-3


def assert_close(got: Tensor, x: Tensor, span_NK: Tensor, weight_NK: Tensor) -> None:
    assert got.dtype == x.dtype
    assert got.shape == (x.shape[0], weight_NK.shape[0])
    error = (got.double() - exact(x, weight_NK)).abs()
    assert bool((error <= limit(x, span_NK, weight_NK)).all())


@pytest.mark.parametrize("case", INT4, ids=by_name)
def test_int4(case: dict[str, Any]) -> None:
    channel = case["group"] == "channel"
    group, groups = (100, 1) if channel else (case["group"], case["groups"])
    w = int4(case["n"], group * groups, group, fractional=case["fractional"], half=case["half"])
    tiles = pack_int4(*w.canonical)
    ops.use_isa(case["isa"])
    torch.set_num_threads(case["threads"])
    x = activations(case["m"], group * groups, case["dtype"])
    got = linear_int4(x, tiles)
    assert_close(got, x, span(w), w.weight_NK)
    if case["m"] <= 16:  # more may be a product of torch's
        torch.set_num_threads(1)
        assert torch.equal(linear_int4(x, tiles), got)


@pytest.mark.parametrize("case", INT8, ids=by_name)
def test_int8(case: dict[str, Any]) -> None:
    codes, scales = matrix8(case["n"], case["k"])
    tiles = pack_int8(codes, scales)
    ops.use_isa(case["isa"])
    torch.set_num_threads(case["threads"])
    x = activations(case["m"], case["k"], case["dtype"])
    got, weight = linear_int8(x, tiles), codes.double() * scales.double()[:, None]
    assert_close(got, x, weight.abs(), weight)
    if case["m"] <= 16:
        torch.set_num_threads(1)
        assert torch.equal(linear_int8(x, tiles), got)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_in_every_column(isa: str, dtype: torch.dtype) -> None:
    """One column at a time lit, so that a code which came from a neighbour shows at once."""
    ops.use_isa(isa)
    w, (codes, scales) = int4(40, 48, 16), matrix8(40, 48)
    tiles4, tiles8 = pack_int4(*w.canonical), pack_int8(codes, torch.ones_like(scales))
    for m in (1, 8):
        for start in range(0, 48, m):
            x = torch.eye(48, dtype=dtype)[start : start + m]
            assert torch.equal(linear_int4(x, tiles4), w.weight_NK[:, start : start + m].T.float().to(dtype))
            assert torch.equal(linear_int8(x, tiles8), codes[:, start : start + m].T.to(dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize(
    ("zeros", "scale", "size"),
    [
        (8.0, 1.0, 1.0),  # no offsets at all
        (3000.25, 1.0, 1.0),  # GGUF's Q4_1 with a large minimum and a small step
        (-200.0, 1.0, 1.0),  # whole, but no int8
        (0.0, 1e-30, 1e4),
        (15.0, 1e-7, 1e-4),  # below fp16's normal numbers, and fp16 activations near theirs
        (7.5, 0.0, 1.0),
    ],
)
def test_numbers_far_out(isa: str, dtype: torch.dtype, m: int, zeros: float, scale: float, size: float) -> None:
    ops.use_isa(isa)
    plain = int4(40, 192, 32)
    scaled = Int4(plain.codes_NB, plain.scales_NG * scale, plain.zeros_NG, plain.codes_NK, plain.weight_NK)
    w = with_zeros(scaled, torch.full_like(plain.scales_NG, zeros))
    x = activations(m, 192, torch.float32).mul(size).to(dtype)
    error = (linear_int4(x, pack_int4(*w.canonical)).double() - exact(x, w.weight_NK)).abs()
    assert bool((error <= limit(x, span(w), w.weight_NK)).all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("m", [2, 5, 16])
def test_a_row_that_is_no_number_stays_alone(isa: str, m: int) -> None:
    ops.use_isa(isa)
    w, (codes, scales) = int4(24, 64, 32, fractional=True), matrix8(24, 64)
    for product, tiles in ((linear_int4, pack_int4(*w.canonical)), (linear_int8, pack_int8(codes, scales))):
        x = activations(m, 64, torch.bfloat16)
        wanted = product(x, tiles)  # type: ignore[operator]
        x[1, 5] = float("nan")
        got = product(x, tiles)  # type: ignore[operator]
        rest = torch.arange(m) != 1
        assert torch.equal(got[rest], wanted[rest])
        assert bool(got[1].isnan().all())


@pytest.mark.parametrize("m", [1, 5, 16, 17, 200])
def test_activations_need_not_lie_in_one_run(m: int) -> None:
    tiles4, tiles8 = pack_int4(*int4(24, 128, 64).canonical), pack_int8(*matrix8(24, 128))
    for dtype in DTYPES:
        wide = activations(m, 256, dtype)
        for view in (wide[:, 128:], wide[:, ::2], wide[:, :128].T.contiguous().T, wide[:1, :128].expand(m, -1)):
            assert torch.equal(linear_int4(view, tiles4), linear_int4(view.contiguous(), tiles4))
            assert torch.equal(linear_int8(view, tiles8), linear_int8(view.contiguous(), tiles8))


def test_no_rows() -> None:
    w, (codes, scales) = int4(24, 64, 32), matrix8(24, 64)
    for dtype in DTYPES:
        x = torch.empty(0, 64, dtype=dtype)
        assert linear_int4(x, pack_int4(*w.canonical)).shape == (0, 24)
        assert linear_int8(x, pack_int8(codes, scales)).shape == (0, 24)


def test_scales_and_offsets_take_the_least_that_holds_them() -> None:
    w = int4(64, 128, 32)
    odd = w.scales_NG + 1e-6  # no fp16 numbers
    assert pack_int4(w.codes_NB, w.scales_NG.half(), w.zeros_NG).scales.dtype == torch.float16
    assert pack_int4(w.codes_NB, w.scales_NG.half().float(), w.zeros_NG).scales.dtype == torch.float16
    assert pack_int4(w.codes_NB, odd, w.zeros_NG).scales.dtype == torch.float32
    assert pack_int4(w.codes_NB, odd * 1e9, w.zeros_NG).scales.dtype == torch.float32
    for zeros, dtype in ((8.0, None), (7.0, torch.int8), (7.5, torch.float32), (1000.0, torch.float32)):
        offsets = pack_int4(w.codes_NB, odd, torch.full_like(odd, zeros)).offsets
        assert (None if offsets is None else offsets.dtype) == dtype
    tiles = pack_int4(w.codes_NB, odd, torch.full_like(odd, 8))
    assert tiles.nbytes == 64 * 128 // 2 + 64 * 4 * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "half"), [(32, False), (64, True), (100, False)])
def test_rows_come_back(dtype: torch.dtype, group: int, half: bool) -> None:
    w, (codes, scales) = int4(72, 2 * group if group < 100 else 100, group, half=half), matrix8(72, 33)
    for ids in (torch.arange(72), torch.tensor([71, 0, 33, 33], dtype=torch.int32), torch.empty(0, dtype=torch.int64)):
        wanted = dequantize_int4(*w.canonical, dtype)[ids.long()]
        assert torch.equal(unpack_rows(pack_int4(*w.canonical), ids, dtype), wanted)
        wanted = (codes[ids.long()].float() * scales[ids.long(), None]).to(dtype)
        assert torch.equal(unpack_rows(pack_int8(codes, scales), ids, dtype), wanted)
    far = int4(40, 64, 32, fractional=True)
    got = unpack_rows(pack_int4(*far.canonical), torch.arange(40), torch.float32)
    assert bool(((got - far.weight_NK).abs() <= 3 * 2.0**-24 * span(far)).all())


def test_a_width_that_is_none_of_the_matrix() -> None:
    w, (codes, scales) = int4(8, 64, 32), matrix8(8, 64)
    for k in (32, 128):
        with pytest.raises(RuntimeError, match=f"width {k}.*width 64"):
            linear_int4(torch.ones(1, k), pack_int4(*w.canonical))
        with pytest.raises(RuntimeError, match=f"width {k}.*width 64"):
            linear_int8(torch.ones(1, k), pack_int8(codes, scales))


def test_what_the_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported(CPU, 128, 32) is None
    assert unsupported(CPU, 100, 100) is None
    assert "groups of 12" in str(unsupported(CPU, 48, 12))
    assert "cuda" in str(unsupported(torch.device("cuda"), 128, 32))


def test_a_failure_to_compile_is_met_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has hundreds of matrices, and each asks."""
    calls = []

    def none(folder: Path) -> Path:
        calls.append(1)
        raise KernelsUnavailableError("no C++ compiler was found")

    build._failure.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(build, "build", none)
        assert [unsupported(CPU, 128, 32) for _ in range(3)] == ["no C++ compiler was found"] * 3
    assert len(calls) == 1
    build._failure.cache_clear()
    assert unsupported(CPU, 128, 32) is None
