"""Rotary scalings in GGUF files, keys and tensors, against transformers' model of the same config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from flexdecode.checkpoints.open import open_source
from flexdecode.config import RopeConfig
from flexdecode.families import resolve
from tests.families.test_gguf import check, make, name
from tests.gguf_files import convert


def rope(path: Path, layer: int = 0) -> RopeConfig:
    found = resolve(open_source(path))[0].layers[layer].attention.rope
    assert found is not None
    return found


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2", "granite", "smollm3"])
def test_the_base(family: str, theta: float, tmp_path: Path) -> None:
    make(tmp_path, family, rope_parameters={"rope_type": "default", "rope_theta": theta})
    check(tmp_path, convert(tmp_path))


def test_no_base_is_10000(tmp_path: Path) -> None:
    """Of Llama 1 and 2, whose files do not have the key; SmolLM3's class has another default in transformers."""
    for family in ("llama", "smollm3"):
        d = tmp_path / family
        make(d, family, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        check(d, convert(d, keys={".rope.freq_base": None}))


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_llama3_as_a_tensor_of_divisors(kind: str, tmp_path: Path) -> None:
    """The file has no key that says llama3: a tensor rope_freqs.weight is all there is of it."""
    make(tmp_path, "llama", rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3})
    check(tmp_path, convert(tmp_path, kind))
    divisors = rope(tmp_path / "model.gguf").long_factor
    assert divisors[0] == 1
    assert divisors[-1] == 8
    assert any(1 < d < 8 for d in divisors)


def test_llama3_never_changes_its_frequencies(tmp_path: Path) -> None:
    """An original_context_length beside the divisors does not make them long-context factors: nothing cached may
    become stale on the way through it, and no attention factor follows from it."""
    make(tmp_path, "llama", rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3})
    path = convert(tmp_path, keys={".rope.scaling.original_context_length": 16})
    check(tmp_path, path)
    assert rope(path).original_max_position == 256
    assert rope(path).attention_factor == 1


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {".rope.scaling.type": None},  # a factor without a type is linear
        {".rope.scaling.type": None, ".rope.scaling.factor": None, ".rope.scale_linear": 4.0},  # the old name
        {".rope.scale_linear": 4.0},
    ],
    ids=["type", "factor alone", "old name", "both names"],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_linear(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    make(tmp_path, family, rope_parameters=LINEAR)
    check(tmp_path, convert(tmp_path, keys=keys))


@pytest.mark.parametrize("keys", [{".rope.scaling.type": "none"}, {".rope.scaling.factor": 1.0}])
def test_a_scaling_that_is_none(keys: dict[str, Any], tmp_path: Path) -> None:
    """With type none the factor is not applied, with factor 1 it changes nothing."""
    make(tmp_path, "llama")
    factor = {".rope.scaling.factor": 4.0, ".rope.scaling.attn_factor": 1.0}
    check(tmp_path, convert(tmp_path, keys=factor | keys))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("own", "keys"),
    [
        ({}, {}),
        ({"beta_fast": 16.0, "beta_slow": 2.0}, {}),
        ({"attention_factor": 1.5}, {}),
        ({"mscale": 1.0, "mscale_all_dim": 0.7}, {".rope.scaling.yarn_log_multiplier": 0.7}),
        ({}, {".rope.scaling.yarn_ext_factor": 1.0, ".rope.scaling.attn_factor": 1.0}),
        ({"attention_factor": 1.25 * (0.1 * math.log(4.0) + 1)}, {
            ".rope.scaling.attn_factor": 1.25, ".rope.scaling.yarn_attn_factor": None,
        }),
        ({"original_max_position_embeddings": 256}, {".rope.scaling.original_context_length": None}),
    ],
    ids=name,
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_yarn(family: str, own: dict[str, float], keys: dict[str, Any], tmp_path: Path) -> None:
    """Betas and the attention factor have keys of their own, which were passed over."""
    make(tmp_path, family, rope_parameters=YARN | own)
    check(tmp_path, convert(tmp_path, keys=keys))


def test_gpt_oss_is_not_truncated(tmp_path: Path) -> None:
    """Its ramp begins and ends between whole dimensions; the file does not say so."""
    make(tmp_path, "gpt_oss")
    path = convert(tmp_path)
    check(tmp_path, path)
    assert not rope(path).truncate
    assert (rope(path).factor, rope(path).original_max_position, rope(path).theta) == (32, 4096, 150000)


@pytest.mark.parametrize("tokens", [20, 60])
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_phi3_long_contexts(share: float, tokens: int, tmp_path: Path) -> None:
    """Factors for each frequency as two tensors, on both sides of the original length; Phi-4-mini turns only three
    quarters of each head."""
    turning = int(16 * share)
    factors = {k: LONG[k][:turning] for k in ("short_factor", "long_factor")}
    parameters = {**LONG, **factors, "rope_theta": 10000.0, "partial_rotary_factor": share}
    make(tmp_path, "phi3", rope_parameters=parameters, original_max_position_embeddings=32)
    check(tmp_path, convert(tmp_path), tokens=tokens)
    assert rope(tmp_path / "model.gguf").rotary_dim == 2 * turning


def test_the_attention_factor_of_long_rope_is_the_files(tmp_path: Path) -> None:
    make(
        tmp_path,
        "phi3",
        rope_parameters={**LONG, "rope_theta": 10000.0, "attention_factor": 1.4, "partial_rotary_factor": 1.0},
        original_max_position_embeddings=32,
    )
    check(tmp_path, convert(tmp_path, keys={".rope.scaling.attn_factor": 1.4, ".rope.scaling.type": "longrope"}))


@pytest.mark.parametrize("tokens", [20, 60])
def test_long_rope_in_a_llama(tokens: int, tmp_path: Path) -> None:
    make(tmp_path, "llama", rope_parameters={**LONG, "rope_theta": 10000.0})
    check(tmp_path, convert(tmp_path, keys={".rope.scaling.original_context_length": 32}), tokens=tokens)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("local", [10000.0, 50000.0, None])
def test_gemma_3_turns_its_sliding_layers_by_another_base(local: float | None, scaled: bool, tmp_path: Path) -> None:
    """The scaling is for the full layers only. Older files leave the local base out, and then it is 10000."""
    sliding = {"rope_type": "default", "rope_theta": local or 10000.0}
    full = {"rope_type": "linear", "factor": 8.0} if scaled else {"rope_type": "default"}
    make(
        tmp_path,
        "gemma3_text",
        rope_parameters={"full_attention": {**full, "rope_theta": 1e6}, "sliding_attention": sliding},
    )
    path = convert(tmp_path, keys={".rope.freq_base_swa": local})
    check(tmp_path, path)
    assert (rope(path, 0).theta, rope(path, 0).type) == (local or 10000.0, "default")
    assert (rope(path, 5).theta, rope(path, 5).factor) == (1e6, 8.0 if scaled else 1.0)


@pytest.mark.parametrize(
    ("parameters", "keys", "words"),
    [
        ({}, {".rope.scaling.type": "dynamic"}, "'dynamic' is not supported (known: none, linear, yarn, longrope)"),
        ({}, {".rope.scaling.type": "longrope"}, "tensor rope_factors_long.weight is missing"),
        ({}, {".rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor is 1.5 with rope scaling none"),
        ({}, {".rope.scaling.alpha": 2.0}, "'llama.rope.scaling.alpha' = 2.0 is not understood"),
        ({}, {".rope.freq_base_swa": 5000.0}, "llama.rope.freq_base_swa is 5000 and freq_base 10000"),
        (YARN, {".rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5; only 1 is supported"),
        (
            {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3},
            {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0},
            "linear beside tensor rope_freqs.weight",
        ),
        (
            {**LONG, "rope_theta": 10000.0},
            {".attention.key_length": 64, ".attention.value_length": 64},
            "short_factor has 16 values, but 64 rotary dimensions need 32",
        ),
    ],
    ids=name,
)
def test_what_is_not_served_is_refused_in_one_line(
    parameters: dict[str, Any], keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make(tmp_path, "llama", rope_parameters=parameters or {"rope_type": "default", "rope_theta": 10000.0})
    path = convert(tmp_path, keys=keys | {".rope.dimension_count": None})
    with pytest.raises(ValueError) as problem:
        rope(path)
    assert words in str(problem.value)
    assert str(problem.value).startswith(str(path))
    assert "\n" not in str(problem.value)
