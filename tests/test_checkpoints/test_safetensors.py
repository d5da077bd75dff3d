"""SafetensorsSource against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexdecode.checkpoints.safetensors import SafetensorsSource
from tests.test_checkpoints.builders import write_model, write_shards

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {}
    for dtype in DTYPES:
        for shape in [(), (0,), (3,), (5, 7), (2, 0, 4), (2, 3, 5)]:
            tensors[f"{dtype}.{shape}"] = torch.randint(0, 2, shape).to(dtype)
    source = SafetensorsSource(write_model(tmp_path / "m", tensors))
    expected = load_file(tmp_path / "m" / "model.safetensors")
    assert set(source.names()) == set(expected)
    for name, value in expected.items():
        got = source.read(name)
        assert got.dtype == value.dtype == source.dtype(name)
        assert tuple(got.shape) == source.shape(name) == tuple(value.shape)
        assert got.nbytes == source.nbytes(name)
        assert source.file(name) == tmp_path / "m" / "model.safetensors"
        assert torch.equal(got.view(torch.uint8) if got.dim() else got, value.view(torch.uint8) if got.dim() else value)


def test_shards_read_as_one(tmp_path: Path) -> None:
    parts = [{f"t{i}.{j}": torch.randn(4, 3) for j in range(3)} for i in range(3)]
    source = SafetensorsSource(write_shards(tmp_path / "m", *parts))
    for name, value in {k: v for part in parts for k, v in part.items()}.items():
        assert torch.equal(source.read(name), value)


def test_unaligned_tensors(tmp_path: Path) -> None:
    """The format's own writer sorts by element size; another need not, and a float may then lie at an odd offset."""
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        }
    ).encode()
    values = torch.tensor([1.5, -2.0])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"abc" + values.numpy().tobytes()
    )
    source = SafetensorsSource(tmp_path)
    assert torch.equal(source.read("b"), values)
    assert source.read("a").tolist() == list(b"abc")


def test_configs(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a": torch.ones(1)}, hidden_size=64)
    assert SafetensorsSource(model).config == {"model_type": "llama", "hidden_size": 64}
    assert SafetensorsSource(model).generation_config == {}
    (model / "generation_config.json").write_text('{"top_k": 5}')
    assert SafetensorsSource(model).generation_config == {"top_k": 5}
    assert SafetensorsSource(model).path == model
    assert SafetensorsSource(model).format == "hf"


def test_one_file_of_another_name(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a": torch.ones(1)})
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert list(SafetensorsSource(model).names()) == ["a"]


def test_an_absent_tensor_names_the_model(tmp_path: Path) -> None:
    source = SafetensorsSource(write_model(tmp_path / "m", {"a": torch.ones(1)}))
    for call in (source.read, source.shape, source.nbytes, source.dtype, source.file):
        with pytest.raises(ValueError, match=r"m: holds no tensor b$"):
            call("b")


def test_config_is_missing_or_broken(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a": torch.ones(1)})
    (model / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON .*download it again"):
        SafetensorsSource(model)
    (model / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json: missing; download it"):
        SafetensorsSource(model)
    (model / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"config\.json: missing; give the GGUF file itself: .*x\.gguf"):
        SafetensorsSource(model)
    with pytest.raises(ValueError, match="is not a directory"):
        SafetensorsSource(model / "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pth", "c.pt"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(ValueError, match=rf"pickled weights only \({name}\).*convert them to safetensors"):
        SafetensorsSource(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(SafetensorsSource(tmp_path).names()) == ["a"]  # a pickle beside it is not looked at


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no weights: neither model\.safetensors nor"):
        SafetensorsSource(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="give the GGUF file itself"):
        SafetensorsSource(tmp_path)
