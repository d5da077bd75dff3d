"""torch's int4 product and its learnt layout against fp64, and the same again under the layouts of other machines."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.kernels import int4_torch
from flexdecode.kernels.int4_torch import (
    GROUPS,
    Layout,
    cpu_layout,
    dequantize_rows,
    linear,
    pack,
    packable,
)
from tests.grids import by_name, pairwise
from tests.kernels.integers import ROUNDOFF, Int4, activations, exact, int4

CPU = torch.device("cpu")
SHAPES = pairwise(
    n=(8, 16, 24, 40, 48, 72, 136, 200),
    group=(32, 64, 128, 256, "channel"),
    m=(1, 3, 17, 64, 128, 129, 200),
    fractional=(False, True),
    half=(False, True),
)


def limit(x_MK: Tensor, w: Int4) -> Tensor:
    """What the op's types allow. Scale s and offset z = (8 - zero) s are rounded to bf16, roundoff u = 2 ** -8:

    |x| @ ((|code - 8| + |8 - zero|) |s|).T * u      for the two roundings,
    |x| @ |w|.T * (u + K e)                          for the weight itself (many rows), and sums in fp32,
    |y| u                                            for the result.
    """
    u, e = ROUNDOFF[torch.bfloat16], ROUNDOFF[torch.float32]
    scales, zeros = w.per_column(w.scales_NG).abs(), w.per_column(w.zeros_NG)
    rounded = ((w.codes_NK.double() - 8).abs() + (8 - zeros).abs()) * scales
    terms = exact(x_MK.abs(), rounded) * u + exact(x_MK.abs(), w.weight_NK.abs()) * (u + x_MK.shape[1] * e)
    return 1.02 * (terms + exact(x_MK, w.weight_NK).abs() * u)


def rounded(w: Int4) -> Tensor:
    """The matrix that the op holds, exactly: (code - 8) bf16(s) + bf16((8 - zero) s), fp64 [N, K]."""
    scales = w.scales_NG.float()
    offsets = (8.0 - w.zeros_NG.float()) * scales
    return (w.codes_NK.double() - 8) * w.per_column(scales.bfloat16()) + w.per_column(offsets.bfloat16())


@pytest.mark.parametrize("case", SHAPES, ids=by_name)
def test_product(case: dict[str, Any]) -> None:
    group = 160 if case["group"] == "channel" else case["group"]
    k = group if case["group"] == "channel" else 2 * group
    w = int4(case["n"], k, group, fractional=case["fractional"], half=case["half"])
    assert packable(case["n"], k, group, torch.bfloat16, CPU)
    x = activations(case["m"], k, torch.bfloat16)
    got = linear(x, pack(*w.canonical))
    assert got.dtype == torch.bfloat16
    assert got.shape == (case["m"], case["n"])
    assert bool(((got.double() - exact(x, w.weight_NK)).abs() <= limit(x, w)).all())
    # Against the matrix as rounded there is little left: its own rounding for many rows, the sums, the result.
    y = exact(x, rounded(w))
    left = exact(x.abs(), rounded(w).abs()) * (2.0**-8 * (case["m"] > 128) + 2 * k * 2.0**-24) + y.abs() * 2.0**-8
    assert bool(((got.double() - y).abs() <= 1.02 * left).all())


@pytest.mark.parametrize("m", [1, 64, 200])
@pytest.mark.parametrize("n", [2048, 2040])
def test_a_large_matrix_goes_through_several_slabs(n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_torch, "_SLAB", 40_000)
    w, x = int4(n, 128, 64, fractional=True), activations(m, 128, torch.bfloat16)
    got = linear(x, pack(*w.canonical))
    assert bool(((got.double() - exact(x, w.weight_NK)).abs() <= limit(x, w)).all())


@pytest.mark.parametrize("n", [8, 40, 64, 136, 200])
@pytest.mark.parametrize("group", [32, 128, 96])
def test_dequantizing_undoes_packing(n: int, group: int) -> None:
    """Every code of every row and column comes back to its place: whole blocks at a time, rows in the known order."""
    w = int4(n, 2 * group, group, fractional=True)
    packed, layout = pack(*w.canonical), cpu_layout()
    assert layout is not None
    filled = packed.data.shape[0]
    assert filled % layout.rows == 0
    assert filled - n < layout.rows
    for start in range(0, filled, layout.rows):
        for stop in range(start + layout.rows, filled + 1, layout.rows):
            got = dequantize_rows(packed, start, stop)
            assert got.dtype == torch.bfloat16
            order = torch.tensor(int4_torch._columns(layout)).argsort()
            got_NK = got.view(2 * group, -1, layout.rows)[..., order].reshape(2 * group, -1).T
            rows = rounded(w)[start:stop]
            assert torch.equal(got_NK[: len(rows)], rows.float().bfloat16())
            assert torch.equal(got_NK[len(rows) :], torch.zeros_like(got_NK[len(rows) :]))


def test_slabs_pack_as_the_whole_does(monkeypatch: pytest.MonkeyPatch) -> None:
    w = int4(200, 128, 64)
    whole = pack(*w.canonical)
    monkeypatch.setattr(int4_torch, "_SLAB", 1)
    parts = pack(*w.canonical)
    assert torch.equal(whole.data, parts.data)
    assert torch.equal(whole.scale_zero_GN2, parts.scale_zero_GN2)


def test_packed_memory_is_half_a_byte_a_weight() -> None:
    w = int4(256, 512, 128)
    packed = pack(*w.canonical)
    assert packed.data.nbytes == 256 * 512 // 2
    assert packed.nbytes == 256 * 512 // 2 + 256 * 4 * 2 * 2


@pytest.mark.parametrize(
    ("k", "group", "dtype", "can"),
    [
        *((2 * g, g, torch.bfloat16, True) for g in GROUPS),
        (512, 512, torch.bfloat16, True),  # one scale a row, read as two groups of 256
        (160, 160, torch.bfloat16, True),
        (96, 96, torch.bfloat16, True),
        (96, 32, torch.bfloat16, True),
        (48, 48, torch.bfloat16, False),
        (64, 16, torch.bfloat16, False),
        (100, 100, torch.bfloat16, False),
        (128, 64, torch.float32, False),
        (128, 64, torch.float16, False),
    ],
)
def test_what_can_be_packed(k: int, group: int, dtype: torch.dtype, can: bool) -> None:
    assert packable(40, k, group, dtype, CPU) == can


@pytest.mark.parametrize("m", [1, 3, 64, 200])
def test_activations_need_not_lie_in_one_run(m: int) -> None:
    """A slice of a wider product, or a transposed matrix: torch's op itself refuses those."""
    w = int4(40, 128, 64)
    packed = pack(*w.canonical)
    wide = activations(m, 256, torch.bfloat16)
    wanted = linear(wide[:, :128].contiguous(), packed)
    assert torch.equal(linear(wide[:, :128], packed), wanted)
    assert torch.equal(linear(wide[:, :128].T.contiguous().T, packed), wanted)


def test_no_rows() -> None:
    w = int4(40, 128, 64)
    assert linear(torch.empty(0, 128, dtype=torch.bfloat16), pack(*w.canonical)).shape == (0, 40)


def test_zeros_far_outside_the_codes() -> None:
    """GGUF's Q4_1 with a large minimum and a small step has such zeros: -m / d is in the thousands."""
    w = int4(16, 64, 32, fractional=True)
    zeros = w.zeros_NG * 500
    far = Int4(
        w.codes_NB, w.scales_NG, zeros, w.codes_NK, (w.codes_NK - w.per_column(zeros)) * w.per_column(w.scales_NG)
    )
    for m in (1, 200):
        x = activations(m, 64, torch.bfloat16)
        got = linear(x, pack(*far.canonical))
        assert bool(((got.double() - exact(x, far.weight_NK)).abs() <= limit(x, far)).all())


def test_this_machines_layout_is_known() -> None:
    layout = cpu_layout()
    assert layout is not None
    assert sorted(layout.order) == list(range(layout.rows))


def test_an_unknown_layout_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packer that scatters as no layout of ours does: then torch's product is not used at all."""
    shuffle = torch.randperm(128 * 32 // 2, generator=torch.Generator().manual_seed(0))
    inner = torch.ops.aten._convert_weight_to_int4pack_for_cpu

    class Scattered:
        def _convert_weight_to_int4pack_for_cpu(self, codes: Tensor, inner_k: int) -> Tensor:
            packed: Tensor = inner(codes, inner_k)
            return packed.flatten()[shuffle].view_as(packed)

    class Ops:
        aten = Scattered()

    cpu_layout.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "ops", Ops())
        assert cpu_layout() is None
        assert not packable(64, 128, 64, torch.bfloat16, CPU)
    cpu_layout.cache_clear()
    assert isinstance(cpu_layout(), Layout)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the other layouts are x86-64's")
@pytest.mark.parametrize("capability", ["avx2", "default"])
@pytest.mark.parametrize("module", ["test_int4_torch.py", "test_ops.py"])
def test_the_same_under_another_instruction_set(capability: str, module: str) -> None:
    """torch packs differently for AVX-512, AVX2 and neither; a checkpoint must give the same on all of them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command.append(os.path.join(os.path.dirname(__file__), module))
    done = subprocess.run(
        command, env=os.environ | {"ATEN_CPU_CAPABILITY": capability}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
