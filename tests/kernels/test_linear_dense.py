"""Our products with matrices of floats, on every instruction set, and results with a bias and in another dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.kernels import ops
from tests.grids import by_name, pairwise
from tests.kernels.integers import ROUNDOFF, activations, exact, int4

CASES = pairwise(
    m=(1, 2, 3, 4, 5, 8, 9),
    n=(1, 3, 8, 33, 100, 1000),
    k=(1, 7, 31, 32, 33, 128, 200, 576, 2049),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    out=(None, torch.float32),
    bias=(False, True),
    threads=(1, 2, 3),
)


def matrix(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(n * 10000 + k)) / 8).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_dense(isa: str, case: dict[str, Any]) -> None:
    """Nothing is rounded but sums in fp32, and the result once."""
    n, k, dtype = case["n"], case["k"], case["dtype"]
    x, w = activations(case["m"], k, dtype), matrix(n, k, dtype)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1)) if case["bias"] else None
    before = torch.get_num_threads()
    torch.set_num_threads(case["threads"])
    try:
        got = ops.linear.linear_dense(x, w, bias, case["out"])
    finally:
        torch.set_num_threads(before)
    wanted = exact(x, w.double()) + (0 if bias is None else bias.double())
    assert got.dtype == (case["out"] or dtype)
    e, u = ROUNDOFF[torch.float32], ROUNDOFF[got.dtype]
    limit = 1.01 * ((k + 8) * e * (exact(x.abs(), w.double().abs()) + 1) + u * wanted.abs()) + 2.0**-25
    assert bool(((got.double() - wanted).abs() <= limit).all())


def test_a_matrix_need_not_be_in_one_piece(isa: str) -> None:
    """Rows that lie in a larger matrix; the columns beyond are not read into the sums."""
    wide = matrix(40, 200, torch.bfloat16)
    wide[:, 130:] = float("nan")
    x = activations(3, 130, torch.bfloat16)
    got = ops.linear.linear_dense(x, wide[:, :130])
    assert torch.equal(got, ops.linear.linear_dense(x, wide[:, :130].contiguous()))


def test_one_row_or_two_have_the_same_bits(isa: str) -> None:
    x, w = activations(2, 600, torch.bfloat16), matrix(70, 600, torch.bfloat16)
    both = ops.linear.linear_dense(x, w, out=torch.float32)
    assert torch.equal(both[:1], ops.linear.linear_dense(x[:1], w, out=torch.float32))


@pytest.mark.parametrize("m", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int4", "int8", "dense"])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_way_adds_a_bias_and_widens(
    compiled: bool, kind: str, dtype: torch.dtype, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many, by our kernels and without."""
    if not compiled:
        monkeypatch.setattr(ops.linear, "unsupported", lambda *_: "no C++ compiler was found")
    n, k = 40, 64
    x, bias = activations(m, k, dtype), torch.arange(n).float()
    if kind == "int4":
        w4 = int4(n, k, 32)
        weight, operand4 = w4.weight_NK, ops.pack_int4(*w4.canonical, dtype)
        got = ops.linear_int4(x, operand4, bias, torch.float32)
        plain = ops.linear_int4(x, operand4)
    elif kind == "int8":
        codes, scales = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.full((n,), 1e-3)
        weight, operand8 = codes.double() * 1e-3, ops.pack_int8(codes, scales, dtype)
        got = ops.linear_int8(x, operand8, bias, torch.float32)
        plain = ops.linear_int8(x, operand8)
    else:
        w = matrix(n, k, dtype)
        weight = w.double()
        got, plain = ops.linear_dense(x, w, bias, torch.float32), ops.linear_dense(x, w)
    assert got.dtype == torch.float32
    assert plain.dtype == dtype
    wanted = exact(x, weight)
    size = 8 * ROUNDOFF[dtype] * (exact(x.abs(), weight.abs()) + 40)
    assert bool(((got.double() - wanted - bias.double()).abs() <= size).all())
    assert bool(((plain.double() - wanted).abs() <= size).all())
