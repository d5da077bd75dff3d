"""GGUF metadata and tensor names translated to the terms that the families are written in.

GGUF names every architecture's tensors alike, so one table serves all; what differs is listed by architecture. Key
names: the GGUF specification's standardized key-value pairs. Knows no tensor arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flexdecode.checkpoints.source import Source
from flexdecode.families.names import Names

_NAMES = Names(
    layer="blk.{i}.",
    embed="token_embd",
    norm="output_norm",
    head="output",
    attention_pre_norm="attn_norm",
    feed_forward_pre_norm="ffn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    out="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    sinks="attn_sinks.weight",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    router="ffn_gate_inp",
    expert_gate_up=("ffn_gate_exps", "ffn_up_exps"),
    expert_down="ffn_down_exps",
    stacked_experts=True,
)
_SANDWICH = replace(_NAMES, attention_post_norm="post_attention_norm", feed_forward_post_norm="post_ffw_norm")


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture: the family that it is, its name table, and the config keys that the metadata leaves out.

    A `permuted` table is llama.cpp's way of storing q and k for interleaved rotation.
    """

    model_type: str
    names: Names = _NAMES
    fixed: tuple[tuple[str, Any], ...] = ()


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", replace(_NAMES, permuted=True)),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", fixed=(("norm_topk_prob", True),)),
    "gemma2": Architecture("gemma2", _SANDWICH),
    "gemma3": Architecture("gemma3_text", _SANDWICH),
    "phi3": Architecture("phi3", replace(_NAMES, qkv=("attn_qkv",), gate_up=("ffn_up",))),
    "smollm3": Architecture("smollm3", replace(_NAMES, permuted=True)),
    "olmo2": Architecture("olmo2", replace(_SANDWICH, attention_pre_norm="", feed_forward_pre_norm="")),
    "granite": Architecture("granite", replace(_NAMES, permuted=True)),
    "gpt-oss": Architecture("gpt_oss", replace(_NAMES, feed_forward_pre_norm="post_attention_norm")),
}

# metadata key (after the architecture's name) -> config key
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def translate(source: Source) -> tuple[dict[str, Any], Names]:
    """A config dict in Hugging Face keys and the name table. Raises ValueError for an unknown architecture."""
    meta = source.config
    arch = str(meta.get("general.architecture"))
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{source.path}: GGUF architecture {arch!r} is not supported (known: {', '.join(sorted(ARCHITECTURES))})"
        )
    architecture = ARCHITECTURES[arch]
    config: dict[str, Any] = {"model_type": architecture.model_type, **dict(architecture.fixed)}
    for key, name in _KEYS.items():
        value = meta.get(f"{arch}.{key}")
        if value is not None:
            config[name] = _scalar(value, f"{source.path}: {arch}.{key}")
    for required in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        if required not in config:
            raise ValueError(f"{source.path}: GGUF metadata gives no {required} for architecture {arch!r}")
    names = source.names()
    table = architecture.names
    config["vocab_size"] = source.shape(f"{table.embed}.weight")[0]
    config["tie_word_embeddings"] = f"{table.head}.weight" not in names
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    first = table.layer.format(i=0)
    config["attention_bias"] = f"{first}{table.qkv[0]}.bias" in names
    config["bos_token_id"] = meta.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = meta.get("tokenizer.ggml.eos_token_id")
    if arch == "llama" and config.get("num_local_experts"):
        config["model_type"] = "mixtral"
    _adapt(arch, config, meta)
    config["rope_parameters"] = _rope(arch, config, source)
    return {k: v for k, v in config.items() if v is not None}, table


def _adapt(arch: str, config: dict[str, Any], meta: Mapping[str, Any]) -> None:
    """What llama.cpp fixes in its code and so leaves out of the file."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if arch in ("gemma2", "gemma3"):
        # The 27B models scale by hidden_size / heads, all others by head_dim.
        largest = {"gemma2": 46, "gemma3": 62}[arch]
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if layers == largest else config["head_dim"]
        period = {"gemma2": 2, "gemma3": 6}[arch]
        config["layer_types"] = [
            "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)
        ]
    if arch == "gpt-oss":
        config["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))
    if arch == "qwen3moe":
        config["num_experts"] = config.pop("num_local_experts")
    if arch in ("llama", "qwen2", "qwen3", "qwen3moe", "smollm3"):
        config.pop("sliding_window", None)  # no file of these architectures slides in llama.cpp
    if arch == "granite":
        for key in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"):
            config.setdefault(key, 1.0)
    if arch != "granite":
        config.pop("attention_multiplier", None)
    if meta.get(f"{arch}.rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        config["partial_rotary_factor"] = meta[f"{arch}.rope.dimension_count"] / config["head_dim"]


def _rope(arch: str, config: dict[str, Any], source: Source) -> dict[str, Any]:
    meta, names = source.config, source.names()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.get(f"{arch}.rope.freq_base", 10000.0)}
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config.pop("partial_rotary_factor")
    kind = meta.get(f"{arch}.rope.scaling.type")
    original = meta.get(f"{arch}.rope.scaling.original_context_length") or config["max_position_embeddings"]
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": meta.get(f"{arch}.rope.scaling.factor", 1.0)}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = original
            if arch == "gpt-oss":
                rope["truncate"] = False
    elif kind not in (None, "none", "longrope"):
        raise ValueError(f"{source.path}: rope scaling {kind!r} is not supported (known: none, linear, yarn, longrope)")
    if "rope_freqs.weight" in names:  # llama 3: a divisor for each frequency
        rope |= _divisors(source, "rope_freqs.weight", "rope_freqs.weight", original) | {"attention_factor": 1.0}
    elif "rope_factors_long.weight" in names:
        rope |= _divisors(source, "rope_factors_short.weight", "rope_factors_long.weight", original)
        if meta.get(f"{arch}.rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = meta[f"{arch}.rope.scaling.attn_factor"]
    if arch == "gemma3":
        # llama.cpp turns the sliding layers at 10000 without scaling, whatever the file says of the others.
        local = {"rope_type": "default", "rope_theta": meta.get(f"{arch}.rope.freq_base_swa", 10000.0)}
        return {"full_attention": rope, "sliding_attention": local}
    return rope


def _divisors(source: Source, short: str, long: str, original: int) -> dict[str, Any]:
    def values(name: str) -> list[float]:
        tensor: Any = source.read(name)
        return [float(x) for x in tensor.flatten().tolist()]

    return {
        "rope_type": "longrope",
        "short_factor": values(short),
        "long_factor": values(long),
        "original_max_position_embeddings": original,
    }


def _scalar(value: Any, where: str) -> Any:
    """Per-layer arrays are understood where all layers agree."""
    if isinstance(value, list | tuple):
        if len(set(value)) != 1:
            raise ValueError(f"{where} differs from layer to layer ({sorted(set(value))}), which is not supported")
        return value[0]
    return value
