"""Where a family's checkpoint keeps each weight of the decoder: the table half of a family, data only.

A module name stands without `.weight` or `.bias`. Several names for one part are row blocks, one below the other, in
that order. `{e}` is an expert's number.
"""

from __future__ import annotations

from dataclasses import dataclass

# Tensors that no weight of the decoder is made of: constants that are recomputed, and GGUF's rotary divisors, which are
# read with the config.
IGNORABLE = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "masked_bias",
    "attn.bias",
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)


@dataclass(frozen=True)
class Names:
    """Names inside one layer (relative to `layer`) and outside (absolute).

    `norm_offset` is added to every norm weight (Gemma's files hold w of 1 + w). `permuted` says that q and k rows are
    stored for interleaved rotation (GGUF of the llama architecture). `packed_experts` says that all experts of a
    layer lie in one tensor, input-major, with gate and up columns interleaved (gpt-oss); `stacked_experts` that they
    lie in one tensor [experts, rows, columns] a name (GGUF). `drop` lists prefixes of tensors that belong to another
    modality than text.
    """

    layer: str = "model.layers.{i}."
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention_pre_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    feed_forward_pre_norm: str = "post_attention_layernorm"
    feed_forward_post_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj")
    expert_down: str = "mlp.experts.{e}.down_proj"
    norm_offset: float = 0.0
    permuted: bool = False
    packed_experts: bool = False
    stacked_experts: bool = False
    drop: tuple[str, ...] = ()


LLAMA = Names()
GEMMA = Names(
    attention_post_norm="post_attention_layernorm",
    feed_forward_pre_norm="pre_feedforward_layernorm",
    feed_forward_post_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)
OLMO2 = Names(
    attention_pre_norm="",
    attention_post_norm="post_attention_layernorm",
    feed_forward_pre_norm="",
    feed_forward_post_norm="post_feedforward_layernorm",
)
PHI3 = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
MIXTRAL = Names(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    expert_down="block_sparse_moe.experts.{e}.w2",
)
GPT_OSS = Names(
    router="mlp.router",
    expert_gate_up=("mlp.experts.gate_up_proj",),
    expert_down="mlp.experts.down_proj",
    packed_experts=True,
)
