"""Loading: what is tied, missing, left over, mixed or too large, and how much memory it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexdecode import LLM, SamplingParams
from tests.checkpoints import VOCAB, edit_config, edit_tensors, puppet, quantize_ckpt, tiny
from tests.oracles import assert_close, assert_same_logits, expected, ids, oracle


def without(*names: str):  # type: ignore[no-untyped-def]
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_a_tied_file_has_no_head(family: str, tmp_path: Path) -> None:
    """B12: the head of SmolLM stayed random. Gemma's class ties by default, also where the config does not say so."""
    model = tiny(tmp_path, family, tie_word_embeddings=True)
    if family != "llama":
        edit_config(tmp_path, drop=("tie_word_embeddings",))
    llm = assert_same_logits(tmp_path, model)
    assert torch.equal(llm.logits(ids(20)), LLM(tmp_path, dtype="fp32").logits(ids(20)))


def test_a_tied_config_beside_a_head_in_the_file(tmp_path: Path) -> None:
    """B13: equal heads load as one; a different head is the one that counts, with a warning; none is an error."""
    d = tmp_path
    tiny(d)
    edit_config(d, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match=r"lm_head.weight.*is used"):
        llm = LLM(d, dtype="fp32")
    edit_config(d, tie_word_embeddings=False)
    prompt = ids(30)
    assert_close(llm.logits(prompt), expected(oracle(d), prompt))

    edit_tensors(d, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    edit_config(d, tie_word_embeddings=True)
    same = LLM(d, dtype="fp32")
    untied = same.config.vocab_size * same.config.hidden_size * 4
    assert same.engine.model.weight_bytes < llm.engine.model.weight_bytes
    assert llm.engine.model.weight_bytes - same.engine.model.weight_bytes == untied

    edit_tensors(d, without("lm_head.weight"))
    edit_config(d, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lm_head.weight.*missing"):
        LLM(d)


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    """B16: a missing parameter must never stay at its random start."""
    for family, name in (
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("qwen3", "model.layers.2.self_attn.q_norm.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("gpt_oss", "model.layers.0.self_attn.sinks"),
        ("llama", "model.norm.weight"),
    ):
        d = tmp_path / f"{family}-{name}"
        tiny(d, family)
        edit_tensors(d, without(name))
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            LLM(d)


def test_a_left_over_tensor_is_an_error_unless_it_is_a_known_constant(tmp_path: Path) -> None:
    d = tmp_path
    model = tiny(d)
    edit_tensors(d, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    assert_same_logits(d, model)
    edit_tensors(d, lambda t: {k.replace("layers.3.", "layers.4."): v for k, v in t.items()})
    with pytest.raises(ValueError, match=r"layers\.3"):
        LLM(d)
    edit_tensors(d, lambda t: {k.replace("layers.4.", "layers.3."): v for k, v in t.items()} | {"odd": torch.ones(1)})
    with pytest.raises(ValueError, match="'odd'"):
        LLM(d)


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    tiny(tmp_path)
    edit_config(tmp_path, intermediate_size=128)
    with pytest.raises(ValueError, match=r"gate_proj.weight.*\[256, 128\].*\[128, 128\]"):
        LLM(tmp_path)


def test_a_base_model_without_the_heads_wrapper(tmp_path: Path) -> None:
    """Base models are saved without `model.` before every name."""
    model = tiny(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda t: {k.removeprefix("model."): v for k, v in t.items()})
    assert_same_logits(tmp_path, model)


def test_ids_beyond_the_tokenizer_are_harmless(tmp_path: Path) -> None:
    """B17: the head has more rows than the tokenizer has ids; such an id decodes to nothing and counts as a token."""
    assert VOCAB > 260
    puppet(tmp_path, [65, 262, 66])
    llm = LLM(tmp_path, dtype="fp32")
    params = SamplingParams(max_tokens=10, temperature=0, logprobs=2)
    answer = llm.generate("<bos>", params)
    assert (answer.text, answer.finish_reason) == ("AB", "stop")
    assert answer.token_ids[:3] == (65, 262, 66)
    assert "".join(chunk.text for chunk in llm.stream("<bos>", params)) == "AB"


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    """B64: weights above 65504 became infinite in float16, and the answer NaN."""
    tiny(tmp_path, dtype=torch.bfloat16)

    def enlarge(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e5
        return tensors

    edit_tensors(tmp_path, enlarge)
    with pytest.raises(ValueError, match=r"down_proj.weight.*65504.*bfloat16"):
        LLM(tmp_path, dtype="fp16")
    assert torch.isfinite(LLM(tmp_path, dtype="bf16").logits(ids(10))).all()


def test_overflow_in_float16_is_an_error_and_never_an_answer(tmp_path: Path) -> None:
    """B64: a residual stream above 65504 is infinite in float16."""
    tiny(tmp_path, dtype=torch.bfloat16)
    edit_tensors(tmp_path, lambda t: {k: v.sign() * 60000 if "down_proj" in k else v for k, v in t.items()})
    llm = LLM(tmp_path, dtype="fp16")
    with pytest.raises(ValueError, match=r"NaN|finite|inf"):
        llm.generate(ids(10), SamplingParams(max_tokens=4, temperature=0))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_of_file_and_computation(dtype: str, saved: torch.dtype, tmp_path: Path) -> None:
    model = tiny(tmp_path, dtype=saved, gain=1.0).float()
    prompt = ids(40)
    wanted = expected(model, prompt)
    error = (LLM(tmp_path, dtype=dtype).logits(prompt) - wanted).abs().mean() / wanted.std()
    assert error < {"fp32": 1e-5, "fp16": 0.01, "bf16": 0.05}[dtype]


def test_a_matrix_of_two_kinds(tmp_path: Path) -> None:
    """B20: q in int4 beside a k left in float: the fused product must hold both."""
    src, dst, twin = (tmp_path / n for n in ("src", "dst", "twin"))
    tiny(src)
    quantize_ckpt(src, dst, twin, skip=("lm_head", "k_proj", "layers.2.mlp.up_proj"))
    prompt = ids(50)
    llm = LLM(dst, dtype="fp32")
    assert_close(llm.logits(prompt), expected(oracle(twin), prompt), 2e-3)
    assert any("+" in kind for kind in llm.describe()["held_as"])
