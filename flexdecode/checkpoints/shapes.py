"""Known shapes: public configs of models whose speed is worth measuring without their weights, and their tensors.

Configs are in Hugging Face's keys, as the models' own config.json has them. The table of tensors is for these shapes
only; what a real checkpoint holds, its headers tell. Knows no random numbers (`random` makes those).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _keys(**values: Any) -> dict[str, Any]:
    return values


def _llama(**own: Any) -> dict[str, Any]:
    base = _keys(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5,
        attention_bias=False, mlp_bias=False, tie_word_embeddings=False, rope_scaling=None,
    )  # fmt: skip
    return _common(base | own)


def _llama3(factor: float, **own: Any) -> dict[str, Any]:
    scaling = _keys(
        rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    base = _keys(
        vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=scaling,
        bos_token_id=128000, eos_token_id=128001, num_key_value_heads=8,
    )  # fmt: skip
    return _llama(**(base | own))


def _smollm2(**own: Any) -> dict[str, Any]:
    base = _keys(
        vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0
    )
    return _llama(**(base | own))


def _gemma3(**own: Any) -> dict[str, Any]:
    layers = own["num_hidden_layers"]
    base = _keys(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", vocab_size=262144, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1000000.0,
        rope_local_base_freq=10000.0, rope_scaling=None, sliding_window=512, query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh", attention_bias=False, attn_logit_softcapping=None,
        final_logit_softcapping=None, tie_word_embeddings=True, bos_token_id=2, eos_token_id=1, pad_token_id=0,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
    )  # fmt: skip
    return _common(base | own)


def _qwen3(**own: Any) -> dict[str, Any]:
    base = _keys(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1000000.0, rope_scaling=None, hidden_act="silu",
        attention_bias=False, sliding_window=None, use_sliding_window=False,
        max_window_layers=own["num_hidden_layers"], bos_token_id=151643, eos_token_id=151645,
    )  # fmt: skip
    return _common(base | own)


def _common(config: dict[str, Any]) -> dict[str, Any]:
    return {"torch_dtype": "bfloat16", **config}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return _keys(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads
    )


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _llama(
        **_sizes(4096, 11008, 32, 32), num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096,
        rope_theta=10000.0, bos_token_id=1, eos_token_id=2,
    ),
    "llama-3.1-8b": _llama3(8.0, **_sizes(4096, 14336, 32, 32)),
    "llama-3.2-1b": _llama3(32.0, **_sizes(2048, 8192, 16, 32), head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama3(32.0, **_sizes(3072, 8192, 28, 24), head_dim=128, tie_word_embeddings=True),
    "smollm2-135m": _smollm2(**_sizes(576, 1536, 30, 9), num_key_value_heads=3, rope_theta=100000.0),
    "smollm2-1.7b": _smollm2(**_sizes(2048, 8192, 24, 32), num_key_value_heads=32, rope_theta=130000.0),
    "mistral-7b": _common(_keys(
        architectures=["MistralForCausalLM"], model_type="mistral", **_sizes(4096, 14336, 32, 32),
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=32768, sliding_window=4096,
        rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2,
    )),
    "gemma-3-270m": _gemma3(**_sizes(640, 2048, 18, 4)),
    "gemma-3-1b": _gemma3(**_sizes(1152, 6912, 26, 4)),
    "qwen3-0.6b": _qwen3(**_sizes(1024, 3072, 28, 16), tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(**_sizes(2048, 6144, 28, 16), tie_word_embeddings=True),
    "qwen3-8b": _qwen3(**_sizes(4096, 12288, 36, 32), tie_word_embeddings=False),
    "qwen2.5-0.5b": _common(_keys(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", **_sizes(896, 4864, 24, 14), num_key_value_heads=2,
        vocab_size=151936, max_position_embeddings=32768, sliding_window=32768, use_sliding_window=False,
        max_window_layers=24, rms_norm_eps=1e-6, rope_theta=1000000.0, hidden_act="silu", tie_word_embeddings=True,
        bos_token_id=151643, eos_token_id=151643,
    )),
    "phi-3-mini": _common(_keys(
        architectures=["Phi3ForCausalLM"], model_type="phi3", **_sizes(3072, 8192, 32, 32), num_key_value_heads=32,
        vocab_size=32064, max_position_embeddings=4096, original_max_position_embeddings=4096, sliding_window=2047,
        rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, hidden_act="silu", tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=32000, pad_token_id=32000,
    )),
    "tiny": _llama(
        **_sizes(128, 256, 2, 4), num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=2048,
        rope_theta=10000.0, bos_token_id=1, eos_token_id=2,
    ),
}  # fmt: skip


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a model with such a config, in the order of the model."""
    family, hidden, intermediate = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if family == "phi3":
        layer |= {"self_attn.qkv_proj.weight": (q + 2 * kv, hidden)}
    else:
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            layer[f"self_attn.{name}_proj.weight"] = (rows, hidden)
            if family == "qwen2":
                layer[f"self_attn.{name}_proj.bias"] = (rows,)
    if family in ("qwen3", "gemma3_text"):
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    layer |= {"self_attn.o_proj.weight": (hidden, q), "post_attention_layernorm.weight": (hidden,)}
    if family == "gemma3_text":
        layer |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
    if family == "phi3":
        layer |= {"mlp.gate_up_proj.weight": (2 * intermediate, hidden)}
    else:
        layer |= {"mlp.gate_proj.weight": (intermediate, hidden), "mlp.up_proj.weight": (intermediate, hidden)}
    layer |= {"mlp.down_proj.weight": (hidden, intermediate)}

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes
