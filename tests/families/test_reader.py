"""Configs as they are found in the wild, each against transformers' reading of the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdecode import LLM
from tests.checkpoints import edit_config, edit_tensors, tiny
from tests.oracles import assert_close, assert_same_logits, expected, ids


def sibling(d: Path, name: str, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """The same weights under another config."""
    other = d.parent / name
    shutil.copytree(d, other)
    edit_config(other, drop, **changes)
    return other


def test_rope_theta_is_read_from_either_spelling(tmp_path: Path) -> None:
    """B01: checkpoints saved by transformers 5 keep theta inside rope_parameters; readers of the old key ran with
    10000. Where both are present the nested one wins, as in transformers."""
    d = tmp_path / "saved"
    model = tiny(d, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert "rope_theta" not in json.loads((d / "config.json").read_text())
    old = sibling(d, "old", ("rope_parameters",), rope_theta=500000.0)
    both = sibling(d, "both", rope_theta=10000.0)
    wrong = sibling(d, "wrong", ("rope_parameters",), rope_theta=10000.0)
    prompt = ids(60)
    wanted = expected(model, prompt)
    for folder in (d, old, both):
        assert_close(LLM(folder, dtype="fp32").logits(prompt), wanted)
    assert (LLM(wrong, dtype="fp32").logits(prompt) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("scaling", [{}, None, "absent"])
def test_a_plain_rope_is_no_scaling(scaling: Any, tmp_path: Path) -> None:
    """B02: rope_parameters is never null in transformers 5; taking its presence for a scaling died with KeyError."""
    d = tmp_path / "d"
    model = tiny(d)
    if scaling == "absent":
        folder = d
    else:
        folder = sibling(d, "edited", ("rope_parameters",), rope_theta=10000.0, rope_scaling=scaling)
    assert_same_logits(folder, model)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("keys", [("type",), ("rope_type",), ("type", "rope_type")])
def test_both_spellings_of_the_rope_type(keys: tuple[str, ...], tmp_path: Path) -> None:
    """B03."""
    d = tmp_path / "d"
    model = tiny(d, rope_scaling={"rope_type": "llama3", **LLAMA3})
    rope = dict.fromkeys(keys, "llama3") | LLAMA3
    folder = sibling(d, "edited", ("rope_parameters",), rope_theta=10000.0, rope_scaling=rope)
    assert_same_logits(folder, model)


def test_an_unknown_rope_type_or_parameter_is_refused(tmp_path: Path) -> None:
    """B03, B04: an unknown type must not mean no scaling, nor an unknown parameter nothing."""
    d = tmp_path / "d"
    tiny(d)
    for rope, word in (
        ({"rope_type": "no_such", "factor": 8.0}, "no_such"),
        ({"rope_type": "linear", "factor": 2.0, "fudge": 3.0}, "fudge"),
        ({"rope_type": "llama3", "factor": 2.0}, "llama3"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 16, "factor": 2.0}, "longrope|3"),
    ):
        edit_config(d, ("rope_parameters",), rope_theta=10000.0, rope_scaling=rope)
        with pytest.raises(ValueError, match=word):
            LLM(d)


@pytest.mark.parametrize("explicit", [{"attention_factor": 1.0}, {}, {"mscale": 1.0, "mscale_all_dim": 0.7}])
def test_yarn_attention_factor(explicit: dict[str, float], tmp_path: Path) -> None:
    """B04: an explicit attention_factor was dropped for 0.1 ln(factor) + 1."""
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, **explicit}
    model = tiny(tmp_path, rope_parameters={"rope_theta": 10000.0, **rope})
    assert_same_logits(tmp_path, model, tokens=40)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
        {"rope_type": "llama3", **LLAMA3},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0 + i / 16 for i in range(16)],
            "long_factor": [2.0 + i for i in range(16)],
        },
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    ids=lambda rope: f"{rope['rope_type']}-{len(rope)}",
)
@pytest.mark.parametrize("tokens", [20, 60])
def test_every_rope_scaling(rope: dict[str, Any], tokens: int, tmp_path: Path) -> None:
    family = "phi3" if "partial_rotary_factor" in rope else "llama"
    model = tiny(tmp_path, family, rope_parameters={"rope_theta": 10000.0, **rope})
    assert_same_logits(tmp_path, model, tokens=tokens)


def test_yarn_does_not_stretch_the_context_twice(tmp_path: Path) -> None:
    """B06: max_position_embeddings of a YaRN model is already the extended length."""
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    tiny(tmp_path, rope_parameters=rope)
    llm = LLM(tmp_path, dtype="fp32")
    assert llm.max_context == 256
    assert llm.logits(ids(256)).shape[0] == 256
    with pytest.raises(ValueError, match=r"257.*256"):
        llm.logits(ids(257))
    with pytest.raises(ValueError, match=r"512.*256"):
        LLM(tmp_path, max_context=512)


def test_gemma3_scales_only_its_full_layers(tmp_path: Path) -> None:
    """B07: a linear factor meant for the full layers was applied to all layers, or to none."""
    old = tmp_path / "old"
    rope = {"rope_type": "linear", "factor": 8.0}
    model = tiny(old, "gemma3_text", num_hidden_layers=6, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=rope)
    assert set(json.loads((old / "config.json").read_text())["rope_parameters"]) == {
        "full_attention",
        "sliding_attention",
    }
    flat = sibling(old, "flat", ("rope_parameters",), rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={**rope})
    for folder in (old, flat):
        assert_same_logits(folder, model, tokens=120)


@pytest.mark.parametrize(
    "window",
    [
        {"use_sliding_window": False},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "max_window_layers": 4},
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ],
    ids=["off", "late", "never", "listed"],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows(family: str, window: dict[str, Any], tmp_path: Path) -> None:
    """B08: the number sliding_window alone says nothing."""
    d = tmp_path / "d"
    model = tiny(d, family, sliding_window=8, **window)
    llm = assert_same_logits(d, model, tokens=40)
    if not window["use_sliding_window"]:
        none = sibling(d, "none", sliding_window=None)
        assert torch.equal(LLM(none, dtype="fp32").logits(ids(40)), llm.logits(ids(40)))


def test_head_dim_is_not_hidden_over_heads(tmp_path: Path) -> None:
    """B09."""
    shapes: list[tuple[str, dict[str, Any]]] = [
        ("qwen3", {"hidden_size": 96, "head_dim": 40}),
        ("mistral", {"hidden_size": 100, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}),
        ("llama", {"head_dim": None}),
    ]
    for family, shape in shapes:
        model = tiny(tmp_path / family, family, **shape)
        assert_same_logits(tmp_path / family, model, tokens=30)


def test_biases_are_read_where_the_config_says_so(tmp_path: Path) -> None:
    """B10: biases were hard-coded away; and a bias that the config denies must not be dropped in silence."""
    d = tmp_path / "d"
    model = tiny(d, attention_bias=True, mlp_bias=True)
    assert_same_logits(d, model)
    denied = sibling(d, "denied", attention_bias=False)
    with pytest.raises(ValueError, match=r"q_proj.bias|k_proj.bias|o_proj.bias|v_proj.bias"):
        LLM(denied)


@pytest.mark.parametrize("caps", [(50.0, 30.0), (None, None)])
def test_gemma2_scale_and_softcaps(caps: tuple[float | None, float | None], tmp_path: Path) -> None:
    """B11: scores are scaled by query_pre_attn_scalar ** -0.5, not by head_dim ** -0.5."""
    model = tiny(
        tmp_path,
        "gemma2",
        query_pre_attn_scalar=144,
        attn_logit_softcapping=caps[0],
        final_logit_softcapping=caps[1],
    )
    assert_same_logits(tmp_path, model, tokens=40)


def test_a_key_that_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    d = tmp_path / "d"
    model = tiny(d)
    for key, value in (("attention_temperature", 0.7), ("rope_interleaved", True), ("qk_clip", {"a": 1})):
        odd = sibling(d, key, **{key: value})
        with pytest.raises(ValueError, match=f"{key}.*--ignore-config {key}"):
            LLM(odd)
        prompt = ids(20)
        assert_close(LLM(odd, dtype="fp32", ignore_config=[key]).logits(prompt), expected(model, prompt))
    harmless = sibling(d, "harmless", future_flag=None, another=False, use_cache=False, initializer_range=0.1)
    assert_same_logits(harmless, model, tokens=20)


def test_a_known_key_with_an_unsupported_value_is_refused(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma2")
    edit_config(tmp_path, use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"num_key_value_heads": 3}, "4 attention heads.*3"),
        ({"num_hidden_layers": 5}, "layers.4"),
        ({"vocab_size": 265}, "264.*265"),
    ],
)
def test_a_wrong_config_is_one_clear_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=words) as caught:
        LLM(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_qwen3_moe_may_keep_some_layers_dense(tmp_path: Path) -> None:
    model = tiny(tmp_path, "qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2, norm_topk_prob=False)
    assert_same_logits(tmp_path, model)


def test_gemma3_inside_a_multimodal_wrapper(tmp_path: Path) -> None:
    """The larger Gemma 3 checkpoints hold a vision tower too; the text model inside is the same."""
    d = tmp_path / "d"
    model = tiny(d, "gemma3_text")
    text = json.loads((d / "config.json").read_text())
    wrapped = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}, "dtype": "float32"}
    (d / "config.json").write_text(json.dumps(wrapped))

    def wrap(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        inner = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        return inner | {"vision_tower.patch.weight": torch.zeros(2, 2), "multi_modal_projector.w": torch.zeros(2)}

    edit_tensors(d, wrap)
    assert_same_logits(d, model)
