"""Quantized checkpoints end to end: every layout against the float twin that holds the same numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexdecode import LLM, SamplingParams
from tests.checkpoints import edit_config, edit_tensors, quantize_ckpt, rtn, tiny
from tests.oracles import assert_close, expected, ids, oracle
from tests.test_checkpoints.builders import pack_gemv_fast

TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    d = tmp_path_factory.mktemp("floats")
    tiny(d)
    return d


def assert_twins(dst: Path, twin: Path, tokens: int = 50) -> LLM:
    llm = LLM(dst, dtype="fp32")
    prompt = ids(tokens)
    assert_close(llm.logits(prompt), expected(oracle(twin), prompt), TOLERANCE)
    return llm


def holds_int4(llm: LLM) -> bool:
    return any(kind.startswith("int4") for kind in llm.describe()["held_as"])


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize(("fmt", "sym"), [("gemm", False), ("gemv", False), ("ct", False), ("ct", True)])
def test_every_layout_and_group(fmt: str, sym: bool, group: int, floats: Path, tmp_path: Path) -> None:
    """B19, B22, B23, B24. Channel groups included, on matrices that are not square."""
    quantize_ckpt(floats, tmp_path / "q", tmp_path / "twin", fmt, group, sym)
    assert holds_int4(assert_twins(tmp_path / "q", tmp_path / "twin"))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_gemv_fast(group: int, floats: Path, tmp_path: Path) -> None:
    """The third AWQ layout stores -scale · zero in fp16, so the twin has those very numbers."""
    dst, twin = tmp_path / "q", tmp_path / "twin"
    quantize_ckpt(floats, dst, twin, "gemm", group)
    packed: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for key, w in load_file(floats / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            packed[key] = dense[key] = w
            continue
        q, s, z = rtn(w, group)
        own = pack_gemv_fast(q, s, z)
        packed.update({f"{key.removesuffix('.weight')}.{name}": t for name, t in own.items()})
        offset = (-(s * z)).half().float()
        codes = q.reshape(q.shape[0], -1, group).float()
        dense[key] = (codes * s[..., None] + offset[..., None]).reshape(q.shape)
    save_file(packed, dst / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dst / "config.json").read_text())["quantization_config"]
    edit_config(dst, quantization_config=config | {"version": "gemv_fast"})
    assert holds_int4(assert_twins(dst, twin))


def test_int8_weights(floats: Path, tmp_path: Path) -> None:
    """compressed-tensors int-quantized: int8 with a scale a row, weights only."""
    dst, twin = tmp_path / "q", tmp_path / "twin"
    packed: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for key, w in load_file(floats / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            packed[key] = dense[key] = w
            continue
        scale = w.abs().amax(1, keepdim=True) / 127
        codes = torch.round(w / scale).to(torch.int8)
        packed |= {key: codes, f"{key}_scale": scale}
        dense[key] = codes.float() * scale
    for folder, content in ((dst, packed), (twin, dense)):
        shutil.copytree(floats, folder)
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    edit_config(
        dst,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": scheme},
        },
    )
    llm = assert_twins(dst, twin)
    assert any(kind.startswith("int8") for kind in llm.describe()["held_as"])


@pytest.mark.parametrize("zeros", ["low", "high", "random"])
@pytest.mark.parametrize("fmt", ["gemm", "gemv", "ct"])
def test_extreme_zero_points(fmt: str, zeros: str, floats: Path, tmp_path: Path) -> None:
    """B18: a repacking stored zero - 1, so that 0 became 15."""

    def force(name: str, q: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(len(name))
        chosen = {"low": z * 0, "high": z * 0 + 15, "random": torch.randint(0, 16, z.shape, generator=generator)}
        return q, s * 0.3, chosen[zeros].int()

    quantize_ckpt(floats, tmp_path / "q", tmp_path / "twin", fmt, 32, ints=force)
    assert_twins(tmp_path / "q", tmp_path / "twin")


def test_gemm_and_gemv_hold_the_same_model(floats: Path, tmp_path: Path) -> None:
    """B19: with hidden size 128 the packed shapes of the two coincide; only the config tells them apart."""
    for fmt in ("gemm", "gemv"):
        quantize_ckpt(floats, tmp_path / fmt, tmp_path / "twin", fmt, 32)
    prompt = ids(30)
    assert torch.equal(
        LLM(tmp_path / "gemm", dtype="fp32").logits(prompt), LLM(tmp_path / "gemv", dtype="fp32").logits(prompt)
    )


@pytest.mark.parametrize("version", ["GEMM", None, "absent"])
def test_spellings_of_the_version(version: str | None, floats: Path, tmp_path: Path) -> None:
    dst = tmp_path / "q"
    quantize_ckpt(floats, dst, tmp_path / "twin", "gemm", 32)
    config = json.loads((dst / "config.json").read_text())["quantization_config"]
    del config["version"]
    edit_config(dst, quantization_config=config if version == "absent" else config | {"version": version})
    assert_twins(dst, tmp_path / "twin")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"version": "marlin"}, "marlin"),
        ({"version": "no_such"}, "no_such"),
        ({"bits": 3}, "3"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"version": "gemv"}, "gemv"),  # the scales' shape says gemm
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    change: dict[str, Any], word: str, floats: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "q"
    quantize_ckpt(floats, dst, tmp_path / "twin", "gemm", 32)
    config = json.loads((dst / "config.json").read_text())["quantization_config"]
    edit_config(dst, quantization_config=config | change)
    with pytest.raises(ValueError, match=word) as caught:
        LLM(dst)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fmt", ["gemm", "ct"])
@pytest.mark.parametrize("skip", ["k_proj", "layers.1.", "model.layers.2.mlp.down_proj"])
def test_layers_left_in_float(skip: str, fmt: str, floats: Path, tmp_path: Path) -> None:
    """B20: what the file holds decides; the list names modules in full or in part."""
    quantize_ckpt(floats, tmp_path / "q", tmp_path / "twin", fmt, 32, skip=("lm_head", skip))
    assert_twins(tmp_path / "q", tmp_path / "twin")


def test_layers_left_in_float_by_pattern(floats: Path, tmp_path: Path) -> None:
    quantize_ckpt(floats, tmp_path / "q", tmp_path / "twin", "ct", 32, skip=("lm_head", "k_proj"))
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path / "q", quantization_config=config | {"ignore": ["lm_head", "re:.*k_proj$"]})
    assert_twins(tmp_path / "q", tmp_path / "twin")


def test_excluding_layer_1_does_not_exclude_layers_10_and_11(tmp_path: Path) -> None:
    """B21: a plain substring test on dotted names."""
    src = tmp_path / "src"
    tiny(src, num_hidden_layers=12, gain=2.0)
    quantize_ckpt(src, tmp_path / "q", tmp_path / "twin", "gemm", 32, skip=("lm_head", "layers.1."))
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path / "q", quantization_config=config | {"modules_to_not_convert": ["model.layers.1"]})
    assert_twins(tmp_path / "q", tmp_path / "twin", tokens=30)


def test_two_config_groups_of_different_size(floats: Path, tmp_path: Path) -> None:
    """B23: attention in groups of 32, the rest in groups of 128."""
    for name, group in (("small", 32), ("large", 128)):
        quantize_ckpt(floats, tmp_path / name, tmp_path / f"{name}-twin", "ct", group, sym=True)
    dst, twin = tmp_path / "large", tmp_path / "large-twin"
    for folder, other in ((dst, tmp_path / "small"), (twin, tmp_path / "small-twin")):
        attention = {k: v for k, v in load_file(other / "model.safetensors").items() if "self_attn" in k}
        edit_tensors(folder, lambda t, extra=attention: t | extra)  # type: ignore[misc]
    config = json.loads((dst / "config.json").read_text())["quantization_config"]
    scheme = config["config_groups"]["group_0"]
    first = {**scheme, "targets": ["re:.*self_attn.*"], "weights": {**scheme["weights"], "group_size": 32}}
    config["config_groups"] = {"group_0": first, "group_1": {**scheme, "targets": ["re:.*mlp.*"]}}
    edit_config(dst, quantization_config=config)
    assert_twins(dst, twin)


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2", "granite", "qwen3_moe"]
)
def test_every_family_in_int4(family: str, tmp_path: Path) -> None:
    src = tmp_path / "src"
    tiny(src, family)
    quantize_ckpt(src, tmp_path / "q", tmp_path / "twin", "gemm", 32)
    assert_twins(tmp_path / "q", tmp_path / "twin")


@pytest.mark.parametrize("fmt", ["gemm", "ct"])
def test_bfloat16_goes_through_our_int4_product(fmt: str, floats: Path, tmp_path: Path) -> None:
    """One row and many rows take different ways and must say the same."""
    quantize_ckpt(floats, tmp_path / "q", tmp_path / "twin", fmt, 32)
    llm = LLM(tmp_path / "q", dtype="bf16")
    assert any("(cpu)" in kind for kind in llm.describe()["held_as"])
    prompt = ids(200)
    wanted = expected(oracle(tmp_path / "twin"), prompt)
    for chunk in (200, 1):
        got = llm.logits(prompt, chunk)
        assert (got - wanted).abs().mean() < 0.1 * wanted.std()


def test_gpt_oss_interleaved_experts_and_clamp(tmp_path: Path) -> None:
    """B27: gate and up rows alternate, and the gated unit is clamped; taking halves gave garbage."""
    model = tiny(tmp_path, "gpt_oss", gain=10.0)
    prompt = ids(40)
    assert_close(LLM(tmp_path, dtype="fp32").logits(prompt), expected(model, prompt), 1e-3)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """The published form: e2m1 codes and a power of two a group of 32, experts only. Held as it lies on disk."""
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    twin, dst = tmp_path / "twin", tmp_path / "q"
    tiny(twin, "gpt_oss")
    generator = torch.Generator().manual_seed(0)
    packed: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for key, w in load_file(twin / "model.safetensors").items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[key] = dense[key] = w
            continue
        experts, columns, rows = w.shape  # input-major in the float file, row-major in blocks
        codes = torch.randint(0, 16, (experts, rows, columns // 32, 32), generator=generator)
        exponents = torch.randint(119, 124, (experts, rows, columns // 32), generator=generator)
        packed[f"{key}_blocks"] = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
        packed[f"{key}_scales"] = exponents.to(torch.uint8)
        values = table[codes] * torch.exp2(exponents.float() - 127)[..., None]
        dense[key] = values.reshape(experts, rows, columns).transpose(1, 2).contiguous()
    shutil.copytree(twin, dst)
    save_file(packed, dst / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, twin / "model.safetensors", metadata={"format": "pt"})
    edit_config(dst, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    llm = LLM(dst, dtype="fp32")
    prompt = ids(40)
    assert_close(llm.logits(prompt), expected(oracle(twin), prompt), 1e-3)
    assert any(kind.startswith("mxfp4") for kind in llm.describe()["held_as"])


def test_width_that_no_group_divides_stays_float(tmp_path: Path) -> None:
    """B38: a checkpoint whose down_proj was left in float because 200 is no multiple of the group."""
    src = tmp_path / "src"
    tiny(src, intermediate_size=200)
    quantize_ckpt(src, tmp_path / "q", tmp_path / "twin", "gemm", 32, skip=("lm_head", "down_proj"))
    assert_twins(tmp_path / "q", tmp_path / "twin")


def test_two_loads_agree_to_the_bit(floats: Path, tmp_path: Path) -> None:
    """B26: nothing packed for a device is ever stored, so nothing stale can be read."""
    quantize_ckpt(floats, tmp_path / "q", tmp_path / "twin", "gemm", 32)
    prompt = ids(20)
    first, second = (LLM(tmp_path / "q").logits(prompt) for _ in range(2))
    assert torch.equal(first, second)


def test_a_quantized_model_generates(floats: Path, tmp_path: Path) -> None:
    quantize_ckpt(floats, tmp_path / "q", tmp_path / "twin", "gemv", 64)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    got = LLM(tmp_path / "q", dtype="fp32").generate(ids(9), params).token_ids
    assert got == LLM(tmp_path / "twin", dtype="fp32").generate(ids(9), params).token_ids
