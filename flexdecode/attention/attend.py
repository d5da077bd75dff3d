"""attend: the one call through which every layer's attention goes, and the choice of who computes it.

Backends are chosen once, at start-up, for what a model's layers need; nothing falls back afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from flexdecode.attention.backends import cpu, flex, reference, sdpa
from flexdecode.attention.cache import KVCache
from flexdecode.attention.plan import AttentionPlan
from flexdecode.attention.request import Backend, Call, Request
from flexdecode.attention.scores import ScoreMod

# In the order of preference. FlexAttention compiles for seconds: it serves those who ask for it.
BACKENDS: tuple[Backend, ...] = (cpu.Cpu(), sdpa.Sdpa(), reference.Reference(), flex.Flex())


@dataclass(frozen=True)
class Backends:
    """What serves a layer, by phase."""

    few: Backend
    many: Backend

    def __str__(self) -> str:
        if self.few is self.many:
            return self.few.name
        return f"{self.few.name} (few queries), {self.many.name} (many)"


def missing_kernels(request: Request) -> str | None:
    """Why the kernels made for a CPU do not serve a CPU's request, or None."""
    return BACKENDS[0].unsupported(request) if request.device == "cpu" else None


def choose_phases(request: Request, wanted: str = "auto") -> Backends:
    """`choose` for both phases of a layer."""
    return Backends(choose(replace(request, phase="few"), wanted), choose(replace(request, phase="many"), wanted))


def choose(request: Request, wanted: str = "auto") -> Backend:
    """The first backend that serves `request`, or the one asked for by name.

    Raises ValueError with the reasons where none does, or where the one asked for cannot.
    """
    names = [backend.name for backend in BACKENDS]
    if wanted != "auto" and wanted not in names:
        raise ValueError(f"attention backend {wanted!r} is not known (known: auto, {', '.join(names)})")
    reasons = {}
    for backend in BACKENDS:
        if wanted not in ("auto", backend.name):
            continue
        reason = backend.unsupported(request)
        if reason is None:
            return backend
        reasons[backend.name] = reason
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"no attention backend serves {request}: {told}")


def attend(
    q_THD: Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    *,
    score: ScoreMod | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the packed queries q_THD [tokens, heads, head_dim] over the cached keys of `layer`.

    sinks [heads] fp32 joins each head's softmax denominator; scale defaults to head_dim ** -0.5. Returns
    [tokens, heads, v_head_dim] in q's dtype, and with `return_lse` the natural-log sum of exponentials, fp32
    [tokens, heads], sinks included. A row that sees nothing gives 0 and -inf (with sinks: the sink). Raises ValueError
    where shapes do not fit, or no backend (or the one given) serves the request.
    """
    tokens, heads, head_dim = q_THD.shape
    if tokens != plan.rows:
        raise ValueError(f"q has {tokens} tokens, the plan {plan.rows}")
    if cache.group_of[layer] != plan.group:
        raise ValueError(f"layer {layer} has the mask {cache.layers[layer].mask}, the plan was made for {plan.mask}")
    shape = cache.layers[layer]
    if heads % shape.kv_heads or head_dim != shape.head_dim:
        raise ValueError(
            f"q has {heads} heads of {head_dim}, layer {layer} caches {shape.kv_heads} kv_heads of {shape.head_dim}"
        )
    if plan.heads not in (None, heads):
        raise ValueError(f"q has {heads} heads, and the plan was made for {plan.heads} (heads=)")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, and q has {heads} heads")
    request = Request(
        heads,
        shape.kv_heads,
        head_dim,
        q_THD.dtype,
        cache.dtype,
        q_THD.device.type,
        score,
        sinks is not None,
        return_lse,
        "few" if plan.few else "many",
    )
    if backend is None:
        backend = choose(request)
    elif (reason := backend.unsupported(request)) is not None:
        raise ValueError(f"attention backend {backend.name} cannot serve {request}: {reason}")
    scale = head_dim**-0.5 if scale is None else scale
    call = Call(q_THD, cache.kv(layer), plan, scale, score, sinks, return_lse)
    out, lse = backend.run(call)
    if return_lse:
        assert lse is not None
        return out, lse
    return out
