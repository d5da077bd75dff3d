"""A checkpoint quantized from end to end: every family, every format, to the bit, and after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flexdecode import LLM, SamplingParams
from flexdecode.checkpoints.open import open_source
from flexdecode.checkpoints.save import write_tensors
from flexdecode.quantization.weights import Int4Weight, Int8Weight
from flexdecode.quantizer import walk
from flexdecode.quantizer.folder import Folder
from flexdecode.quantizer.walk import quantize
from tests.checkpoints import FAMILIES, edit_config, edit_tensors, tiny
from tests.oracles import assert_close, ids
from tests.quantizer.making import job_of, made, pieces

KINDS: list[dict[str, Any]] = [
    {"method": "rtn"},
    {"method": "rtn", "symmetric": True},
    {"method": "rtn", "format": "compressed-tensors", "group_size": -1},
    {"method": "int8"},
    {"method": "awq"},
    {"method": "awq", "group_size": -1, "next_inputs": "quantized"},
    {"method": "awq", "group_size": 128, "format": "compressed-tensors", "dtype": "bfloat16"},
    {"method": "awq", "format": "compressed-tensors", "symmetric": True},
]


def twin(out: Path, folder: Path) -> Path:
    """The float model that a quantized checkpoint stands for: the same, its matrices dequantized in fp32."""
    source, tensors = open_source(out), dict[str, Tensor]()
    for name in source.names():
        weight = source.read(name)
        tensors[name] = weight.clone() if isinstance(weight, Tensor) else weight.dequantize()
    folder.mkdir()
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text((out / "config.json").read_text())
    edit_config(folder, drop=("quantization_config",))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    """Quantize, load, generate; logits near the float model's, and those of the float twin."""
    tiny(tmp_path / "float", family, gain=1.0, dtype=torch.bfloat16, num_hidden_layers=2)
    records = made(tmp_path / "float", tmp_path / "out")
    llm = LLM(tmp_path / "out", dtype="fp32")
    assert any(kind.startswith("int4") for kind in llm.describe()["held_as"])
    prompt = ids(40)
    logits = llm.logits(prompt)
    wanted = LLM(tmp_path / "float", dtype="fp32").logits(prompt)
    assert float((logits - wanted).norm() / wanted.norm()) < 0.3
    assert_close(logits, LLM(twin(tmp_path / "out", tmp_path / "twin"), dtype="fp32").logits(prompt), 2e-3)
    assert len(llm.generate(prompt, SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)).token_ids) == 5
    searched = [r for r in records if r.kind == "int4"]
    assert all(r.before is not None and r.after is not None and r.after < 0.2 for r in searched)
    assert sum(r.after or 0 for r in searched) < sum(r.before or 0 for r in searched)


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_method_and_format(options: dict[str, Any], tmp_path: Path) -> None:
    """B33, B37. What is loaded is what was chosen; a quantized file is small."""
    tiny(tmp_path / "float", gain=1.0, dtype=torch.bfloat16, num_hidden_layers=2)
    made(tmp_path / "float", tmp_path / "out", **options)
    source = open_source(tmp_path / "out")
    kind = Int8Weight if options["method"] == "int8" else Int4Weight
    quantized = [name for name in source.names() if name.endswith("_proj.weight")]
    assert len(quantized) == 14
    assert all(isinstance(source.read(name), kind) for name in quantized)
    prompt = ids(40)
    logits = LLM(tmp_path / "out", dtype="fp32").logits(prompt)
    wanted = LLM(tmp_path / "float", dtype="fp32").logits(prompt)
    assert float((logits - wanted).norm() / wanted.norm()) < 0.25
    assert_close(logits, LLM(twin(tmp_path / "out", tmp_path / "twin"), dtype="fp32").logits(prompt), 2e-3)


@pytest.mark.parametrize("format_", ["awq-gemm", "compressed-tensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_holds_what_the_search_chose_to_the_bit(
    dtype: torch.dtype, format_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that a layer has once it is quantized, and that the next layers were calibrated on, are the file's:
    matrices, biases, norms."""
    tiny(tmp_path / "float", "qwen2", dtype=dtype, num_hidden_layers=2)
    kept: dict[str, Tensor] = {}

    class Watched(walk.LayerQuantizer):
        def round(self) -> Any:
            result = super().round()
            for name, linear in self._weights.linears.items():
                kept[f"{self._at}{name}"] = linear.weight_NK.clone()
                if linear.bias is not None:
                    kept[f"{self._at}{name}.bias"] = linear.bias.clone()
            kept.update({f"{self._at}{name}": norm.weight.clone() for name, norm in self._weights.norms.items()})
            return result

    monkeypatch.setattr(walk, "LayerQuantizer", Watched)
    made(tmp_path / "float", tmp_path / "out", format=format_)
    job, source = job_of(tmp_path / "float"), open_source(tmp_path / "out")
    for target, rule in job.table.items():
        if not target.startswith("layers."):
            continue
        read = [source.read(part.name) for part in rule.parts]
        found = torch.cat([w.float() if isinstance(w, Tensor) else w.dequantize() for w in read])
        assert torch.equal(found, kept[target]), target
        if rule.bias:
            assert torch.equal(torch.cat([source.read(b.name) for b in rule.bias]).float(), kept[f"{target}.bias"])


def test_the_saved_config_says_what_was_done(tmp_path: Path) -> None:
    """B35. The list of modules left in float is in the format's own field; reloading heeds it."""
    tiny(tmp_path / "float", gain=1.0, num_hidden_layers=2)
    for format_, field in (("awq-gemm", "modules_to_not_convert"), ("compressed-tensors", "ignore")):
        out = tmp_path / format_
        made(tmp_path / "float", out, format=format_, skip=("k_proj", "re:.*layers\\.1\\.mlp.*"))
        told = json.loads((out / "config.json").read_text())["quantization_config"]
        left = {"model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.k_proj"}
        left |= {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}
        assert left <= set(told[field])
        assert told["flexdecode"]["skip"] == ["k_proj", "re:.*layers\\.1\\.mlp.*"]
        assert told["flexdecode"]["method"] == "awq"
        assert told["flexdecode"]["seed"] == 0
        source = open_source(out)
        assert isinstance(source.read("model.layers.0.self_attn.k_proj.weight"), Tensor)
        assert isinstance(source.read("model.layers.0.self_attn.q_proj.weight"), Int4Weight)
        twin_logits = LLM(twin(out, tmp_path / f"{format_}-twin"), dtype="fp32").logits(ids(30))
        assert_close(LLM(out, dtype="fp32").logits(ids(30)), twin_logits, 2e-3)
    report = json.loads((out / "quantize_report.json").read_text())
    assert {m["module"] for m in report["matrices"] if m["kind"] == "float"} == left


def test_tokenizer_template_and_generation_config_come_along(tmp_path: Path) -> None:
    tiny(tmp_path / "float", num_hidden_layers=1, chat_template="{{ messages[0].content }}")
    (tmp_path / "float" / "generation_config.json").write_text('{"temperature": 0.6}')
    (tmp_path / "float" / "LICENSE.txt").write_text("terms")
    made(tmp_path / "float", tmp_path / "out", method="rtn")
    llm = LLM(tmp_path / "out")
    assert llm.tokenizer is not None
    assert llm.tokenizer.encode("ab") == [97, 98]
    assert llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1)).prompt_tokens == 2
    assert llm.generation_config["temperature"] == 0.6
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "terms"


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    tiny(tmp_path / "float", num_hidden_layers=2)
    for name in ("a", "b"):
        made(tmp_path / "float", tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
@pytest.mark.parametrize("method", ["awq", "rtn"])
def test_an_interrupted_run_goes_on(method: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before any shard is complete, in the middle, before the last: resuming gives the same bytes."""
    tiny(tmp_path / "float", num_hidden_layers=4)
    made(tmp_path / "float", tmp_path / "whole", method=method)
    add, count = Folder.add, 0

    def interrupted(self: Folder, *args: Any, **named: Any) -> None:
        nonlocal count
        count += 1
        if count == stop:
            raise KeyboardInterrupt
        add(self, *args, **named)

    monkeypatch.setattr(Folder, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "float", tmp_path / "out", method=method)
    monkeypatch.setattr(Folder, "add", add)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="is an unfinished run; go on with --resume, or remove it"):
        made(tmp_path / "float", tmp_path / "out", method=method)
    seen: list[int] = []
    job = job_of(tmp_path / "float", method=method)
    samples = pieces() if method == "awq" else None
    quantize(job, tmp_path / "out", samples, resume=True, progress=lambda done, total: seen.append(done))
    assert seen[0] == max(stop - 2, 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.unfinished").exists()


def test_the_norms_and_the_embedding_of_a_tied_model_are_written_once(tmp_path: Path) -> None:
    """B37."""
    tiny(tmp_path / "float", hidden_size=512, head_dim=128, intermediate_size=1024, num_hidden_layers=2,
         tie_word_embeddings=True, dtype=torch.bfloat16)  # fmt: skip
    made(tmp_path / "float", tmp_path / "out", method="rtn", group_size=128)
    files = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    names = [name for file in files for name in file]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert size < 0.4 * (tmp_path / "float" / "model.safetensors").stat().st_size


def test_numbers_that_are_none_name_the_tensor(tmp_path: Path) -> None:

    tiny(tmp_path / "float", num_hidden_layers=2)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
        return tensors

    edit_tensors(tmp_path / "float", spoil)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: holds a value that is not finite"):
        made(tmp_path / "float", tmp_path / "out", method="rtn")
    with pytest.raises(ValueError, match="layer 1: down: an input is not finite"):
        made(tmp_path / "float", tmp_path / "out2")


@pytest.mark.parametrize("format_", ["awq-gemm", "compressed-tensors"])
def test_a_matrix_whose_width_fits_no_group(format_: str, tmp_path: Path) -> None:
    """B38. Left in float and listed; the others are quantized, scales move all the same, and the file loads."""
    tiny(tmp_path / "float", gain=1.0, intermediate_size=200, num_hidden_layers=2)
    records = made(tmp_path / "float", tmp_path / "out", odd_widths="leave", format=format_)
    left = [r for r in records if r.kind == "float"]
    assert [r.module for r in left] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert left[0].why == "has 200 columns, which groups of 32 do not divide"
    prompt = ids(40)
    logits = LLM(tmp_path / "out", dtype="fp32").logits(prompt)
    wanted = LLM(tmp_path / "float", dtype="fp32").logits(prompt)
    assert float((logits - wanted).norm() / wanted.norm()) < 0.25
    assert_close(logits, LLM(twin(tmp_path / "out", tmp_path / "twin"), dtype="fp32").logits(prompt), 2e-3)
