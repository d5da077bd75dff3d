"""One decoder layer at a time: read in fp32, run over many sequences, and let go.

Attention goes through `attention.attend`, over a cache that holds the sequences of one chunk and one layer. Documents
are sequences of their own, so none sees another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexdecode.attention.attend import choose_phases
from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.mods import Mods
from flexdecode.attention.plan import plan_attention
from flexdecode.attention.request import Request
from flexdecode.config import LayerConfig, MlpConfig, ModelConfig
from flexdecode.models.attention import Attention, Step
from flexdecode.models.layer import Layer
from flexdecode.models.linear import DenseLinear
from flexdecode.models.load import WeightLoader
from flexdecode.models.mlp import Mlp
from flexdecode.models.moe import Moe
from flexdecode.models.norm import RMSNorm
from flexdecode.models.rope import Rope

CHUNK = 2048  # tokens that go through a layer together, or one sequence where that is longer
NORMS = ("attention_pre_norm", "attention_post_norm", "feed_forward_pre_norm", "feed_forward_post_norm")


class Master(DenseLinear):
    """A matrix in fp32 that multiplies in the dtype of what comes in: rounded for each chunk, and never kept twice."""

    def forward(self, x_TK: Tensor, out: torch.dtype | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x_TK.dtype)
        return F.linear(x_TK, self.weight_NK.to(x_TK.dtype), bias).to(out or x_TK.dtype)


@dataclass
class Weights:
    """A layer's weights in fp32, by target inside the layer. A norm's contain the family's offset."""

    linears: dict[str, DenseLinear]
    norms: dict[str, RMSNorm]
    vectors: dict[str, Tensor]


def read_layer(loader: WeightLoader, config: ModelConfig, index: int, targets: Sequence[str]) -> Weights:
    """Those of the targets that the layer has."""
    at, own = f"layers.{index}.", Weights({}, {}, {})
    for target in targets:
        name = target.removeprefix(at)
        if name.endswith("norm"):
            norm = loader.norm(target, config.norm_eps)
            assert norm is not None
            own.norms[name] = norm
        elif name == "sinks":
            own.vectors[name] = loader.vector(target)
        else:
            linear = loader.linear(target)
            assert isinstance(linear, DenseLinear)
            own.linears[name] = Master(linear.weight_NK, linear.bias)
    return own


class Runner:
    """Runs layers of one model over packed sequences, computing in `dtype`."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        lengths: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.device, self.lengths, self.dtype = config, device, tuple(lengths), dtype
        self._mods = Mods()
        self._ropes: dict[object, Rope] = {}

    def build(self, index: int, weights: Weights) -> Layer:
        """The layer over these very weights: what changes in them changes in it."""
        layer = self.config.layers[index]
        a, ff, linears = layer.attention, layer.feed_forward, weights.linears
        score = self._mods.score_of(a)
        request = Request(a.heads, a.kv_heads, a.head_dim, self.dtype, self.dtype, self.device.type, score, a.sinks)
        attention = Attention(
            a,
            0,
            0 if a.rope is not None else None,
            linears["qkv"],
            linears["out"],
            weights.norms.get("q_norm"),
            weights.norms.get("k_norm"),
            weights.vectors.get("sinks"),
            score,
            choose_phases(request),
        )
        feed_forward: nn.Module
        if isinstance(ff, MlpConfig):
            feed_forward = Mlp(linears["gate_up"], linears["down"], ff.activation)
        else:
            experts = [(linears[f"experts.{e}.gate_up"], linears[f"experts.{e}.down"]) for e in range(ff.experts)]
            feed_forward = Moe(ff, linears["router"], experts)
        return Layer(layer, attention, feed_forward, [weights.norms.get(name) for name in NORMS])

    def run(self, index: int, layer: Layer, hidden_TD: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(rows of `hidden_TD`, what the layer makes of them), chunk by chunk."""
        for rows, lengths in self._chunks():
            x_TD = hidden_TD[rows].to(self.device, self.dtype)
            yield rows, layer(x_TD, self._step(self.config.layers[index], lengths))

    def _chunks(self) -> Iterator[tuple[slice, list[int]]]:
        start, taken = 0, list[int]()
        for length in self.lengths:
            if taken and sum(taken) + length > CHUNK:
                yield slice(start, start + sum(taken)), taken
                start, taken = start + sum(taken), []
            taken = [*taken, length]
        if taken:
            yield slice(start, start + sum(taken)), taken

    def _step(self, layer: LayerConfig, lengths: list[int]) -> Step:
        a, mask = layer.attention, self._mods.mask_of(layer.attention)
        room = sum(-(-length // 64) * 64 for length in lengths)
        shape = CacheLayer(a.kv_heads, a.head_dim, mask)
        cache = KVCache([shape], room, dtype=self.dtype, device=self.device)
        sequences = [cache.new() for _ in lengths]
        slots = cache.append(sequences, lengths)
        plan = plan_attention(cache, sequences, lengths, mask, heads=a.heads, batch=[0] * len(lengths))
        tables: tuple[tuple[Tensor, Tensor], ...] = ()
        if a.rope is not None:
            rope = self._ropes.setdefault(a.rope, Rope(a.rope, self.device))
            positions_T = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
            tables = (rope.tables(positions_T, lengths, lengths),)
        return Step(cache, slots, (plan,), tables)
