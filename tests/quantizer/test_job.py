"""What is prepared before a weight is read, and what is refused; GGUF files saved as the models they were made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flexdecode import LLM
from flexdecode.checkpoints.safetensors import SafetensorsSource
from flexdecode.cli.quantize import beside_gguf
from flexdecode.quantizer.job import prepare, quantization_config, saved_config
from flexdecode.quantizer.options import Options
from flexdecode.quantizer.walk import quantize
from tests.checkpoints import edit_config, edit_tensors, quantize_ckpt, tiny
from tests.gguf_files import ARCHITECTURE, convert
from tests.oracles import ids
from tests.quantizer.making import job_of, made, pieces


@pytest.mark.parametrize("family", [name for name in ARCHITECTURE if name != "gpt_oss"])
def test_a_gguf_file_gives_what_its_model_gives(family: str, tmp_path: Path) -> None:
    """Names, permuted rows, Gemma's norms, stacked experts, the config: bit for bit as from the Hugging Face folder."""
    told = {"mistral": {"sliding_window": None}, "gemma2": {"query_pre_attn_scalar": 32}}  # what GGUF cannot tell
    told["gemma3_text"] = told["gemma2"]
    tiny(tmp_path / "float", family, gain=1.0, dtype=torch.bfloat16, num_hidden_layers=2, **told.get(family, {}))
    made(tmp_path / "float", tmp_path / "a")
    job = job_of(convert(tmp_path / "float"))
    quantize(job, tmp_path / "b", pieces(), beside=lambda path: beside_gguf(job, path))
    a, b = SafetensorsSource(tmp_path / "a"), SafetensorsSource(tmp_path / "b")
    assert set(a.names()) == set(b.names())
    for name in a.names():
        assert torch.equal(a.read(name), b.read(name)), name
    prompt = ids(20)
    llm = LLM(tmp_path / "b", dtype="fp32")
    wanted = LLM(tmp_path / "float" / "model.gguf", dtype="fp32")
    assert torch.equal(llm.logits(prompt), LLM(tmp_path / "a", dtype="fp32").logits(prompt))
    assert llm.tokenizer is not None
    assert wanted.tokenizer is not None
    for text in ("the end, <eos> there", " ä", ""):
        assert llm.tokenizer.encode(text) == wanted.tokenizer.encode(text)
    assert set(llm.eos_token_ids) == set(wanted.eos_token_ids)


def test_a_gguf_file_without_a_home_is_refused(tmp_path: Path) -> None:
    tiny(tmp_path, "gpt_oss", num_hidden_layers=1)
    with pytest.raises(ValueError, match="quantize the HF checkpoint"):
        job_of(convert(tmp_path))


def test_a_quantized_source_is_dequantized(tmp_path: Path) -> None:
    """int4 to int8: no more is lost than int8 loses."""
    tiny(tmp_path / "float", gain=1.0, num_hidden_layers=2)
    quantize_ckpt(tmp_path / "float", tmp_path / "int4", tmp_path / "twin")
    made(tmp_path / "int4", tmp_path / "int8", method="int8")
    prompt = ids(30)
    wanted = LLM(tmp_path / "int4", dtype="fp32").logits(prompt)
    got = LLM(tmp_path / "int8", dtype="fp32").logits(prompt)
    assert float((got - wanted).norm() / wanted.norm()) < 0.03
    told = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert told["format"] == "int-quantized"


def test_groups_of_two_widths_name_their_matrices(tmp_path: Path) -> None:
    tiny(tmp_path / "float", gain=1.0, intermediate_size=192, num_hidden_layers=2)
    options = {"odd_widths": "smaller", "format": "compressed-tensors", "group_size": 128, "method": "rtn"}
    config = quantization_config(job_of(tmp_path / "float", **options))
    first, second = config["config_groups"].values()
    assert len(first["targets"]) == 12
    assert first["weights"]["group_size"] == 128
    assert second["targets"] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert second["weights"]["group_size"] == 64
    made(tmp_path / "float", tmp_path / "out", **options)
    held = LLM(tmp_path / "out").describe()["held_as"]
    assert {kind.split(" (")[0] for kind in held if kind.startswith("int4")} == {"int4 g128", "int4 g64"}


def test_the_saved_config_keeps_the_model_s(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma3_text", num_hidden_layers=2)
    job = job_of(tmp_path)
    config = saved_config(job)
    own = json.loads((tmp_path / "config.json").read_text())
    assert {key: config[key] for key in own} == own
    assert config["quantization_config"]["modules_to_not_convert"] is None


def test_a_base_model_without_the_prefix(tmp_path: Path) -> None:
    """Names in the file decide, not a family's usual ones."""
    tiny(tmp_path / "float", gain=1.0, num_hidden_layers=2, tie_word_embeddings=True)
    edit_tensors(tmp_path / "float", lambda tensors: {k.removeprefix("model."): t for k, t in tensors.items()})
    edit_config(tmp_path / "float", architectures=["LlamaModel"])
    made(tmp_path / "float", tmp_path / "out", skip=("k_proj",))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    left = config["quantization_config"]["modules_to_not_convert"]
    assert left == ["layers.0.self_attn.k_proj", "layers.1.self_attn.k_proj"]
    assert LLM(tmp_path / "out").logits([1, 2]).shape[0] == 2


def test_other_modalities_are_copied(tmp_path: Path) -> None:
    tiny(tmp_path / "float", "gemma3_text", gain=1.0, num_hidden_layers=2)
    own = json.loads((tmp_path / "float" / "config.json").read_text())
    vision = torch.randn(3, 5)
    edit_tensors(
        tmp_path / "float",
        lambda tensors: {f"language_model.{k}": t for k, t in tensors.items()} | {"vision_tower.a.weight": vision},
    )
    edit_config(tmp_path / "float", drop=tuple(own), model_type="gemma3", text_config=own)
    made(tmp_path / "float", tmp_path / "out")
    assert torch.equal(SafetensorsSource(tmp_path / "out").read("vision_tower.a.weight"), vision)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "vision_tower" in config["quantization_config"]["modules_to_not_convert"]
    assert LLM(tmp_path / "out").logits([1, 2]).shape[0] == 2


def test_random_shapes_can_be_prepared() -> None:
    assert prepare("random:llama-3.1-8b", Options()).layers == 32
