"""Every on-disk integer layout against the integers it was packed from.

The packers are written from the layouts' descriptions (tests.checkpoints, builders); compressed-tensors' own
compressor is a second oracle for its layout.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.checkpoints import int4
from flexdecode.quantization.weights import Int4Weight
from tests.checkpoints import pack_awq_gemm, pack_awq_gemv, pack_ct
from tests.test_checkpoints.builders import integers, pack_gemv_fast, plain

SHAPES = [(8, 128), (24, 256), (40, 128), (136, 384), (128, 128), (16, 1024)]
GROUPS = [32, 64, 128, -1]


def decode(layout: str, codes: Tensor, scales: Tensor, zeros: Tensor) -> Int4Weight:
    groups, symmetric = scales.shape[1], bool((zeros == 8).all())
    if layout == "pack-quantized":
        t = pack_ct(codes, scales, zeros, symmetric)
        shape = tuple(t["weight_shape"].tolist())
        return int4.decode_pack_quantized(t["weight_packed"], t["weight_scale"], t.get("weight_zero_point"), shape)
    if layout == "gemm":
        t = pack_awq_gemm(codes, scales, zeros)
        return int4.decode_awq_gemm(t["qweight"], t["qzeros"], t["scales"])
    t = pack_awq_gemv(codes, scales, zeros) if layout == "gemv" else pack_gemv_fast(codes, scales, zeros)
    read = int4.decode_awq_gemv if layout == "gemv" else int4.decode_awq_gemv_fast
    return read(t["qweight"], t["qzeros"], t["scales"], groups)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["gemm", "gemv", "pack-quantized"])
def test_integers_come_back(layout: str, shape: tuple[int, int], group: int, symmetric: bool) -> None:
    codes, scales, zeros = integers(*shape, group, symmetric=symmetric)
    weight = decode(layout, codes, scales, zeros)
    assert weight.scales_NG.dtype == torch.float16
    assert weight.zeros_NG.dtype == torch.uint8
    assert torch.equal(weight.codes_NK().int(), codes)
    assert torch.equal(weight.scales_NG.float(), scales)
    assert torch.equal(weight.zeros_NG.int(), zeros)
    assert torch.equal(weight.dequantize(), plain(codes, scales, zeros))
    assert all(t.is_contiguous() for t in (weight.codes_NB, weight.scales_NG, weight.zeros_NG))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gemv_fast_keeps_its_fractional_zeros(shape: tuple[int, int], group: int) -> None:
    """The file holds fp16(-scale·zero), no whole number of scales: w = code·scale + scaled_zero all the same."""
    codes, scales, zeros = integers(*shape, group)
    weight = decode("gemv_fast", codes, scales, zeros)
    width = shape[1] // scales.shape[1]
    offsets = (-(scales * zeros)).half().float()
    assert torch.equal(weight.codes_NK().int(), codes)
    expected = codes * scales.repeat_interleave(width, 1) + offsets.repeat_interleave(width, 1)
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("zero", [0, 15])
@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast", "pack-quantized"])
def test_extreme_zero_points(layout: str, zero: int) -> None:  # B18
    """A reader that goes through GPTQ's zero - 1 turns every zero point of 0 into 15."""
    codes, scales, zeros = integers(24, 256, 32)
    zeros = torch.full_like(zeros, zero)
    weight = decode(layout, codes, scales, zeros)
    torch.testing.assert_close(weight.dequantize(), plain(codes, scales, zeros), rtol=1e-3, atol=2e-4)
    if layout != "gemv_fast":
        assert torch.equal(weight.zeros_NG.int(), zeros)


@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast", "pack-quantized"])
@settings(deadline=None)
@given(data=st.data())
def test_round_trip(layout: str, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([32, 64, 128, 192, 256, -1]))
    n, k = 8 * data.draw(st.integers(1, 9)), (64 if group == -1 else max(group, 64)) * data.draw(st.integers(1, 4))
    codes, scales, zeros = integers(n, k, group, seed=data.draw(st.integers(0, 99)))
    weight = decode(layout, codes, scales, zeros)
    assert torch.equal(weight.codes_NK().int(), codes)
    assert torch.equal(weight.scales_NG.float(), scales)


@pytest.mark.parametrize("layout", ["gemm", "gemv_fast"])
def test_slabs_join(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of one word and slabs that do not divide the matrix give what one slab gives."""
    codes, scales, zeros = integers(88, 256, 64)
    whole = decode(layout, codes, scales, zeros)
    for size in (1, 5000, 9000):
        monkeypatch.setattr(int4, "_SLAB_BYTES", size)
        assert torch.equal(decode(layout, codes, scales, zeros).codes_NB, whole.codes_NB)


def test_aligned_layouts_are_views() -> None:
    """gemv and pack-quantized have the canonical bytes already; copying them would double the time of a load."""
    codes, scales, zeros = integers(16, 128, 32)
    t = pack_ct(codes, scales, zeros, False)
    packed = t["weight_packed"]
    weight = int4.decode_pack_quantized(packed, t["weight_scale"], t["weight_zero_point"], (16, 128))
    assert weight.codes_NB.data_ptr() == packed.data_ptr()
    qweight = pack_awq_gemv(codes, scales, zeros)["qweight"]
    assert int4.decode_awq_gemv(qweight, torch.zeros(16, 4).int(), scales, 4).codes_NB.data_ptr() == qweight.data_ptr()


@pytest.mark.parametrize(("dtype", "held"), [(torch.float16, torch.float16), (torch.bfloat16, torch.float32),
                                             (torch.float32, torch.float32)])  # fmt: skip
@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast", "pack-quantized"])
def test_scales_keep_their_precision(layout: str, dtype: torch.dtype, held: torch.dtype) -> None:
    codes, scales, zeros = integers(16, 256, 64)
    packers: dict[str, Callable[..., dict[str, Tensor]]] = {
        "gemm": pack_awq_gemm, "gemv": pack_awq_gemv, "gemv_fast": pack_gemv_fast,
    }  # fmt: skip
    if layout == "pack-quantized":
        t = pack_ct(codes, scales, zeros, False)
        stored = t["weight_scale"].to(dtype)
        weight = int4.decode_pack_quantized(t["weight_packed"], stored, t["weight_zero_point"], (16, 256))
    else:
        t = packers[layout](codes, scales, zeros)
        stored = t["scales"].to(dtype)
        args = (t["qweight"], t["qzeros"].to(dtype) if layout == "gemv_fast" else t["qzeros"], stored)
        if layout == "gemm":
            weight = int4.decode_awq_gemm(*args)
        else:
            weight = (int4.decode_awq_gemv if layout == "gemv" else int4.decode_awq_gemv_fast)(*args, 4)
        stored = stored[:, :4] if layout == "gemv" else stored[:4].t()
    assert weight.scales_NG.dtype == held
    assert torch.equal(weight.scales_NG.float(), stored.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_constant_groups(dtype: torch.dtype) -> None:
    """A group of scale 0 is worth its offset, whatever its codes; -offset/scale would be infinite or NaN."""
    codes, _, _ = integers(4, 128, 32)
    scales = torch.tensor([[0.5, 0.0, 0.25, 0.0]]).expand(4, 4).to(dtype)
    offsets = torch.tensor([[-1.0, 3.25, 0.0, 0.0]]).expand(4, 4).to(dtype)
    weight = int4.from_offsets(Int4Weight.from_codes(codes, scales, scales).codes_NB, scales, offsets)
    expected = codes * scales.float().repeat_interleave(32, 1) + offsets.float().repeat_interleave(32, 1)
    assert torch.equal(weight.dequantize(), expected)
    assert torch.isfinite(weight.zeros_NG).all()


@pytest.mark.parametrize(("n", "k"), [(8, 128), (12, 64), (20, 200), (5, 36), (1, 8), (7, 2)])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_compressed_tensors_own_packer(n: int, k: int, asymmetric: bool) -> None:
    """Rows that fill no word of zero points and columns that fill no word of codes are padded."""
    generator = torch.Generator().manual_seed(n)
    signed = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
    zeros = torch.randint(-8, 8, (n, 1), generator=generator, dtype=torch.int8)
    scales = torch.rand(n, 1, generator=generator).half()
    packed = pack_to_int32(signed, 4)
    packed_zeros = pack_to_int32(zeros, 4, packed_dim=0).contiguous() if asymmetric else None
    weight = int4.decode_pack_quantized(packed, scales, packed_zeros, (n, k))
    expected = (signed.float() - (zeros if asymmetric else 0)) * scales.float()
    assert torch.equal(weight.dequantize(), expected)
    if asymmetric:  # and as files had them before they were packed
        assert torch.equal(int4.decode_pack_quantized(packed, scales, zeros, (n, k)).dequantize(), expected)


@pytest.mark.parametrize("shape", [(6, 1), (6,), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_scales(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 112, dtype=torch.int8).view(6, 40)
    scales = (torch.rand(shape) + 0.1).to(dtype)
    weight = int4.decode_int_quantized(codes, scales)
    assert weight.scales_N.shape == (6,)
    assert weight.scales_N.dtype == torch.float32
    assert torch.equal(weight.dequantize(), codes.float() * scales.float().reshape(-1, 1))


def test_one_scale_for_a_packed_matrix() -> None:
    codes, _, _ = integers(16, 64, -1)
    packed = pack_ct(codes, torch.ones(16, 1), torch.full((16, 1), 8), True)["weight_packed"]
    weight = int4.decode_pack_quantized(packed, torch.tensor([0.5]), None, (16, 64))
    assert torch.equal(weight.dequantize(), (codes - 8) * 0.5)
