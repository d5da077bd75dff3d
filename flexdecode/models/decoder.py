"""The decoder: embedding, layers, head. One for every family; what differs is in its ModelConfig.

Shape letters: T packed tokens of a step, D hidden_size, V vocab_size, R rows whose logits are wanted.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from flexdecode.attention.attend import Backends, choose_phases, missing_kernels
from flexdecode.attention.cache import CacheLayer, KVCache, Slots
from flexdecode.attention.masks import Mask
from flexdecode.attention.mods import Mods
from flexdecode.attention.plan import plan_attention
from flexdecode.attention.request import Request
from flexdecode.config import AttentionConfig, FlexdecodeWarning, LayerConfig, MlpConfig, ModelConfig
from flexdecode.kernels import ops
from flexdecode.models.attention import Attention, Step
from flexdecode.models.embedding import Embedding, embedding_and_head
from flexdecode.models.layer import Layer
from flexdecode.models.linear import Linear
from flexdecode.models.load import WeightLoader
from flexdecode.models.mlp import Mlp
from flexdecode.models.moe import Moe
from flexdecode.models.norm import RMSNorm
from flexdecode.models.rope import Rope, regime
from flexdecode.models.stack import LayerStack
from flexdecode.quantization.weights import Weight


class Decoder(nn.Module):
    """Token ids of one step to hidden states, and hidden states to logits."""

    def __init__(
        self,
        config: ModelConfig,
        loader: WeightLoader,
        attention: str = "auto",
        kv_dtype: torch.dtype | None = None,
        mods: Mods | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, loader.dtype, loader.device
        self.kv_dtype = kv_dtype or loader.dtype
        self.batch_invariant = loader.batch_invariant
        self.mods = mods or Mods()
        self.masks = tuple(self.mods.mask_of(layer.attention) for layer in config.layers)
        self.mods.check(config.layers[0].attention.heads)
        # Refuse what no backend serves before the first weight is read.
        requests = [self._request(layer.attention) for layer in config.layers]
        backends = [choose_phases(request, attention) for request in requests]
        if attention == "auto" and (reason := missing_kernels(requests[0])) is not None:
            warnings.warn(
                f"attention runs on {backends[0]}, many times slower over a long context: {reason}",
                FlexdecodeWarning,
                stacklevel=3,
            )
        ropes = list(dict.fromkeys(x.attention.rope for x in config.layers if x.attention.rope is not None))
        self.ropes = tuple(Rope(rope, self.device) for rope in ropes)
        embed = loader.matrix("embed")
        layers = [
            self._layer(
                i, layer, loader, backends[i], ropes.index(layer.attention.rope) if layer.attention.rope else None
            )
            for i, layer in enumerate(config.layers)
        ]
        self.layers = cast(list[Layer], nn.ModuleList(layers))
        norm = loader.norm("norm", config.norm_eps)
        assert norm is not None
        self.norm = norm
        self.embed, self.head = embedding_and_head(
            embed, self._head(loader, embed), self.dtype, self.device, self.batch_invariant
        )
        self.stack = self._stack()

    def _request(self, a: AttentionConfig) -> Request:
        return Request(
            a.heads,
            a.kv_heads,
            a.head_dim,
            self.dtype,
            self.kv_dtype,
            self.device.type,
            self.mods.score_of(a),
            a.sinks,
            batch_invariant=self.batch_invariant,
        )

    def _layer(self, i: int, config: LayerConfig, loader: WeightLoader, backend: Backends, rope: int | None) -> Layer:
        at, eps, ff = f"layers.{i}.", self.config.norm_eps, config.feed_forward
        attention = Attention(
            config.attention,
            i,
            rope,
            loader.linear(at + "qkv"),
            loader.linear(at + "out"),
            loader.norm(at + "q_norm", eps),
            loader.norm(at + "k_norm", eps),
            loader.vector(at + "sinks") if config.attention.sinks else None,
            self._request(config.attention).score,
            backend,
        )
        feed_forward: nn.Module
        if isinstance(ff, MlpConfig):
            feed_forward = Mlp(loader.linear(at + "gate_up"), loader.linear(at + "down"), ff.activation)
        else:
            experts = [
                (loader.linear(f"{at}experts.{e}.gate_up"), loader.linear(f"{at}experts.{e}.down"))
                for e in range(ff.experts)
            ]
            feed_forward = Moe(ff, loader.linear(at + "router"), experts)
        order = ("attention_pre_norm", "attention_post_norm", "feed_forward_pre_norm", "feed_forward_post_norm")
        return Layer(config, attention, feed_forward, [loader.norm(at + name, eps) for name in order])

    def _head(self, loader: WeightLoader, embed: Weight) -> Weight | None:
        """The head's matrix, None where it is the embedding's."""
        if loader.head_is_tied():
            return None
        weight = loader.matrix("head")
        return None if loader.same_head(self.config.tie_word_embeddings, embed, weight) else weight

    def _stack(self) -> LayerStack | None:
        """The layers as one call for steps of few tokens, where the CPU kernels serve them."""
        if self.device.type != "cpu" or ops.attend_unsupported("cpu", self.dtype, self.kv_dtype) is not None:
            return None
        masks = list(dict.fromkeys(self.masks))
        groups = [masks.index(mask) for mask in self.masks]
        stack = LayerStack(self.config.layers, self.layers, self.norm, groups, self.batch_invariant)
        return stack if stack.useful else None

    def cache_layers(self) -> list[CacheLayer]:
        """What a KVCache for this decoder must hold."""
        return self.mods.cache_layers(self.config.layers)

    def rope_regime(self, length: int) -> tuple[int, ...]:
        """Changes with the length of a sequence where its cached keys become stale (dynamic and long rope)."""
        return tuple(regime(rope.config, length) for rope in self.ropes)

    def step(
        self, cache: KVCache, slots: Slots, sequences: Sequence[int], counts: Sequence[int], final: Sequence[int]
    ) -> Step:
        """What all layers share for `counts[i]` new tokens of `sequences[i]`, already counted by the cache.

        `final[i]` is the length that decides the rope regime: of the whole prompt while it comes in chunks.
        """
        lengths = [cache.length(s) for s in sequences]
        spans = [np.arange(length - n, length) for length, n in zip(lengths, counts, strict=True)]
        positions_T = torch.from_numpy(np.concatenate(spans))
        # A request's tokens do not depend on its neighbours, so a mod's b says nothing of them.
        batch = [0] * len(sequences)
        plans = tuple(
            plan_attention(
                cache,
                sequences,
                counts,
                group.mask,
                heads=self._heads(group.mask),
                batch=batch,
                batch_invariant=self.batch_invariant,
            )
            for group in cache.groups
        )
        whole = [max(a, b) for a, b in zip(lengths, final, strict=True)]
        tables = tuple(rope.tables(positions_T, whole, list(counts)) for rope in self.ropes)
        return Step(cache, slots, plans, tables)

    @property
    def looks_ahead(self) -> bool:
        """Whether a token may see later ones, so that a prompt cannot come in chunks."""
        return not all(mask.looks_back for mask in self.masks)

    def _heads(self, mask: Mask) -> int:
        """Query heads of the layers under a mask."""
        return self.config.layers[self.masks.index(mask)].attention.heads

    def forward(self, tokens_T: Tensor, step: Step) -> Tensor:
        """Final hidden states [T, D], normalized."""
        x_TD = self.embed(tokens_T)
        if self.config.embedding_multiplier != 1.0:
            x_TD = x_TD * self.config.embedding_multiplier
        if self.stack is not None and self.stack.serves(len(tokens_T), step):
            return self.stack.run(x_TD, step)
        for layer in self.layers:
            x_TD = layer(x_TD, step)
        out: Tensor = self.norm(x_TD)
        return out

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """fp32 [R, V]."""
        c = self.config
        logits_RV: Tensor = self.head(hidden_RD, torch.float32)
        if c.logit_divisor != 1.0:
            logits_RV = logits_RV / c.logit_divisor
        if c.logit_softcap is not None:
            logits_RV = torch.tanh(logits_RV / c.logit_softcap) * c.logit_softcap
        return logits_RV

    @property
    def weight_bytes(self) -> int:
        """Bytes held as weights; where head and embedding share memory, once."""
        shared = self.embed.weight is getattr(self.head, "weight_NK", None)
        return _nbytes(self) - (self.embed.nbytes if shared else 0)


def _nbytes(module: nn.Module) -> int:
    if isinstance(module, Linear | Embedding):
        return module.nbytes  # counts its own parts
    if isinstance(module, RMSNorm):
        return module.weight.nbytes
    return sum(_nbytes(child) for child in module.children())
