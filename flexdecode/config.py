"""What a model is, in numbers: frozen dataclasses that every other room reads and none changes.

Knows no checkpoint, no tensor and no Hugging Face key. A decoder is described layer by layer, so that a family whose
layers differ (Gemma 3's five sliding layers to one full, Qwen2's late windows) needs no code of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "clamped_swiglu"]


class FlexdecodeWarning(UserWarning):
    """Something that a user should know and that is no error."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its scalings, rotating split halves.

    `rotary_dim` is how many of a head's dimensions turn; the rest pass unchanged. `max_position` is the model's
    max_position_embeddings and `original_max_position` the length it was pretrained at; only some types read them.
    """

    theta: float
    rotary_dim: int
    type: RopeType = "default"
    max_position: int = 0
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    # yarn (Peng et al., 2023)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # longrope (Ding et al., 2024)
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # proportional: the share of the angles that turn, the others have frequency 0
    proportion: float = 1.0


@dataclass(frozen=True)
class AttentionConfig:
    """One layer's attention. `window` W shows W keys, the query's own included; `chunk` C shows the query's own
    chunk of C positions. `rope=None` means no position embedding at all (NoPE layers)."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"  # RMSNorm of q and k over each head_dim, or over all heads


@dataclass(frozen=True)
class MlpConfig:
    """Gated feed-forward: down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of gated experts. `normalize` divides the chosen experts' weights by their sum; `select_first` takes the
    softmax over the chosen logits only (gpt-oss) instead of choosing from the softmax over all."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    router_bias: bool = False
    normalize: bool = True
    select_first: bool = False
    # clamped_swiglu only (gpt-oss): (clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate))
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer. The norms present decide the wiring: x + post(attention(pre(x))), then the same with the
    feed-forward; a norm that is absent is the identity. `residual_multiplier` scales what is added (Granite)."""

    attention: AttentionConfig
    feed_forward: MlpConfig | MoeConfig
    pre_norms: bool = True
    post_norms: bool = False
    residual_multiplier: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A whole decoder. `logit_softcap` c maps a logit x to c·tanh(x/c); logits are divided by `logit_divisor`."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_position: int
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # what the checkpoint was written in


@dataclass(frozen=True)
class QuantConfig:
    """How the integers of a checkpoint are stored; `skip` holds the modules left in float, as the file names them."""

    method: Literal["awq", "compressed-tensors"]
    layout: Literal["gemm", "gemv", "gemv_fast", "pack-quantized", "int-quantized"]
    bits: int = 4
    group_size: int = 128  # -1: one group a row
    zero_point: bool = True
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineConfig:
    """What an engine may use. Lengths in tokens; `kv_tokens` is the size of the cache, over all sequences, and
    `kv_tokens_by_group` where groups of layers under different masks have different room, in their order. With
    `prefix_reuse` the keys of what was computed stay in the cache while there is room, for prompts that begin alike."""

    max_context: int
    kv_tokens: int
    page: int = 64
    max_running: int = 64
    prefill_chunk: int = 512
    prefix_reuse: bool = True
    kv_tokens_by_group: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_context", "kv_tokens", "page", "max_running", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
