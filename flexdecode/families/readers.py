"""Family by family, a Hugging Face config read into a ModelConfig: the other half of a family, and no torch in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from flexdecode.config import (
    Activation,
    AttentionConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
)
from flexdecode.families.reader import ConfigReader
from flexdecode.families.rope import read_rope

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def _activation(r: ConfigReader, key: str = "hidden_act") -> Activation:
    name = r(key)
    if name not in _ACTIVATIONS:
        raise ValueError(f"{r.where}: {key} {name!r} is not supported (known: {', '.join(sorted(_ACTIVATIONS))})")
    return _ACTIVATIONS[name]


def _layer_types(r: ConfigReader, default_sliding: bool = False) -> list[str]:
    """One of _LAYER_TYPES a layer; `default_sliding` decides where the config class has no layer_types."""
    count, types = int(r("num_hidden_layers")), r("layer_types")
    if types is None:
        return ["sliding_attention" if default_sliding else "full_attention"] * count
    if len(types) < count:
        raise ValueError(f"{r.where}: layer_types has {len(types)} entries for {count} layers")
    for kind in types[:count]:
        if kind not in _LAYER_TYPES:
            raise ValueError(f"{r.where}: layer type {kind!r} is not supported (known: {', '.join(_LAYER_TYPES)})")
    return list(types[:count])


def _head_dim(r: ConfigReader) -> int:
    head_dim = r("head_dim")
    if head_dim:
        return int(head_dim)
    hidden, heads = int(r("hidden_size")), int(r("num_attention_heads"))
    if hidden % heads:
        raise ValueError(
            f"{r.where}: hidden_size {hidden} is not a multiple of {heads} heads; the config needs head_dim"
        )
    return hidden // heads


def _rope(r: ConfigReader, head_dim: int, layer_type: str) -> RopeConfig:
    parameters = r("rope_parameters")
    if parameters and all(isinstance(v, dict) for v in parameters.values()):
        parameters = parameters.get(layer_type)
    return read_rope(
        parameters,
        head_dim=head_dim,
        max_position=int(r("max_position_embeddings")),
        original_max_position=r("original_max_position_embeddings"),
        where=r.where,
    )


def _eos(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(x) for x in value) if isinstance(value, list | tuple) else (int(value),)


def decoder(
    r: ConfigReader,
    *,
    types: list[str] | None = None,
    attention: Callable[[int, AttentionConfig], AttentionConfig] = lambda i, a: a,
    feed_forward: Callable[[int], MlpConfig | MoeConfig] | None = None,
    activation_key: str = "hidden_act",
    layer: Callable[[LayerConfig], LayerConfig] = lambda x: x,
    scale: float | None = None,
    **model: Any,
) -> ModelConfig:
    """What all families share. The callables adapt one layer; `model` sets further ModelConfig fields."""
    types = types if types is not None else _layer_types(r)
    head_dim = _head_dim(r)
    heads = int(r("num_attention_heads"))
    kv_heads = int(r("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"{r.where}: {heads} attention heads are not a multiple of {kv_heads} key-value heads")
    window = r("sliding_window")
    ropes = {kind: _rope(r, head_dim, kind) for kind in sorted(set(types))}
    bias = bool(r("attention_bias"))
    if feed_forward is None:
        mlp = MlpConfig(int(r("intermediate_size")), _activation(r, activation_key), bool(r("mlp_bias")))
        feed_forward = lambda i: mlp  # noqa: E731
    layers = []
    for i, kind in enumerate(types):
        if kind == "sliding_attention" and not window:
            raise ValueError(f"{r.where}: layer {i} is {kind} but the config gives no sliding_window")
        base = AttentionConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            rope=ropes[kind],
            window=int(window) if kind == "sliding_attention" else None,
            qkv_bias=bias,
            out_bias=bias,
        )
        layers.append(layer(LayerConfig(attention(i, base), feed_forward(i))))
    config = ModelConfig(
        family=r.model_type,
        vocab_size=int(r("vocab_size")),
        hidden_size=int(r("hidden_size")),
        layers=tuple(layers),
        norm_eps=float(r("rms_norm_eps")),
        max_position=int(r("max_position_embeddings")),
        tie_word_embeddings=bool(r("tie_word_embeddings")),
        bos_token_id=r("bos_token_id") if isinstance(r("bos_token_id"), int) else None,
        eos_token_ids=_eos(r("eos_token_id")),
        dtype=str(r.raw.get("dtype") or r.raw.get("torch_dtype") or "bfloat16").removeprefix("torch."),
    )
    return replace(config, **model)


def llama(r: ConfigReader) -> ModelConfig:
    return decoder(r)


def mistral(r: ConfigReader) -> ModelConfig:
    return decoder(r, types=_layer_types(r, default_sliding=bool(r("sliding_window"))))


def qwen2(r: ConfigReader) -> ModelConfig:
    return decoder(r, attention=lambda i, a: replace(a, qkv_bias=True, out_bias=False))


def qwen3(r: ConfigReader) -> ModelConfig:
    return decoder(r, attention=lambda i, a: replace(a, qk_norm="head"))


def gemma2(r: ConfigReader) -> ModelConfig:
    softcap = r("attn_logit_softcapping")
    return decoder(
        r,
        scale=float(r("query_pre_attn_scalar")) ** -0.5,
        activation_key="hidden_activation",
        attention=lambda i, a: replace(a, softcap=float(softcap) if softcap else None),
        layer=lambda x: replace(x, post_norms=True),
        embedding_multiplier=float(r("hidden_size")) ** 0.5,
        logit_softcap=float(r("final_logit_softcapping")) if r("final_logit_softcapping") else None,
    )


def gemma3(r: ConfigReader) -> ModelConfig:
    config = gemma2(r)
    layers = (replace(x, attention=replace(x.attention, qk_norm="head")) for x in config.layers)
    return replace(config, layers=tuple(layers))


def smollm3(r: ConfigReader) -> ModelConfig:
    has_rope = r("no_rope_layers")
    r("no_rope_layer_interval")
    return decoder(r, attention=lambda i, a: a if has_rope[i] else replace(a, rope=None))


def olmo2(r: ConfigReader) -> ModelConfig:
    return decoder(
        r,
        attention=lambda i, a: replace(a, qk_norm="all"),
        layer=lambda x: replace(x, pre_norms=False, post_norms=True),
    )


def granite(r: ConfigReader) -> ModelConfig:
    residual = float(r("residual_multiplier"))
    return decoder(
        r,
        scale=float(r("attention_multiplier")),
        layer=lambda x: replace(x, residual_multiplier=residual),
        embedding_multiplier=float(r("embedding_multiplier")),
        logit_divisor=float(r("logits_scaling")),
    )


def mixtral(r: ConfigReader) -> ModelConfig:
    moe = MoeConfig(
        experts=int(r("num_local_experts")),
        experts_per_token=int(r("num_experts_per_tok")),
        intermediate_size=int(r("intermediate_size")),
        activation=_activation(r),
    )
    types = _layer_types(r, default_sliding=bool(r("sliding_window")))
    return decoder(r, types=types, feed_forward=lambda i: moe)


def qwen3_moe(r: ConfigReader) -> ModelConfig:
    moe = MoeConfig(
        experts=int(r("num_experts")),
        experts_per_token=int(r("num_experts_per_tok")),
        intermediate_size=int(r("moe_intermediate_size")),
        activation=_activation(r),
        normalize=bool(r("norm_topk_prob")),
    )
    mlp = MlpConfig(int(r("intermediate_size")), _activation(r))
    dense, every = set(r("mlp_only_layers") or ()), int(r("decoder_sparse_step") or 1)

    def feed_forward(i: int) -> MlpConfig | MoeConfig:
        return mlp if i in dense or (i + 1) % every else moe

    return decoder(
        r,
        types=_layer_types(r, default_sliding=bool(r("sliding_window"))),
        attention=lambda i, a: replace(a, qk_norm="head"),
        feed_forward=feed_forward,
    )


def gpt_oss(r: ConfigReader) -> ModelConfig:
    moe = MoeConfig(
        experts=int(r("num_local_experts")),
        experts_per_token=int(r("num_experts_per_tok")),
        intermediate_size=int(r("intermediate_size")),
        activation="clamped_swiglu",
        bias=True,
        router_bias=True,
        select_first=True,
        swiglu_alpha=float(r("swiglu_alpha") or 1.702),
        swiglu_limit=float(r("swiglu_limit") or 7.0),
    )
    _activation(r)
    return decoder(r, attention=lambda i, a: replace(a, sinks=True), feed_forward=lambda i: moe)


assert set(_ACTIVATIONS.values()) <= set(get_args(Activation))
