"""A decoder's layers as one call to the kernels, for steps of few tokens; halves of layers that the kernels cannot run
(a mixture of experts, a score of the user's) run as modules in between.

Decoding is a race against overhead: a small model's product takes ten microseconds, and so does a call from Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from flexdecode.attention.backends import cpu
from flexdecode.attention.cache import KVCache
from flexdecode.attention.scores import steps
from flexdecode.config import LayerConfig
from flexdecode.kernels import ops
from flexdecode.models.attention import Attention, Step
from flexdecode.models.layer import Layer
from flexdecode.models.linear import Linear
from flexdecode.models.mlp import Mlp
from flexdecode.models.norm import RMSNorm

MOST_TOKENS = 64  # of a step; beyond, products are better served by matrix products over all tokens

Half = Callable[[Tensor, Step], Tensor]


class LayerStack:
    """Runs `layers` from first to last, and the `norm` behind them. `groups[i]` is the cache's group of layer i."""

    def __init__(
        self,
        configs: Sequence[LayerConfig],
        layers: Sequence[Layer],
        norm: RMSNorm,
        groups: Sequence[int],
        batch_invariant: bool = False,
    ) -> None:
        self.kernel = ops.Stack()
        self._alike = batch_invariant
        self._groups = tuple(groups)
        self._attention: dict[int, int] = {}  # layer -> block
        self._parts: list[tuple[int, int] | Half] = []  # runs of blocks, and halves of layers between
        self._cache: KVCache | None = None
        kinds = [kind for layer in layers for module in layer.modules() for kind in _dense(module)]
        self.most_tokens = ops.DENSE_ROWS if any(kinds) else MOST_TOKENS
        for i, (config, layer) in enumerate(zip(configs, layers, strict=True)):
            attention = _attention(config, layer, groups[i])
            if attention is not None:
                self._attention[i] = self.kernel.add(attention)
                self._extend(self._attention[i])
            else:
                self._parts.append(layer.attend)
            mlp = _mlp(config, layer)
            if mlp is not None:
                self._extend(self.kernel.add(mlp))
            else:
                self._parts.append(layer.feed)
        if isinstance(self._parts[-1], tuple):
            self.kernel.finish(norm.weight, norm.eps)
        else:
            self._parts.append(lambda x_TD, _: norm(x_TD))

    @property
    def whole(self) -> bool:
        """Whether the kernels run all of it."""
        return len(self._parts) == 1 and self.useful

    @property
    def useful(self) -> bool:
        """Whether anything is run by the kernels at all."""
        return any(isinstance(part, tuple) for part in self._parts)

    def _extend(self, block: int) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, tuple):
            self._parts[-1] = (last[0], block + 1)
        else:
            self._parts.append((block, block + 1))

    def serves(self, tokens: int, step: Step) -> bool:
        """Whether a step is small enough: its sequences have few queries each, and not too many together."""
        return tokens <= self.most_tokens and all(plan.few for plan in step.plans)

    def run(self, x_TD: Tensor, step: Step) -> Tensor:
        """Final hidden states [T, D], normalized; maybe x_TD itself, changed."""
        if self._cache is not step.cache:
            self._bind(step.cache)
        groups = [(step.slots.by_group[i], cpu.packed(plan)) for i, plan in enumerate(step.plans)]
        for part in self._parts:
            if isinstance(part, tuple):
                x_TD = x_TD.contiguous()
                self.kernel.run(x_TD, *part, groups, step.tables, self._alike)
            else:
                x_TD = part(x_TD, step)
        return x_TD

    def _bind(self, cache: KVCache) -> None:
        assert cache.group_of == self._groups
        self.kernel.release()
        for layer, block in self._attention.items():
            kv = cache.kv(layer)
            self.kernel.hold(block, kv.k_CSD, kv.v_CSD, kv.k_scale_CS, kv.v_scale_CS, kv.page)
        self._cache = cache


def _dense(module: nn.Module) -> list[bool]:
    operands = module.operands() if isinstance(module, Linear) else None
    return [isinstance(operand, Tensor) for operand in operands or ()]


def _attention(config: LayerConfig, layer: Layer, group: int) -> ops.AttentionBlock | None:
    a: Attention = layer.attention
    qkv, out = _matrix(a.qkv), _matrix(a.out)
    known = () if a.score is None else steps(a.score)
    if a.backends.few.name != cpu.Cpu.name or known is None or qkv is None or out is None:
        return None
    c = config.attention
    return ops.AttentionBlock(
        _frame(config, layer.attention_pre, layer.attention_post),
        qkv,
        out,
        None if a.q_norm is None else a.q_norm.weight,
        None if a.k_norm is None else a.k_norm.weight,
        c.qk_norm == "all",
        c.heads,
        c.kv_heads,
        c.head_dim,
        -1 if a.rope is None else a.rope,
        group,
        c.scale,
        known,
        a.sinks_H,
    )


def _mlp(config: LayerConfig, layer: Layer) -> ops.MlpBlock | None:
    ff = layer.feed_forward
    if not isinstance(ff, Mlp):
        return None
    gate_up, down = _matrix(ff.gate_up), _matrix(ff.down)
    if gate_up is None or down is None:
        return None
    return ops.MlpBlock(_frame(config, layer.ff_pre, layer.ff_post), gate_up, down, ff.activation)


def _matrix(module: Linear) -> ops.Matrix | None:
    parts = module.operands()
    return None if parts is None else ops.Matrix(parts, module.bias)


def _frame(config: LayerConfig, pre: RMSNorm | None, post: RMSNorm | None) -> ops.Frame:
    norms = [norm for norm in (pre, post) if norm is not None]
    eps = norms[0].eps if norms else 0.0
    return ops.Frame(
        None if pre is None else pre.weight, None if post is None else post.weight, eps, config.residual_multiplier
    )
