"""GGUF metadata and tensor names translated to the terms that the families are written in.

GGUF names every architecture's tensors alike, so one table serves all; what differs is listed by architecture. Key
names: the GGUF specification's standardized key-value pairs; what they mean where it is silent, and what a file leaves
out: llama.cpp's converter and its loader. Knows no tensor arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flexdecode.checkpoints.source import Source
from flexdecode.families.gguf_keys import Keys
from flexdecode.families.gguf_rope import rope_parameters
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

# Metadata key (after the architecture's name) -> config key; of every architecture first, then of some.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = ("attention.head_count_kv", "attention.key_length")
_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
# Keys that change no logit, or only beside others: yarn's are read where the scaling is yarn, and shared experts would
# have tensors. Where no window is asked for, no file slides in llama.cpp, whatever it says.
_INERT = """vocab_size tensor_data_layout pooling_type mm.tokens_per_image attention.layer_norm_epsilon
    attention.sliding_window attention.sliding_window_pattern expert_weights_norm expert_shared_count
    expert_shared_feed_forward_length rope.scaling.finetuned rope.scaling.yarn_ext_factor
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    rope.scaling.yarn_log_multiplier""".split()


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture: the family that it is, its name table, further keys and which of them a file must have.

    A `permuted` table is llama.cpp's way of storing q and k for interleaved rotation. Of every `period` layers the
    last is full and the others slide. `largest` is the number of layers of Gemma's 27B model.
    """

    model_type: str
    names: Names = _NAMES
    keys: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    period: int = 0
    largest: int = 0


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", replace(_NAMES, permuted=True), _EXPERTS),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        keys=_EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"},
        required=("expert_count", "expert_used_count"),
    ),
    "gemma2": Architecture("gemma2", _SANDWICH, _SOFTCAPS | _WINDOW, period=2, largest=46),
    "gemma3": Architecture("gemma3_text", _SANDWICH, _SOFTCAPS | _WINDOW, period=6, largest=62),
    "phi3": Architecture("phi3", replace(_NAMES, qkv=("attn_qkv",), gate_up=("ffn_up",)), _WINDOW),
    "smollm3": Architecture("smollm3", replace(_NAMES, permuted=True)),
    "olmo2": Architecture("olmo2", replace(_SANDWICH, attention_pre_norm="", feed_forward_pre_norm="")),
    "granite": Architecture("granite", replace(_NAMES, permuted=True), _SCALES, required=("logit_scale",)),
    "gpt-oss": Architecture(
        "gpt_oss",
        replace(_NAMES, feed_forward_pre_norm="post_attention_norm"),
        _EXPERTS | _WINDOW | {"expert_feed_forward_length": "intermediate_size"},
        required=("expert_count", "expert_used_count", "attention.sliding_window"),
        period=2,
    ),
}


def translate(source: Source) -> tuple[dict[str, Any], Names]:
    """A config dict in Hugging Face keys and the name table. Raises ValueError for an unknown architecture, a key that
    is missing, and for what an architecture's files may say but the families do not serve."""
    arch = source.config.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{source.path}: GGUF architecture {arch!r} is not supported (known: {', '.join(sorted(ARCHITECTURES))})"
        )
    architecture, keys, names = ARCHITECTURES[arch], Keys(source, arch), source.names()
    table = architecture.names
    config: dict[str, Any] = {"model_type": architecture.model_type}
    for key, name in {**_KEYS, **architecture.keys}.items():
        value = keys.shared(key)
        if value is not None:
            config[name] = value
    _require(architecture, config, keys)
    first = table.layer.format(i=0)
    config["vocab_size"] = source.shape(f"{table.embed}.weight")[0]
    config["tie_word_embeddings"] = f"{table.head}.weight" not in names
    config["attention_bias"] = f"{first}{table.qkv[0]}.bias" in names
    config["mlp_bias"] = f"{first}{table.gate_up[0]}.bias" in names
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{role}_token_id"] = source.config.get(f"tokenizer.ggml.{key}_token_id")
    _complete(architecture, config, keys)
    rope = rope_parameters(keys, source, config["head_dim"], config["max_position_embeddings"])
    config["rope_parameters"] = rope
    # transformers lets its Phi3Config's own default come before the one inside.
    config["original_max_position_embeddings"] = rope.get("original_max_position_embeddings")
    return {k: v for k, v in config.items() if v is not None} | keys.rest(_INERT), table


def _require(architecture: Architecture, config: dict[str, Any], keys: Keys) -> None:
    needed = {k: v for k, v in {**_KEYS, **architecture.keys}.items() if k in _KEYS or k in architecture.required}
    if config.get("num_local_experts"):
        needed |= _EXPERTS
    for key, name in needed.items():
        if name not in config and key not in _OPTIONAL:
            raise ValueError(
                f"{keys.where}: metadata key {keys.name(key)} is missing; convert the model again with a current "
                "llama.cpp"
            )


def _complete(architecture: Architecture, config: dict[str, Any], keys: Keys) -> None:
    """What llama.cpp fixes in its code and so leaves out of the file."""
    arch, hidden, heads = keys.arch, config["hidden_size"], config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    head_dim = config.setdefault("head_dim", hidden // heads)
    if keys.shared("attention.value_length") not in (None, head_dim):
        raise ValueError(
            f"{keys.where}: {arch}.attention.value_length is {keys.shared('attention.value_length')} and key_length "
            f"{head_dim}; heads of two sizes are not supported"
        )
    if not keys("attention.causal", True):
        raise ValueError(f"{keys.where}: {arch}.attention.causal is false; only causal models generate text")
    if architecture.period:
        config["layer_types"] = _layer_types(architecture, config, keys)
    if architecture.largest:
        # The 27B models scale by hidden_size / heads, all others by head_dim.
        largest = config["num_hidden_layers"] == architecture.largest
        config["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
    if arch == "gemma3" and not config.get("sliding_window"):  # the converter leaves it out where no layer slides
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if arch == "llama" and config.get("num_local_experts"):
        config["model_type"] = "mixtral"
    if arch == "qwen3moe":
        config["num_experts"], config["norm_topk_prob"] = config.pop("num_local_experts"), True
        config.setdefault("moe_intermediate_size", config["intermediate_size"] // config["num_experts_per_tok"])
    if arch == "olmo2" and keys("attention.sliding_window"):
        raise ValueError(f"{keys.where}: has sliding layers, so it is an Olmo 3, which is not supported; Olmo 2 is")
    if arch == "granite":
        if not keys("rope.scaling.finetuned", True):
            raise ValueError(f"{keys.where}: granite.rope.scaling.finetuned is false (no rotation), not supported")
        for key in ("embedding_multiplier", "residual_multiplier"):  # 0 is llama.cpp's "not given"
            config[key] = config.get(key) or 1.0
        config["attention_multiplier"] = config.get("attention_multiplier") or head_dim**-0.5


def _layer_types(architecture: Architecture, config: dict[str, Any], keys: Keys) -> list[str]:
    """The pattern is a flag for each layer, or a period of which the last layer is full; 0 lets all slide."""
    layers = config["num_hidden_layers"]
    pattern = keys("attention.sliding_window_pattern", architecture.period)
    if isinstance(pattern, list | tuple):
        if len(pattern) < layers:
            raise ValueError(
                f"{keys.where}: {keys.arch}.attention.sliding_window_pattern has {len(pattern)} entries for {layers} "
                "layers"
            )
        sliding = [bool(flag) for flag in pattern[:layers]]
    else:
        sliding = [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in sliding]
