"""AWQ checkpoints: what is packed, in which layout, and whether config and file agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.checkpoints.awq import parse_awq
from flexdecode.checkpoints.quantized import QuantizedSource, with_quantization
from flexdecode.checkpoints.safetensors import SafetensorsSource
from flexdecode.config import QuantConfig
from flexdecode.quantization.weights import Int4Weight
from tests.checkpoints import pack_awq_gemm, pack_awq_gemv
from tests.test_checkpoints.builders import integers, pack_gemv_fast, plain, write_model

PACK = {"gemm": pack_awq_gemm, "gemv": pack_awq_gemv, "gemv_fast": pack_gemv_fast}
Q = "model.layers.0.self_attn.q_proj"


def checkpoint(
    directory: Path, layout: str = "gemm", n: int = 128, k: int = 128, group: int = 64, **config: Any
) -> tuple[Path, Tensor]:
    """A model of one packed matrix and a norm, and the matrix in fp32. Config None drops a key."""
    codes, scales, zeros = integers(n, k, group)
    tensors = {f"{Q}.{part}": t for part, t in PACK[layout](codes, scales, zeros).items()}
    tensors["model.norm.weight"] = torch.ones(4)
    quant = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": layout, **config}
    quant = {key: value for key, value in quant.items() if value is not None}
    return write_model(directory, tensors, quantization_config=quant), plain(codes, scales, zeros)


def read(directory: Path) -> Int4Weight:
    source = with_quantization(SafetensorsSource(directory))
    weight = source.read(f"{Q}.weight")
    assert isinstance(weight, Int4Weight)
    assert weight.shape == source.shape(f"{Q}.weight")
    assert weight.nbytes == source.nbytes(f"{Q}.weight")
    return weight


def refused(directory: Path) -> str:
    with pytest.raises(ValueError) as error:
        with_quantization(SafetensorsSource(directory))
    message = str(error.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("shape", [(128, 128), (128, 256), (256, 128), (8, 384), (40, 2048)])
@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast"])
def test_every_layout_and_group(tmp_path: Path, layout: str, shape: tuple[int, int], group: int) -> None:  # B19, B24
    """Square matrices have one qweight shape in gemm and gemv; group -1 is one group a row, of either axis' length."""
    model, expected = checkpoint(tmp_path / "m", layout, *shape, group)
    tolerance = {"rtol": 2e-3, "atol": 2e-4} if layout == "gemv_fast" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(read(model).dequantize(), expected, **tolerance)


@pytest.mark.parametrize("rows", [8, 16, 24, 40, 48, 72, 96, 136, 160, 200])
@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast"])
def test_rows_that_fill_no_tile(tmp_path: Path, layout: str, rows: int) -> None:  # B39
    model, expected = checkpoint(tmp_path / "m", layout, rows, 128, 32)
    torch.testing.assert_close(read(model).dequantize(), expected, rtol=2e-3, atol=2e-4)


def test_names(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path / "m")
    source = with_quantization(SafetensorsSource(model))
    assert isinstance(source, QuantizedSource)
    assert set(source.names()) == {f"{Q}.weight", "model.norm.weight"}
    assert source.quantization == (QuantConfig("awq", "gemm", 4, 64, True),)
    assert torch.equal(source.read("model.norm.weight"), torch.ones(4))
    assert source.shape("model.norm.weight") == (4,)
    assert source.nbytes("model.norm.weight") == 16
    for call in (source.read, source.shape, source.nbytes):
        with pytest.raises(ValueError, match=rf"holds no tensor {Q}\.qweight"):
            call(f"{Q}.qweight")


@pytest.mark.parametrize("version", ["gemm", "GEMM", "Gemm", None])
def test_spellings_of_gemm(tmp_path: Path, version: str | None) -> None:  # B19
    model, expected = checkpoint(tmp_path / "m", "gemm", version=version)
    assert torch.equal(read(model).dequantize(), expected)


@pytest.mark.parametrize("layout", ["gemv", "gemv_fast"])
@pytest.mark.parametrize("key", ["version", "format", "backend"])
def test_where_the_layout_is_named(tmp_path: Path, layout: str, key: str) -> None:
    model, expected = checkpoint(tmp_path / "m", layout, **{"version": None, key: layout.upper()})
    torch.testing.assert_close(read(model).dequantize(), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("backend", ["autoawq", "auto", "marlin", "torch_awq"])
def test_backends_that_only_choose_a_kernel(tmp_path: Path, backend: str) -> None:
    model, expected = checkpoint(tmp_path / "m", "gemm", version=None, backend=backend)
    assert torch.equal(read(model).dequantize(), expected)


@pytest.mark.parametrize("layout", ["gemv", "gemv_fast"])
@pytest.mark.parametrize("naming", [{"backend": "llm-awq"}, {"backend": "llm-awq", "version": "gemm"},
                                    {"version": "llm-awq"}])  # fmt: skip
def test_llm_awq_is_told_by_its_dtype(tmp_path: Path, layout: str, naming: dict[str, str]) -> None:
    """Newer llm-awq files have gemv_fast's int16 words and `scaled_zeros`, older ones gemv's int32 words."""
    codes, scales, zeros = integers(16, 128, 64)
    tensors = {f"{Q}.{part}": t for part, t in PACK[layout](codes, scales, zeros).items()}
    if layout == "gemv_fast":
        tensors[f"{Q}.scaled_zeros"] = tensors.pop(f"{Q}.qzeros")
    quant = {"quant_method": "awq", "bits": 4, "group_size": 64, **naming}
    model = write_model(tmp_path / "m", tensors, quantization_config=quant)
    torch.testing.assert_close(read(model).dequantize(), plain(codes, scales, zeros), rtol=2e-3, atol=2e-4)


def test_missing_keys_mean_autoawqs_defaults(tmp_path: Path) -> None:
    model, expected = checkpoint(
        tmp_path / "m", "gemm", 16, 256, 128, bits=None, group_size=None, zero_point=None, version=None
    )
    assert torch.equal(read(model).dequantize(), expected)
    assert parse_awq({}, torch.int32) == QuantConfig("awq", "gemm", 4, 128, True, ())


def test_older_keys() -> None:
    config = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMV", "modules_to_not_convert": ["a"]}
    assert parse_awq(config, torch.int32) == QuantConfig("awq", "gemv", 4, 64, True, ("a",))


@pytest.mark.parametrize("version", ["marlin", "exllama", "ipex", "gemm_v2", "Marlin"])
def test_unknown_versions(tmp_path: Path, version: str) -> None:  # B19
    model, _ = checkpoint(tmp_path / "m", version=version)
    assert f"AWQ version {version.lower()!r} is not supported, only gemm, gemv, gemv_fast" in refused(model)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"bits": 8}, "bits 8 is not supported, only 4"),
        ({"bits": 3}, "bits 3 is not supported, only 4"),
        ({"bits": "4"}, "bits is '4'"),
        ({"bits": True}, "bits is True"),
        ({"bits": None, "w_bit": 3}, "bits 3"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": -2}, "group_size -2"),
        ({"group_size": 64.0}, "group_size is 64.0"),
        ({"desc_act": True}, "desc_act"),
        ({"backend": "mystery"}, "backend 'mystery' is not known"),
    ],
)
def test_configs_refused(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    model, _ = checkpoint(tmp_path / "m", **config)
    assert says in refused(model)


@pytest.mark.parametrize(
    ("stored", "named"), [("gemm", "gemv"), ("gemv", "gemm"), ("gemm", "gemv_fast"), ("gemv_fast", "gemv")]
)
@pytest.mark.parametrize("shape", [(128, 128), (128, 256)])
def test_config_and_file_disagree_on_the_layout(
    tmp_path: Path, stored: str, named: str, shape: tuple[int, int]
) -> None:  # B19
    """A gemv file whose config says gemm loads without complaint where N = K, and talks nonsense."""
    model, _ = checkpoint(tmp_path / "m", stored, *shape, version=named)
    message = refused(model)
    assert f"version {named!r}" in message
    assert Q in message
    if "fast" not in stored + named:
        assert f"fit version {stored!r} with group_size 64" in message
        assert str(SafetensorsSource(model).shape(f"{Q}.scales")) in message


@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast"])
def test_config_and_file_disagree_on_the_group(tmp_path: Path, layout: str) -> None:
    model, _ = checkpoint(tmp_path / "m", layout, 128, 2048, 64, group_size=128)
    message = refused(model)
    assert "group_size 128 in quantization_config" in message
    assert f"fit version {layout!r} with group_size 64" in message


def test_group_that_does_not_divide(tmp_path: Path) -> None:
    model, _ = checkpoint(tmp_path / "m", "gemm", 16, 192, 64, group_size=128)
    assert "fit version 'gemm' with group_size 64" in refused(model)
    model, _ = checkpoint(tmp_path / "n", "gemm", 16, 48, 16, group_size=128)
    assert "cannot hold a matrix of 16 rows and 48 columns" in refused(model)


def test_scales_that_fit_nothing(tmp_path: Path) -> None:
    codes, scales, zeros = integers(16, 256, 64)
    t = pack_awq_gemm(codes, scales, zeros)
    t["scales"] = torch.ones(5, 16).half()
    model = write_model(
        tmp_path / "m", {f"{Q}.{part}": x for part, x in t.items()}, quantization_config={"group_size": 64, "w_bit": 4}
    )
    assert "needs scales (4, 16) and zeros (4, 2) beside qweight (256, 2), but the file has (5, 16) and (4, 2)" in (
        refused(model)
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"qzeros": None}, f"{Q}.qzeros is missing"),
        ({"scales": None}, f"{Q}.scales is missing"),
        ({"weight": torch.ones(128, 128)}, f"holds both {Q}.weight and {Q}.qweight"),
        ({"g_idx": torch.zeros(128, dtype=torch.int32)}, "actorder"),
        ({"scales": torch.ones(2, 128, dtype=torch.int8)}, "torch.int8, where scales are"),
        ({"qzeros": torch.ones(2, 16)}, "torch.float32, but AWQ version 'gemm'"),
        ({"qweight": torch.zeros(128, 16, dtype=torch.int64)}, "torch.int64, but AWQ version 'gemm'"),
    ],
)
def test_parts_of_a_matrix(tmp_path: Path, change: dict[str, Tensor | None], says: str) -> None:
    model, _ = checkpoint(tmp_path / "m")
    source = SafetensorsSource(model)
    tensors = {name: source.read(name).clone() for name in source.names()}
    tensors |= {f"{Q}.{part}": t for part, t in change.items() if t is not None}
    for part, t in change.items():
        if t is None:
            del tensors[f"{Q}.{part}"]
    write_model(tmp_path / "n", tensors, quantization_config=source.config["quantization_config"])
    assert says in refused(tmp_path / "n")


def test_scaled_activations_are_refused_by_name(tmp_path: Path) -> None:
    """AutoAWQ divides a GELU's output by a vector that it saves as `….scales`; ignoring it changes every answer."""
    model, _ = checkpoint(tmp_path / "m")
    source = SafetensorsSource(model)
    tensors = {name: source.read(name).clone() for name in source.names()} | {
        "model.layers.0.mlp.act.scales": torch.ones(8)
    }
    write_model(tmp_path / "n", tensors, quantization_config=source.config["quantization_config"])
    assert "model.layers.0.mlp.act.scales scales an activation" in refused(tmp_path / "n")
