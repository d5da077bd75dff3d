"""A layer's attention: project, normalize, rotate, write the cache, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from flexdecode.attention.attend import Backends, attend
from flexdecode.attention.cache import KVCache, Slots
from flexdecode.attention.plan import AttentionPlan
from flexdecode.attention.scores import ScoreMod
from flexdecode.config import AttentionConfig
from flexdecode.kernels import ops
from flexdecode.models.linear import Linear
from flexdecode.models.norm import RMSNorm
from flexdecode.models.rope import rotate


@dataclass(frozen=True)
class Step:
    """What every layer of one step shares: where its keys go, what it reads, how it turns.

    `plans` by the cache's group, `tables` (cos, sin) by the decoder's list of ropes.
    """

    cache: KVCache
    slots: Slots
    plans: tuple[AttentionPlan, ...]
    tables: tuple[tuple[Tensor, Tensor], ...]


class Attention(nn.Module):
    def __init__(
        self,
        config: AttentionConfig,
        index: int,
        rope: int | None,
        qkv: Linear,
        out: Linear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        sinks_H: Tensor | None,
        score: ScoreMod | None,
        backends: Backends,
    ) -> None:
        super().__init__()
        self.config, self.index, self.rope = config, index, rope
        self.qkv, self.out, self.q_norm, self.k_norm = qkv, out, q_norm, k_norm
        self.sinks_H, self.score, self.backends = sinks_H, score, backends

    def forward(self, x_TD: Tensor, step: Step) -> Tensor:
        c = self.config
        tokens = x_TD.shape[0]
        qkv = self.qkv(x_TD).view(tokens, c.heads + 2 * c.kv_heads, c.head_dim)
        q = self._heads(qkv, step)
        plan = step.plans[step.cache.group_of[self.index]]
        o_THD = attend(
            q,
            step.cache,
            self.index,
            plan,
            score=self.score,
            sinks=self.sinks_H,
            scale=c.scale,
            backend=self.backends.few if plan.few else self.backends.many,
        )
        assert isinstance(o_THD, Tensor)
        result: Tensor = self.out(o_THD.reshape(tokens, -1))
        return result

    def _heads(self, qkv: Tensor, step: Step) -> Tensor:
        """Queries ready for attention; keys and values are in the cache."""
        c, tokens = self.config, len(qkv)
        kv, slots_T = step.cache.kv(self.index), step.slots.by_group[step.cache.group_of[self.index]]
        done = ops.finish_heads(
            qkv,
            c.heads,
            c.kv_heads,
            None
            if self.q_norm is None or self.k_norm is None
            else (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps),
            c.qk_norm == "all",
            None if self.rope is None else step.tables[self.rope],
            (kv.k_CSD, kv.v_CSD, kv.k_scale_CS, kv.v_scale_CS),
            slots_T,
        )
        if done:
            return qkv[:, : c.heads]
        v_TCD = qkv[:, c.heads + c.kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qkv[:, : c.heads], qkv[:, c.heads : c.heads + c.kv_heads]
            if c.qk_norm == "all":
                q = self.q_norm(q.reshape(tokens, -1)).view_as(q)
                k = self.k_norm(k.reshape(tokens, -1)).view_as(k)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
            if self.rope is not None:
                cos, sin = step.tables[self.rope]
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        else:
            qk = qkv[:, : c.heads + c.kv_heads]
            if self.rope is not None:
                qk = rotate(qk, *step.tables[self.rope])
            q, k = qk[:, : c.heads], qk[:, c.heads :]
        step.cache.write(self.index, step.slots, k, v_TCD)
        return q
