"""compressed-tensors checkpoints, packed by that library: schemes, targets, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import Tensor

from flexdecode.checkpoints.compressed import parse_compressed
from flexdecode.checkpoints.quantized import QuantizedSource, with_quantization
from flexdecode.checkpoints.safetensors import SafetensorsSource
from flexdecode.quantization.weights import Int8Weight, Weight
from tests.test_checkpoints.builders import integers, plain, write_model

Q, D = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def weights(group: int, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    return {
        "num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group, "actorder": None, "dynamic": False, **changes,
    }  # fmt: skip


def config(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)}, **changes,
    }  # fmt: skip


def linear(*args: Any, **changes: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": weights(*args, **changes), "input_activations": None}


def packed(module: str, n: int, k: int, group: int, symmetric: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros = integers(n, k, group, symmetric=symmetric)
    tensors = {
        f"{module}.weight_packed": pack_to_int32((codes - 8).to(torch.int8), 4),
        f"{module}.weight_scale": scales.half(),
        f"{module}.weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0).contiguous()
    return tensors, plain(codes, scales, zeros)


def read(directory: Path, name: str) -> Weight:
    source = with_quantization(SafetensorsSource(directory))
    weight = source.read(name)
    assert tuple(weight.shape) == source.shape(name)
    assert weight.nbytes == source.nbytes(name)
    return weight


def refused(directory: Path) -> str:
    with pytest.raises(ValueError) as error:
        with_quantization(SafetensorsSource(directory))
    message = str(error.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (24, 128), (12, 384), (20, 640)])
def test_groups_and_channels(tmp_path: Path, shape: tuple[int, int], group: int, symmetric: bool) -> None:  # B22–B24
    """Asymmetric zero points are packed along the rows, unlike the weights, and were read as absent."""
    tensors, expected = packed(D, *shape, group, symmetric)
    model = write_model(tmp_path / "m", tensors, quantization_config=config(linear(group, symmetric)))
    assert torch.equal(read(model, f"{D}.weight").dequantize(), expected)


def test_two_groups_of_two_sizes(tmp_path: Path) -> None:  # B23
    """A loader that takes one group size for all reads half of the model as noise, or dies of a shape."""
    q, expected_q = packed(Q, 64, 256, 32)
    d, expected_d = packed(D, 64, 256, 128, symmetric=False)
    groups = {**linear(128, False)}, {**linear(32), "targets": ["re:.*self_attn.*"]}
    model = write_model(tmp_path / "m", q | d, quantization_config=config(*groups))
    assert torch.equal(read(model, f"{Q}.weight").dequantize(), expected_q)
    assert torch.equal(read(model, f"{D}.weight").dequantize(), expected_d)
    source = with_quantization(SafetensorsSource(model))
    assert isinstance(source, QuantizedSource)
    assert {q.group_size for q in source.quantization} == {32, 128}


@pytest.mark.parametrize("target", [Q, "re:.*q_proj$", r"re:model\.layers\.\d+\.self_attn", "Linear"])
def test_targets(tmp_path: Path, target: str) -> None:
    tensors, expected = packed(Q, 64, 256, 32)
    groups = {**linear(32), "targets": [target]}, {**linear(64), "targets": ["re:.*mlp.*"]}
    model = write_model(tmp_path / "m", tensors, quantization_config=config(*groups))
    assert torch.equal(read(model, f"{Q}.weight").dequantize(), expected)


@pytest.mark.parametrize("ignore", [["lm_head", "re:.*k_proj$"], ["model.layers.0.self_attn.k_proj"], []])
def test_ignored_layers_are_float(tmp_path: Path, ignore: list[str]) -> None:  # B20
    tensors, expected = packed(Q, 64, 256, 32)
    k = torch.randn(8, 8)
    tensors["model.layers.0.self_attn.k_proj.weight"] = k
    model = write_model(tmp_path / "m", tensors, quantization_config=config(linear(32), ignore=ignore))
    assert torch.equal(read(model, f"{Q}.weight").dequantize(), expected)
    assert torch.equal(read(model, "model.layers.0.self_attn.k_proj.weight"), k)


def test_packed_though_ignored(tmp_path: Path) -> None:  # B20
    """What the file holds decides, and the shapes tell the group."""
    tensors, expected = packed(Q, 64, 256, 32, symmetric=False)
    model = write_model(tmp_path / "m", tensors, quantization_config=config(linear(128), ignore=["re:.*q_proj"]))
    assert torch.equal(read(model, f"{Q}.weight").dequantize(), expected)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8(tmp_path: Path, strategy: str, dtype: torch.dtype) -> None:
    codes = torch.randint(-128, 128, (20, 24), dtype=torch.int8)
    scales = torch.rand((20, 1) if strategy == "channel" else (1,)).to(dtype)
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale": scales, "norm.weight": torch.ones(3)}
    group = linear(-1, num_bits=8, strategy=strategy)
    model = write_model(tmp_path / "m", tensors, quantization_config=config(group, format="int-quantized"))
    weight = read(model, f"{Q}.weight")
    assert isinstance(weight, Int8Weight)
    assert torch.equal(weight.dequantize(), codes.float() * scales.float())
    assert set(with_quantization(SafetensorsSource(model)).names()) == {f"{Q}.weight", "norm.weight"}


def test_two_formats_in_one_file(tmp_path: Path) -> None:
    q, expected = packed(Q, 64, 256, 32)
    codes = torch.randint(-128, 128, (64, 64), dtype=torch.int8)
    tensors = q | {f"{D}.weight": codes, f"{D}.weight_scale": torch.ones(64, 1)}
    groups = (
        {**linear(32), "targets": ["re:.*self_attn"], "format": "pack-quantized"},
        {**linear(-1, num_bits=8), "targets": ["re:.*mlp"], "format": "int-quantized"},
    )
    model = write_model(tmp_path / "m", tensors, quantization_config=config(*groups, format="mixed-precision"))
    assert torch.equal(read(model, f"{Q}.weight").dequantize(), expected)
    assert torch.equal(read(model, f"{D}.weight").dequantize(), codes.float())


@pytest.mark.parametrize(
    ("group", "changes", "says"),
    [
        (linear(32, num_bits=8), {}, "pack-quantized with 8 bits of type int"),
        (linear(32, num_bits=3), {}, "with 3 bits"),
        (linear(32, type="float"), {}, "of type float"),
        (linear(32, actorder="group"), {}, "actorder 'group'"),
        (linear(32, actorder="dynamic"), {}, "actorder 'dynamic'"),
        (linear(32, actorder=True), {}, "actorder True"),
        (linear(32, dynamic=True), {}, "dynamic weights"),
        (linear(32, strategy="block"), {}, "strategy 'block'"),
        (linear(32, group_size=None), {}, "positive group_size, and has None"),
        (linear(32) | {"input_activations": {"num_bits": 8}}, {}, "quantizes activations (input_activations)"),
        (linear(32) | {"output_activations": {"num_bits": 8}}, {}, "quantizes activations (output_activations)"),
        (linear(32) | {"weights": None}, {}, "config_groups.group_0 does not say"),
        (linear(32) | {"targets": ["re:("]}, {}, "is not a regular expression"),
        (linear(32), {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
        (linear(32), {"format": "mixed-precision"}, "format 'mixed-precision'"),
        (linear(32), {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (linear(32), {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (linear(32), {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (linear(32), {"config_groups": {}}, "without config_groups"),
        (linear(32), {"ignore": ["re:["]}, "is not a regular expression"),
        (linear(32, num_bits=8), {"format": "int-quantized"}, "strategy 'group' of int-quantized"),
        (linear(-1, False, num_bits=8), {"format": "int-quantized"}, "only when symmetric"),
        (linear(-1), {"format": "int-quantized"}, "int-quantized with 4 bits"),
    ],
)
def test_schemes_refused_by_name(tmp_path: Path, group: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    tensors, _ = packed(Q, 64, 256, 32)  # B23
    model = write_model(tmp_path / "m", tensors, quantization_config=config(group, **changes))
    assert says in refused(model)


@pytest.mark.parametrize("actorder", ["weight", "static", "Weight"])
def test_orders_that_are_undone_on_disk(tmp_path: Path, actorder: str) -> None:
    tensors, expected = packed(Q, 64, 256, 32)
    model = write_model(tmp_path / "m", tensors, quantization_config=config(linear(32, actorder=actorder)))
    assert torch.equal(read(model, f"{Q}.weight").dequantize(), expected)


@pytest.mark.parametrize("sparsity", [None, {}, {"format": "dense"}])
def test_empty_extras(sparsity: dict[str, str] | None) -> None:
    parse_compressed(config(linear(32), sparsity_config=sparsity, transform_config={}, kv_cache_scheme=None))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight_scale": None}, f"{Q}.weight_scale is missing"),
        ({"weight_shape": None}, f"{Q}.weight_shape is missing"),
        ({"weight_g_idx": torch.zeros(256, dtype=torch.int32)}, "reordered (actorder)"),
        ({"input_scale": torch.ones(1)}, "activations are quantized"),
        ({"weight": torch.ones(64, 256)}, f"holds both {Q}.weight and"),
        ({"weight_shape": torch.tensor([64, 512])}, "cannot hold"),
        ({"weight_shape": torch.tensor([64, 249])}, "odd number"),
        ({"weight_scale": torch.ones(64, 4)}, "groups of 64, but config_groups.group_0 says group_size 32"),
        ({"weight_scale": torch.ones(64, 1)}, "groups of 256, but config_groups.group_0 says group_size 32"),
        ({"weight_scale": torch.ones(64, 7)}, "does not divide its 64 rows and 256 columns"),
        ({"weight_scale": torch.ones(32, 8)}, "does not divide"),
        ({"weight_scale": torch.ones(64, 8, dtype=torch.int32)}, "where scales are fp16"),
        ({"weight_zero_point": torch.zeros(64, 8, dtype=torch.int32)}, "where (8, 8) belongs"),
    ],
)
def test_parts_of_a_matrix(tmp_path: Path, change: dict[str, Tensor | None], says: str) -> None:
    tensors, _ = packed(Q, 64, 256, 32)
    tensors |= {f"{Q}.{part}": t for part, t in change.items() if t is not None}
    for part, t in change.items():
        if t is None:
            del tensors[f"{Q}.{part}"]
    model = write_model(tmp_path / "m", tensors, quantization_config=config(linear(32)))
    assert says in refused(model)


def test_asymmetric_without_zero_points(tmp_path: Path) -> None:  # B22
    tensors, _ = packed(Q, 64, 256, 32)
    model = write_model(tmp_path / "m", tensors, quantization_config=config(linear(32, False)))
    assert f"{Q}.weight_zero_point is missing, though config_groups.group_0 is asymmetric" in refused(model)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "weight_scale": torch.ones(8, 1)}, "neither int4 packed"),
        ({"weight": torch.ones(8, 8, dtype=torch.int8)}, "weight_scale is missing"),
        ({"weight": torch.ones(8, 2, 4, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}, "only matrices"),
        ({"weight": torch.ones(8, 8, dtype=torch.int8), "weight_scale": torch.ones(8, 2)}, "does not divide"),
        ({"weight": torch.ones(8, 8, dtype=torch.int8), "weight_scale": torch.ones(8, 1),
          "weight_zero_point": torch.ones(8, 1, dtype=torch.int8)}, "weight_zero_point is not 0"),
    ],
)  # fmt: skip
def test_int8_parts(tmp_path: Path, tensors: dict[str, Tensor], says: str) -> None:
    quant = config(linear(-1, num_bits=8), format="int-quantized")
    model = write_model(tmp_path / "m", {f"{Q}.{k}": v for k, v in tensors.items()}, quantization_config=quant)
    assert says in refused(model)


def test_stored_otherwise_than_the_scheme_says(tmp_path: Path) -> None:
    tensors, _ = packed(Q, 64, 256, -1)
    quant = config(linear(-1, num_bits=8), format="int-quantized")
    model = write_model(tmp_path / "m", tensors, quantization_config=quant)
    assert "is stored pack-quantized, but config_groups.group_0 says int-quantized" in refused(model)
