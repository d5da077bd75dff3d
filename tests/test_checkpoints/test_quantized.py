"""QuantizedSource over whole checkpoints: what is read as quantized, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexdecode.checkpoints.quantized import quantization_method, with_quantization
from flexdecode.checkpoints.safetensors import SafetensorsSource
from flexdecode.checkpoints.source import Source
from flexdecode.quantization.weights import Int4Weight
from tests.checkpoints import pack_awq_gemm, quantize_ckpt, tiny
from tests.test_checkpoints.builders import integers, plain, write_model

Ints = Callable[[str, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny(directory, num_hidden_layers=2, tokenizer=False)
    return directory


def both(llama: Path, tmp_path: Path, fmt: str, **kwargs: Any) -> tuple[Source, dict[str, Tensor]]:
    """A quantized copy, opened, and the dequantized twin."""
    quantize_ckpt(str(llama), str(tmp_path / "q"), str(tmp_path / "twin"), fmt, **kwargs)
    return with_quantization(SafetensorsSource(tmp_path / "q")), load_file(tmp_path / "twin" / "model.safetensors")


def assert_same(source: Source, twin: dict[str, Tensor]) -> None:
    assert set(source.names()) == set(twin)
    for name, expected in twin.items():
        weight = source.read(name)
        assert weight.nbytes == source.nbytes(name)
        got = weight.dequantize() if isinstance(weight, Int4Weight) else weight
        assert tuple(got.shape) == source.shape(name)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("fmt", ["gemm", "gemv", "ct"])
def test_twins(llama: Path, tmp_path: Path, fmt: str, group: int, sym: bool) -> None:  # B19, B22–B24
    source, twin = both(llama, tmp_path, fmt, group=group, sym=sym)
    assert_same(source, twin)
    packed = {name for name in source.names() if isinstance(source.read(name), Int4Weight)}
    assert packed == {name for name in twin if name.endswith("_proj.weight")}


@pytest.mark.parametrize("zero", [0, 15, None])
@pytest.mark.parametrize("fmt", ["gemm", "gemv", "ct"])
def test_zero_points(llama: Path, tmp_path: Path, fmt: str, zero: int | None) -> None:  # B18
    def ints(name: str, q: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, s, torch.randint_like(z, 0, 16) if zero is None else torch.full_like(z, zero)

    assert_same(*both(llama, tmp_path, fmt, ints=ints))


@pytest.mark.parametrize("skip", [("k_proj",), ("layers.1.",), ("model.layers.0.mlp.down_proj",)])
@pytest.mark.parametrize("fmt", ["gemm", "gemv", "ct"])
def test_skipped_layers(llama: Path, tmp_path: Path, fmt: str, skip: tuple[str, ...]) -> None:  # B20
    source, twin = both(llama, tmp_path, fmt, skip=("lm_head", *skip))
    assert_same(source, twin)
    assert all(not isinstance(source.read(name), Int4Weight) for name in twin if skip[0] in name)


def test_skipping_layer_1_does_not_skip_layer_10(tmp_path: Path) -> None:  # B21
    """modules_to_not_convert was matched as a substring, so that `model.layers.1` also meant layers 10 to 19."""
    tensors: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for i in range(12):
        name = f"model.layers.{i}.mlp.up_proj"
        codes, scales, zeros = integers(16, 64, 32, seed=i)
        expected[f"{name}.weight"] = plain(codes, scales, zeros)
        if i == 1:
            tensors[f"{name}.weight"] = expected[f"{name}.weight"]
        else:
            tensors |= {f"{name}.{part}": t for part, t in pack_awq_gemm(codes, scales, zeros).items()}
    quant = {"quant_method": "awq", "group_size": 32, "modules_to_not_convert": ["model.layers.1"]}
    assert_same(
        with_quantization(SafetensorsSource(write_model(tmp_path, tensors, quantization_config=quant))), expected
    )


def packed_model(directory: Path, **config: Any) -> Path:
    tensors = pack_awq_gemm(*integers(16, 64, 32))
    return write_model(directory, {f"a.{part}": t for part, t in tensors.items()}, **config)


@pytest.mark.parametrize("name", ["quant_config.json", "quantize_config.json"])
def test_older_config_beside_the_weights(tmp_path: Path, name: str) -> None:
    model = packed_model(tmp_path / "m")
    (model / name).write_text(json.dumps({"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}))
    weight = with_quantization(SafetensorsSource(model)).read("a.weight")
    assert isinstance(weight, Int4Weight)
    assert weight.group_size == 32


def test_older_config_of_another_method(tmp_path: Path) -> None:
    model = packed_model(tmp_path / "m")
    (model / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    with pytest.raises(ValueError, match=r"quantization method 'gptq' is not supported"):
        with_quantization(SafetensorsSource(model))


def test_packed_without_any_config(tmp_path: Path) -> None:
    model = packed_model(tmp_path / "m")
    with pytest.raises(ValueError, match=r"model\.safetensors: a\.qweight is packed, but config\.json has no"):
        with_quantization(SafetensorsSource(model))


def test_stale_older_config_of_a_float_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a.weight": torch.ones(2, 2)})
    (model / "quant_config.json").write_text('{"w_bit": 4}')
    assert list(with_quantization(SafetensorsSource(model)).names()) == ["a.weight"]


def test_config_without_packed_tensors(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"a.weight": torch.ones(2, 2)}, quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match=r"says awq, but no tensor is packed; .*remove quantization_config"):
        with_quantization(SafetensorsSource(model))


@pytest.mark.parametrize(
    "method", ["gptq", "bitsandbytes", "fp8", "fbgemm_fp8", "hqq", "torchao", "GPTQ", "unheard-of"]
)
def test_methods_refused_by_name(tmp_path: Path, method: str) -> None:
    model = packed_model(tmp_path / "m", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ValueError, match=rf"method '{method.lower()}' is not supported, only awq and .*use a bf16"):
        with_quantization(SafetensorsSource(model))


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "AWQ"}, "awq"),
        ({"config_groups": {}}, "compressed-tensors"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"zero_point": True}, "awq"),
        ({"anything": 1}, "unknown"),
    ],
)
def test_method(config: dict[str, Any], method: str) -> None:
    assert quantization_method(config) == method


def test_quantization_config_that_is_no_object(tmp_path: Path) -> None:
    model = packed_model(tmp_path / "m", quantization_config=["awq"])
    with pytest.raises(ValueError, match=r"config\.json: quantization_config is not an object"):
        with_quantization(SafetensorsSource(model))


def test_mxfp4_passes_through(tmp_path: Path) -> None:
    """gpt-oss's experts are put in order by the family: here they are bytes."""
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{experts}_blocks": torch.zeros(2, 8, 1, 16, dtype=torch.uint8),
        f"{experts}_scales": torch.zeros(2, 8, 1, dtype=torch.uint8),
    }
    model = write_model(tmp_path / "m", tensors, quantization_config={"quant_method": "mxfp4"})
    source = with_quantization(SafetensorsSource(model))
    assert isinstance(source, SafetensorsSource)
    assert set(source.names()) == set(tensors)


def test_parts_in_different_shards(tmp_path: Path) -> None:
    model = packed_model(tmp_path / "m", quantization_config={"quant_method": "awq", "group_size": 32})
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"s{i}.safetensors"
        save_file({name: tensor}, model / weight_map[name])
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weight = with_quantization(SafetensorsSource(model)).read("a.weight")
    assert torch.equal(weight.dequantize(), plain(*integers(16, 64, 32)))
