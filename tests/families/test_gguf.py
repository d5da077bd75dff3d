"""GGUF files of every architecture against transformers' model of the same weights, logits at every position."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers
from transformers import AutoModelForCausalLM

from flexdecode import LLM, SamplingParams
from flexdecode.checkpoints.open import open_source
from flexdecode.config import ModelConfig, MoeConfig
from flexdecode.families import resolve
from flexdecode.families.gguf import ARCHITECTURES
from tests.checkpoints import BOS, EOS, bytes_to_unicode, tiny
from tests.gguf_files import ARCHITECTURE, MERGED, MERGES, SCALES_AT, convert
from tests.oracles import assert_close, expected, ids, oracle

TOKENS = 60  # well beyond the window of 16
# What a GGUF file of the family implies: Gemma's scale by head_dim, no window in a llama file; and a full layer.
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32, "num_hidden_layers": 7},
    "phi3": {"sliding_window": 16},
    "gpt_oss": {"max_position_embeddings": 4096 * 32},
}


def make(d: Path, family: str, **config: Any) -> Any:
    return tiny(d, family, tokenizer=False, **{**OWN.get(family, {}), **config})


def check(d: Path, path: Path, atol: float = 1e-4, tokens: int = TOKENS) -> LLM:
    """The file at `path` gives the logits of transformers' model in `d`."""
    llm = LLM(path, dtype="fp32", max_context=256)
    assert_close(llm.logits(ids(tokens)), expected(oracle(d), ids(tokens)), atol)
    return llm


def name(value: Any) -> str:
    """Of a parameter, for pytest: families and metadata keys."""
    return (
        value if isinstance(value, str) and value.isidentifier() else ",".join(value if isinstance(value, dict) else [])
    )


def config_of(path: Path) -> ModelConfig:
    return resolve(open_source(path))[0]


def test_every_architecture_is_tested() -> None:
    assert set(ARCHITECTURES) == set(ARCHITECTURE.values())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_1"])
@pytest.mark.parametrize("family", ARCHITECTURE)
def test_dense_types(family: str, kind: str, tmp_path: Path) -> None:
    make(tmp_path, family)
    check(tmp_path, convert(tmp_path, kind))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("family", ARCHITECTURE)
def test_int4_stays_int4(family: str, kind: str, tmp_path: Path) -> None:
    """Every matrix is held in four bits, embedding and head too; the router alone is not, being none in the file."""
    make(tmp_path, family)
    llm = check(tmp_path, convert(tmp_path, kind), atol=2e-3)
    dense = sum(size for held, size in llm.describe()["held_as"].items() if not held.startswith("int4"))
    routers = [x.feed_forward.experts for x in llm.config.layers if isinstance(x.feed_forward, MoeConfig)]
    bias = 1 if family == "gpt_oss" else 0
    assert dense == 4 * sum(routers) * (llm.config.hidden_size + bias)


WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 2}  # K-quants have blocks of 256


@pytest.mark.parametrize("kind", SCALES_AT)
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_k_quants(family: str, kind: str, tmp_path: Path) -> None:
    make(tmp_path, family, **WIDE)
    check(tmp_path, convert(tmp_path, kind))


def test_types_are_mixed(tmp_path: Path) -> None:
    """As in the files of every "Q4_0": a head in Q6_K, and some layers' matrices in more bits than their neighbours."""
    make(tmp_path, "llama", **WIDE)
    kinds = {"layers.1.self_attn.v_proj": "Q8_0", "layers.1.mlp.up_proj": "Q4_1", "lm_head": "Q6_K", "embed": "F16"}
    held = check(tmp_path, convert(tmp_path, "Q4_0", kinds), atol=2e-3).describe()["held_as"]
    assert any("int4" in kind and "float32" in kind for kind in held), held


def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path) -> None:
    make(tmp_path, "gpt_oss")
    held = check(tmp_path, convert(tmp_path, "Q8_0", {"experts": "MXFP4"})).describe()["held_as"]
    assert any("mxfp4" in kind for kind in held), held


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "phi3", "smollm3", "granite", "gemma3_text", "qwen3_moe"]
)
def test_tied_and_untied_heads(family: str, tied: bool, tmp_path: Path) -> None:
    make(tmp_path, family, tie_word_embeddings=tied)
    llm = check(tmp_path, convert(tmp_path, "Q4_0"), atol=2e-3)
    assert ("output.weight" in llm.source.names()) != tied
    assert llm.config.tie_word_embeddings == tied


@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("olmo2", {"attention_bias": True}),
    ],
)
def test_biases(family: str, biases: dict[str, bool], tmp_path: Path) -> None:
    """Granite's code models, which are of the llama architecture, have biases everywhere: those of the feed-forward
    were tensors without a place. The biases of q and k are permuted like their rows."""
    make(tmp_path, family, **biases)
    check(tmp_path, convert(tmp_path))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", {"head_dim": 64}),
        ("llama", {"num_key_value_heads": 4}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
        ("gemma2", {"head_dim": 64, "query_pre_attn_scalar": 64}),
        ("phi3", {"sliding_window": None}),
        ("smollm3", {"num_hidden_layers": 9}),  # two layers without rotation
        ("olmo2", {"num_key_value_heads": 4}),
        ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
        ("gpt_oss", {"num_hidden_layers": 3, "head_dim": 64}),
    ],
)
def test_shapes(family: str, shape: dict[str, Any], tmp_path: Path) -> None:
    make(tmp_path, family, **shape)
    check(tmp_path, convert(tmp_path))


# transformers reads some of these architectures with a part of the metadata: these shapes agree with its defaults.
ITS_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "phi3": {"sliding_window": None},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 7},
}


@pytest.mark.parametrize("family", ITS_OWN)
def test_transformers_reads_the_file_alike(family: str, tmp_path: Path) -> None:
    """The second oracle, which has not seen the folder: tests and loader might share a wrong belief of the format."""
    make(tmp_path, family, **ITS_OWN[family])
    path = convert(tmp_path, "Q4_0")
    alone = tmp_path / "alone"
    alone.mkdir()
    path = path.rename(alone / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        alone, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    assert_close(LLM(path, dtype="fp32").logits(ids(TOKENS)), expected(model.eval(), ids(TOKENS)), 2e-3)


def test_no_count_of_kv_heads_means_one_for_each_head(tmp_path: Path) -> None:
    """Llama 2's first configs do not have the key, so neither have their files; transformers' default for Qwen3 is 32,
    for Gemma 2 it is 4."""
    for family in ("llama", "qwen2", "qwen3", "gemma2"):
        d = tmp_path / family
        make(d, family, num_key_value_heads=4)
        check(d, convert(d, keys={".attention.head_count_kv": None}))


def test_arrays_that_agree_are_one_value(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    keys = {".attention.head_count_kv": [2] * 4, ".attention.head_count": [4] * 4, ".feed_forward_length": [256] * 4}
    check(tmp_path, convert(tmp_path, keys=keys))


def test_rows_beyond_the_tokenizer_count(tmp_path: Path) -> None:
    """Gemma's converter cuts the embedding at the tokenizer's end: the tensor knows the vocabulary's size."""
    make(tmp_path, "gemma2", vocab_size=263, pad_token_id=0)
    assert check(tmp_path, convert(tmp_path)).config.vocab_size == 263


@pytest.mark.parametrize(("family", "largest"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemma_scales_by_its_own_rule(family: str, largest: int, tmp_path: Path) -> None:
    """27B divides by the root of hidden_size / heads, the others by that of head_dim; the file says neither."""
    for layers, scalar in ((largest, 128 // 4), (largest + 1, 16)):
        d = tmp_path / str(layers)
        make(d, family, num_hidden_layers=layers, head_dim=16, intermediate_size=32, query_pre_attn_scalar=scalar)
        config = config_of(convert(d))
        assert {x.attention.scale for x in config.layers} == {scalar**-0.5}
    check(d, d / "model.gguf", tokens=20)


def windows(path: Path) -> list[int | None]:
    return [x.attention.window for x in config_of(path).layers]


def test_which_layers_slide(tmp_path: Path) -> None:
    """By architecture, unless the file has a pattern: a flag for each layer, or a period whose last layer is full."""

    def pattern(family: str, layers: int, **keys: Any) -> list[int | None]:
        d = tmp_path / family
        make(d, family, num_hidden_layers=layers)
        return windows(convert(d, keys={f".attention.sliding_{k}": v for k, v in keys.items()}))

    assert pattern("gemma2", 4) == [16, None, 16, None]
    assert pattern("gpt_oss", 4) == [16, None, 16, None]
    assert pattern("gemma3_text", 7) == [16] * 5 + [None, 16]
    assert pattern("gemma3_text", 7, window_pattern=3) == [16, 16, None, 16, 16, None, 16]
    assert pattern("gemma3_text", 3, window_pattern=0) == [16] * 3
    assert pattern("gemma3_text", 3, window_pattern=1) == [None] * 3
    assert pattern("gpt_oss", 3, window_pattern=[False, True, True]) == [None, 16, 16]
    assert pattern("gemma3_text", 3, window=None) == [None] * 3
    assert pattern("gemma3_text", 3, window=0) == [None] * 3
    assert pattern("gemma2", 2, window=None) == [4096, None]  # llama.cpp's default for Gemma 2
    assert pattern("phi3", 2) == [16, 16]
    assert pattern("phi3", 2, window=0) == [None, None]
    assert pattern("mistral", 2, window=16) == [None, None]
    assert pattern("qwen3", 2, window=16) == [None, None]


def test_a_gemma_3_that_does_not_slide(tmp_path: Path) -> None:
    """Its converter leaves the window out; transformers' default of 4096 is not meant, nor the local base of 10000."""
    make(tmp_path, "gemma3_text", layer_types=["full_attention"] * 7)
    check(tmp_path, convert(tmp_path, keys={".attention.sliding_window": None}))


def test_granite_without_its_scales(tmp_path: Path) -> None:
    """A key that is missing or 0 means llama.cpp's default: the usual attention scale, and no other scaling."""
    make(tmp_path, "granite", attention_multiplier=32**-0.5, embedding_multiplier=1.0, residual_multiplier=1.0)
    for value in (None, 0.0):
        keys = dict.fromkeys((".attention.scale", ".embedding_scale", ".residual_scale"), value)
        check(tmp_path, convert(tmp_path, keys=keys))


@pytest.mark.parametrize(("family", "own"), [("qwen3_moe", {"moe_intermediate_size": 128}), ("gpt_oss", {})])
def test_experts_whose_length_the_file_leaves_out(family: str, own: dict[str, int], tmp_path: Path) -> None:
    """Qwen's are then feed_forward_length / experts used, as in llama.cpp; gpt-oss writes the same number twice."""
    make(tmp_path, family, **own)
    check(tmp_path, convert(tmp_path, keys={".expert_feed_forward_length": None}))


def test_generate_from_the_file_alone(tmp_path: Path) -> None:
    """Text in, text out: the tokenizer, the weights and the end are all in the file."""
    make(tmp_path, "llama", seed=5)
    path = convert(tmp_path, "Q4_0").rename(tmp_path.parent / f"{tmp_path.name}.gguf")
    llm = LLM(path, dtype="fp32")
    assert llm.eos_token_ids == (EOS,)
    assert llm.tokenizer is not None
    alphabet = bytes_to_unicode()
    vocab = {alphabet[b]: b for b in range(256)} | {token: 260 + i for i, token in enumerate(MERGED)}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=MERGES))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    prompt = "the other thing, naïve 日本"
    assert llm.tokenizer.encode("<bos>" + prompt) == [BOS, *rust.encode(prompt).ids]
    assert 261 in rust.encode(prompt).ids
    got = llm.generate(prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    sequence = list(rust.encode(prompt).ids)
    model = oracle(tmp_path)
    for token in got.token_ids:
        logits = expected(model, sequence)[-1]
        assert logits[token] >= logits.max() - 2e-3
        sequence.append(token)
    assert got.text == llm.tokenizer.decode(got.token_ids)


def test_a_file_without_tokenizer_takes_ids(tmp_path: Path) -> None:
    make(tmp_path, "qwen3")
    llm = check(tmp_path, convert(tmp_path, tokenizer=False))
    assert llm.tokenizer is None
    assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4)).token_ids) == 4


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("llama", {"general.architecture": "no_such"}, "'no_such' is not supported (known: gemma2"),
        ("llama", {"general.architecture": None}, "architecture None is not supported"),
        ("llama", {".block_count": None}, "llama.block_count is missing"),
        ("llama", {".context_length": None}, "llama.context_length is missing"),
        ("llama", {".feed_forward_length": None}, "llama.feed_forward_length is missing"),
        ("qwen3", {".attention.layer_norm_rms_epsilon": None}, "qwen3.attention.layer_norm_rms_epsilon is missing"),
        ("mixtral", {".expert_used_count": None}, "llama.expert_used_count is missing"),
        ("qwen3_moe", {".expert_count": None}, "qwen3moe.expert_count is missing"),
        ("gpt_oss", {".attention.sliding_window": None}, "gpt-oss.attention.sliding_window is missing"),
        ("granite", {".logit_scale": None}, "granite.logit_scale is missing"),
        ("llama", {".attention.head_count_kv": [2, 2, 1, 2]}, "head_count_kv differs from layer to layer ([1, 2])"),
        ("llama", {".feed_forward_length": [256, 256, 128, 256]}, "feed_forward_length differs from layer to layer"),
        ("llama", {".attention.value_length": 16}, "value_length is 16 and key_length 32"),
        ("llama", {".attention.causal": False}, "llama.attention.causal is false"),
        ("llama", {".attention.clamp_kqv": 8.0}, "'llama.attention.clamp_kqv' = 8.0 is not understood"),
        ("llama", {".attention.scale": 0.5}, "'llama.attention.scale' = 0.5 is not understood"),
        ("gemma3_text", {".rope.local.freq_base": 10000.0}, "'gemma3.rope.local.freq_base' = 10000.0"),
        ("gpt_oss", {".attention.sliding_window_pattern": [True]}, "pattern has 1 entries for 4 layers"),
        ("olmo2", {".attention.sliding_window": 16}, "Olmo 3, which is not supported"),
        ("granite", {".rope.scaling.finetuned": False}, "finetuned is false"),
    ],
    ids=name,
)
def test_what_is_not_served_is_refused_in_one_line(
    family: str, keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make(tmp_path, family)
    path = convert(tmp_path, keys=keys)
    with pytest.raises(ValueError) as problem:
        config_of(path)
    text = str(problem.value)
    assert words in text
    assert text.startswith(str(path))
    assert "\n" not in text


def test_keys_of_experts_in_a_model_without(tmp_path: Path) -> None:
    """Granite 4's dense models come from a class with experts and leave its keys behind."""
    make(tmp_path, "granite")
    keys = {".expert_count": 0, ".expert_used_count": 0, ".expert_shared_feed_forward_length": 256}
    check(tmp_path, convert(tmp_path, keys=keys))


def test_an_unknown_key_may_be_waved_through(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    path = convert(tmp_path, keys={".fancy.new_key": 3, ".fancy.off": False, ".vocab_size": 264, ".pooling_type": 1})
    with pytest.raises(ValueError, match=r"llama\.fancy\.new_key"):
        LLM(path)
    llm = LLM(path, dtype="fp32", ignore_config=["llama.fancy.new_key"])
    assert_close(llm.logits(ids(20)), expected(oracle(tmp_path), ids(20)))


def test_a_tensor_that_is_missing_or_left_over(tmp_path: Path) -> None:
    make(tmp_path, "llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"tensor 'blk.2.attn_norm.weight' is missing"):
        LLM(convert(tmp_path, keys={".block_count": 3}))
    with pytest.raises(ValueError, match=r"tensor 'blk.1.attn_k.weight' and 8 more has no place"):
        LLM(convert(tmp_path, keys={".block_count": 1}))
    with pytest.raises(ValueError, match=r"attn_k.weight' has shape \[64, 128\], the config asks for \[128, 128\]"):
        LLM(convert(tmp_path, keys={".attention.head_count_kv": None}))


def test_half_the_memory_is_not_lost_to_floats(tmp_path: Path) -> None:
    """Q4_0 is 4.5 bits a weight: with everything in it the model is little larger than the file."""
    make(tmp_path, "llama", hidden_size=256, intermediate_size=512)
    path = convert(tmp_path, "Q4_0")
    llm = LLM(path)
    assert math.isclose(llm.engine.model.weight_bytes, path.stat().st_size, rel_tol=0.25)
