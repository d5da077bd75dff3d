"""Saved files in readers that are not ours: transformers with compressed-tensors, and AWQ's layout bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, AwqConfig, CompressedTensorsConfig

from flexdecode import LLM
from flexdecode.checkpoints.open import open_source
from flexdecode.quantization.weights import Int4Weight
from tests.checkpoints import tiny
from tests.oracles import assert_close, expected, ids
from tests.quantizer.making import made

CASES: list[dict[str, Any]] = [
    {"method": "awq", "format": "compressed-tensors"},
    {"method": "awq", "format": "compressed-tensors", "symmetric": True},
    {"method": "rtn", "format": "compressed-tensors", "group_size": -1},
    {"method": "rtn", "format": "compressed-tensors", "skip": ("k_proj", "model.layers.1.mlp")},
    {"method": "rtn", "format": "compressed-tensors", "group_size": 128, "odd_widths": "smaller", "symmetric": True},
    {"method": "int8"},
    {"method": "int8", "skip": ("o_proj",)},
]


def transformers_model(folder: Path) -> Any:
    """transformers' reading, by its default way where that works: of files with zero points, whoever wrote them,
    transformers 5.24 with compressed-tensors 0.20 expects the zero points unpacked unless it dequantizes at load."""
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    symmetric = all(group["weights"]["symmetric"] for group in groups.values())
    more = {} if symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **more)
    return model.eval()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, o.values())))
def test_transformers_reads_compressed_tensors(options: dict[str, Any], tmp_path: Path) -> None:
    tiny(tmp_path / "float", "qwen2", gain=1.0, num_hidden_layers=2, intermediate_size=192)
    made(tmp_path / "float", tmp_path / "out", **options)
    model = transformers_model(tmp_path / "out")
    prompt = ids(40)
    assert_close(LLM(tmp_path / "out", dtype="fp32").logits(prompt), expected(model, prompt), 2e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("ab") == [97, 98]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "olmo2", "granite", "smollm3"])
def test_transformers_reads_families(family: str, tmp_path: Path) -> None:
    tiny(tmp_path / "float", family, gain=1.0, num_hidden_layers=2)
    made(tmp_path / "float", tmp_path / "out", format="compressed-tensors")
    model = transformers_model(tmp_path / "out")
    prompt = ids(40)
    assert_close(LLM(tmp_path / "out", dtype="fp32").logits(prompt), expected(model, prompt), 2e-3)


def read_awq(tensors: Any, stem: str, group: int) -> Tensor:
    """A matrix of an AWQ gemm file, one nibble at a time, from the layout's description alone: nibble i of a word is
    column [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight; w = (q - z) * s in fp32."""
    qweight, qzeros, scales = (tensors.get_tensor(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))
    assert (qweight.dtype, qzeros.dtype, scales.dtype) == (torch.int32, torch.int32, torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def unpack(words: Tensor) -> Tensor:
        out = torch.empty(words.shape[0], 8 * words.shape[1], dtype=torch.int64)
        for i, column in enumerate(order):
            out[:, column::8] = (words.to(torch.int64) >> (4 * i)) & 15
        return out

    codes, zeros = unpack(qweight), unpack(qzeros)
    assert scales.shape == zeros.shape == (codes.shape[0] // group, codes.shape[1])
    return ((codes - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)).T


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq_gemm_bit_by_bit(symmetric: bool, tmp_path: Path) -> None:
    """B33. Symmetric files carry zero points too, all of them 8, so that every reader of the format reads them."""
    tiny(tmp_path / "float", gain=1.0, dtype=torch.bfloat16, num_hidden_layers=2)
    made(tmp_path / "float", tmp_path / "out", symmetric=symmetric)
    source = open_source(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as tensors:
        stems = [name.removesuffix(".qweight") for name in tensors.keys() if name.endswith(".qweight")]  # noqa: SIM118
        wanted = {stem: read_awq(tensors, stem, 32) for stem in stems}
    assert len(stems) == 14
    for stem in stems:
        weight = source.read(f"{stem}.weight")
        assert isinstance(weight, Int4Weight)
        assert torch.equal(weight.dequantize(), wanted[stem])
        assert not symmetric or bool((weight.zeros_NG == 8).all())


def test_transformers_accepts_the_awq_config(tmp_path: Path) -> None:
    tiny(tmp_path / "float", gain=1.0, num_hidden_layers=1)
    made(tmp_path / "float", tmp_path / "out", skip=("k_proj",))
    told = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = AwqConfig.from_dict(dict(told))
    assert (config.bits, config.group_size, config.zero_point) == (4, 32, True)
    assert config.modules_to_not_convert == ["model.layers.0.self_attn.k_proj"]
