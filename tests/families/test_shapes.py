"""Every `random:SHAPE` fits its family: the big ones by their headers, small copies of all with transformers' model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from flexdecode import LLM, SamplingParams
from flexdecode.checkpoints.open import open_source
from flexdecode.checkpoints.shapes import SHAPES
from flexdecode.describe import describe_checkpoint, describe_needs
from flexdecode.families import resolve
from flexdecode.families.rules import check, rules
from tests.oracles import assert_close, expected, ids

WEIGHTS = ("", "@int4", "@int8")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_resolves(shape: str, weights: str) -> None:
    """No tensor is missing, none is left over, and every byte is counted once, without reading a weight."""
    source = open_source(f"random:{shape}{weights}")
    config, names = resolve(source)
    check(rules(config, names, source.names()), names, source)
    report = describe_checkpoint(source, config, names)
    needs = describe_needs(source, config, names, config.max_position, torch.bfloat16, torch.bfloat16, 1)
    assert needs["weights_held_bytes"] == pytest.approx(report["weights_bytes"], rel=0.01)
    assert report["weights_bytes"] == sum(source.nbytes(name) for name in source.names())
    assert report["weights_bytes"] == sum(report["bytes_by_part"].values())
    raw = SHAPES[shape]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    values = raw["num_hidden_layers"] * raw["num_key_value_heads"] * head_dim
    assert report["kv_bytes_per_token"] == 2 * 2 * values  # key and value, bf16
    assert report["tied_embedding"] == raw["tie_word_embeddings"]
    assert config.layers[0].attention.scale == head_dim**-0.5


def test_what_slides_and_what_turns() -> None:
    """The shapes are there to measure attention: their windows and bases must be the models'."""

    def attention(shape: str) -> list[tuple[int | None, float]]:
        layers = resolve(open_source(f"random:{shape}"))[0].layers
        return [(x.attention.window, x.attention.rope.theta) for x in layers if x.attention.rope is not None]

    assert set(attention("llama-2-7b")) == {(None, 10000.0)}
    assert set(attention("llama-3.1-8b")) == {(None, 500000.0)}
    assert set(attention("mistral-7b")) == {(4096, 10000.0)}
    assert set(attention("phi-3-mini")) == {(2047, 10000.0)}
    assert set(attention("qwen2.5-0.5b")) == {(None, 1000000.0)}
    assert attention("gemma-3-1b")[4:7] == [(512, 10000.0), (None, 1000000.0), (512, 10000.0)]
    llama3 = resolve(open_source("random:llama-3.2-1b"))[0].layers[0].attention.rope
    assert llama3 is not None
    assert (llama3.type, llama3.factor, llama3.original_max_position) == ("llama3", 32.0, 8192)


def small(shape: str) -> dict[str, Any]:
    """The shape's config with small numbers: its family, biases, windows, bases and ties as they are."""
    raw = dict(SHAPES[shape])
    ratio = raw["num_attention_heads"] // raw["num_key_value_heads"]
    numbers: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 7 if "layer_types" in raw else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": max(1, 4 // ratio),
        "vocab_size": 512,
        "max_position_embeddings": 512,
    }
    own: dict[str, Any] = {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    own |= {"max_window_layers": numbers["num_hidden_layers"], "sliding_window": raw.get("sliding_window") and 16}
    if "layer_types" in raw:
        numbers["layer_types"] = raw["layer_types"][:7]
    return raw | numbers | {key: value for key, value in own.items() if key in raw}


def float_twin(source: Any) -> Any:
    """transformers' model with the source's weights."""
    config = dict(source.config)
    cls = getattr(transformers, config["architectures"][0])
    keys = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    model = cls(cls.config_class(**keys, attn_implementation="eager"))
    weights = {name: source.read(name) for name in source.names()}
    floats = {k: w.float() if isinstance(w, torch.Tensor) else w.dequantize() for k, w in weights.items()}
    missing, unexpected = model.load_state_dict(floats, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if config["tie_word_embeddings"] else [])
    return model.eval()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_small_copy_computes_what_transformers_does(
    shape: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "small", small(shape))
    llm = LLM(f"random:small{weights}", dtype="fp32")
    prompt = ids(60, vocab=512)
    assert_close(llm.logits(prompt), expected(float_twin(llm.source), prompt), 2e-3 if weights else 1e-4)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_tiny_generates(weights: str) -> None:
    """From its name to tokens, prefill and decoding, and the same ones every time."""
    llm = LLM(f"random:tiny{weights}")
    assert llm.tokenizer is None
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    first, second = (llm.generate(ids(30, vocab=512), params).token_ids for _ in range(2))
    assert len(first) == 40
    assert first == second
    assert all(0 <= token < 512 for token in first)
    assert len(set(first)) > 1
    kinds = {kind.split()[0] for kind in llm.describe()["held_as"]}
    assert kinds == {weights.removeprefix("@") or "bfloat16"}
    assert torch.isfinite(llm.logits(ids(30, vocab=512))).all()
