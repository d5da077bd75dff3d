"""Rounding to int4 and int8: what must hold for any matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.quantization.rounding import Grid, limits, rounded, to_int4, to_int8
from tests.checkpoints import deq, rtn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def matrix(n: int, k: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * size


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 9),
    groups=st.integers(1, 4),
    width=st.sampled_from([2, 32, 64]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 3.0, -3.0]),
    seed=st.integers(0, 100),
)
def test_a_weight_moves_by_half_a_level_at_most(
    n: int, groups: int, width: int, symmetric: bool, dtype: torch.dtype, size: float, shift: float, seed: int
) -> None:
    """Where the scale is rounded to a short dtype, the ends of the range may move by a little more."""
    w = (matrix(n, groups * width, seed) + shift) * size
    int4 = to_int4(w, Grid(width, symmetric, dtype))
    steps = int4.scales_NG.float().repeat_interleave(width, 1)
    slack = 1e-6 if dtype == torch.float32 else 15 * torch.finfo(dtype).eps
    assert bool(((int4.dequantize() - w).abs() <= steps * (0.5 + slack)).all())
    assert torch.equal(int4.scales_NG.float(), int4.scales_NG.to(dtype).float()), "the file holds these very scales"
    assert torch.isfinite(int4.scales_NG).all()
    if symmetric:
        assert bool((int4.zeros_NG == 8).all())


@pytest.mark.parametrize("symmetric", [False, True])
def test_zeros_and_constants_come_back(symmetric: bool) -> None:
    """B28. Groups of zeros, of one value, and single zeros among other weights."""
    w = matrix(4, 96)
    w[0] = 0
    w[1, :32] = 0
    w[2] = 0.5
    w[3, ::3] = 0
    back = to_int4(w, Grid(32, symmetric, torch.float16)).dequantize()
    assert bool((back[w == 0] == 0).all())
    assert torch.allclose(back[2], w[2], rtol=1e-3)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [-1, 32])
def test_it_is_what_the_fixtures_round_to(group: int, symmetric: bool) -> None:
    w = matrix(16, 128)
    if symmetric:  # the fixtures use the levels -7 … 7 alone, which is the same where the largest is positive
        w = w.view(16, -1, 128 if group == -1 else group)
        w = (w * w.gather(-1, w.abs().argmax(-1, keepdim=True)).sign()).view(16, 128)
    int4 = to_int4(w, Grid(group, symmetric, torch.float16))
    codes, scales, zeros = rtn(w, 128 if group == -1 else group, symmetric)
    assert torch.equal(int4.zeros_NG.int(), zeros)
    assert (int4.scales_NG.float() - scales).abs().max() <= 1e-3 * scales.max()
    assert (int4.codes_NK().int() - codes).abs().max() <= 1
    wanted = deq(codes, scales, zeros, 128 if group == -1 else group)
    assert (int4.dequantize() - wanted).norm() <= 0.02 * wanted.norm()


def test_fake_rounding_is_real_rounding() -> None:
    """What the search measures is what is stored, to the bit."""
    for dtype in DTYPES:
        for symmetric in (False, True):
            grid, w = Grid(32, symmetric, dtype), matrix(8, 128)
            w_NGg = grid.split(w)
            assert torch.equal(rounded(w_NGg, *limits(w_NGg), grid).view(8, 128), to_int4(w, grid).dequantize())


def test_bounds_clip() -> None:
    w = matrix(4, 64)
    grid = Grid(32, False, torch.float32)
    low, high = limits(grid.split(w))
    back = grid.split(to_int4(w, grid, (low / 2, high / 2)).dequantize())
    step = (high - low) / 2 / 15
    assert bool((back.amax(-1) <= high / 2 + step).all())
    assert bool((back.amin(-1) >= low / 2 - step).all())


def test_numbers_that_are_none_are_refused() -> None:
    w = matrix(2, 32)
    w[0, 3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        to_int4(w, Grid(32, False, torch.float16))
    with pytest.raises(ValueError, match="not finite"):
        to_int8(w, torch.float16)
    with pytest.raises(ValueError, match=r"beyond torch.float16; its largest weight is 4e\+06"):
        to_int4(torch.full((1, 32), 4e6), Grid(32, False, torch.float16))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 20), k=st.integers(1, 50), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 50))
def test_int8(n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    w = matrix(n, k, seed)
    w[0] = 0
    int8 = to_int8(w, dtype)
    assert torch.equal(int8.scales_N, int8.scales_N.to(dtype).float())
    slack = 127 * torch.finfo(dtype).eps
    assert bool(((int8.dequantize() - w).abs() <= int8.scales_N[:, None] * (0.5 + slack)).all())
    assert bool((int8.dequantize()[0] == 0).all())
