"""What attention is asked for and what answers: the request by which a backend is chosen, the call that it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from flexdecode.attention.cache import KV
from flexdecode.attention.plan import AttentionPlan
from flexdecode.attention.scores import ScoreMod

Phase = Literal["few", "many"]  # queries of a sequence: reading keys is the work, or multiplying is
VARIES = "its sums change with how many queries come together"  # why a backend cannot be batch-invariant


@dataclass(frozen=True)
class Request:
    """What a layer asks of a backend; errors print it whole."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: str
    score: ScoreMod | None = None
    sinks: bool = False
    return_lse: bool = False
    phase: Phase = "many"
    batch_invariant: bool = False


@dataclass(frozen=True)
class Call:
    """One layer's attention: packed queries [T, H, D] against keys as they lie, under a plan."""

    q_THD: Tensor
    kv: KV
    plan: AttentionPlan
    scale: float
    score: ScoreMod | None = None
    sinks_H: Tensor | None = None
    return_lse: bool = False


class Backend(Protocol):
    """A way to compute attention. `unsupported` gives the reason why a request cannot be served, or None; `run` gives
    out [T, H, v_head_dim] in q's dtype, and lse fp32 [T, H] where the call wants it."""

    name: str

    def unsupported(self, request: Request) -> str | None: ...

    def run(self, call: Call) -> tuple[Tensor, Tensor | None]: ...
