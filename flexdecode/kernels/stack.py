"""Layers run one after the other on few tokens, in one call: what the kernels take (cpu/stack.h), checked.

Knows no model: blocks are attention or gated feed-forwards with the norms around them, each added to the residual.
Shape letters: T tokens, D hidden_size, N outputs, H heads, C kv_heads, S slots, r angles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexdecode.kernels import build
from flexdecode.kernels.attention import ALIKE_SPLIT, PackedTiles, ScoreStep, score_arguments
from flexdecode.kernels.linear import Int4Tiles, Int8Tiles
from flexdecode.kernels.point import ACTIVATIONS, Activation

Operand = Int4Tiles | Int8Tiles | Tensor
PHASES = ("norms", "qkv", "rope and cache", "attention", "merging", "out", "gate and up", "down")


@dataclass(frozen=True)
class Matrix:
    """A product's weight: `parts` one below the other, dense ones [n, k] in the activations' dtype; bias fp32 [N]."""

    parts: Sequence[Operand]
    bias: Tensor | None = None


@dataclass(frozen=True)
class Frame:
    """What surrounds a block: x + multiplier · post(block(pre(x))), RMSNorms with fp32 weights [D]; None: no norm."""

    pre: Tensor | None
    post: Tensor | None
    eps: float
    multiplier: float = 1.0


@dataclass(frozen=True)
class AttentionBlock:
    """qkv gives [T, (H + 2C) · head_dim]. Norms of q and k fp32, over each head or (`norm_all`) over all at once.
    `rope` and `group` are numbers among those that a run brings; rope -1 turns nothing."""

    frame: Frame
    qkv: Matrix
    out: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_all: bool
    heads: int
    kv_heads: int
    head_dim: int
    rope: int
    group: int
    scale: float
    steps: Sequence[ScoreStep]
    sinks_H: Tensor | None


@dataclass(frozen=True)
class MlpBlock:
    """down(act(gate) · up), gate_up giving [T, 2I]; `alpha` and `limit` serve clamped_swiglu."""

    frame: Frame
    gate_up: Matrix
    down: Matrix
    activation: Activation
    alpha: float = 1.702
    limit: float = 7.0


class Stack:
    """Blocks in order. One run at a time; its scratch memory is kept from run to run."""

    def __init__(self) -> None:
        build.load()
        self._object = torch.classes.flexdecode.Stack()
        self._count = 0

    def add(self, block: AttentionBlock | MlpBlock) -> int:
        """Its number."""
        f = block.frame
        frame = (_fp32(f.pre), _fp32(f.post), f.eps, f.multiplier)
        if isinstance(block, MlpBlock):
            kind = ACTIVATIONS.index(block.activation)
            self._object.mlp(*frame, _matrix(block.gate_up), _matrix(block.down), kind, block.alpha, block.limit)
        else:
            b = block
            numbers = (b.norm_all, b.heads, b.kv_heads, b.head_dim, b.rope, b.group, b.scale)
            norms = (_fp32(b.q_norm), _fp32(b.k_norm))
            score = score_arguments(b.steps)
            self._object.attention(*frame, _matrix(b.qkv), _matrix(b.out), *norms, *numbers, *score, _fp32(b.sinks_H))
        self._count += 1
        return self._count - 1

    def finish(self, weight_D: Tensor, eps: float) -> None:
        """RMSNorm what comes out of the last block."""
        self._object.finish(_fp32(weight_D), eps)

    def hold(
        self,
        block: int,
        k_CSD: Tensor,
        v_CSD: Tensor,
        k_scale_CS: Tensor | None,
        v_scale_CS: Tensor | None,
        page: int,
    ) -> None:
        """Where the keys and values of an attention block lie from now on."""
        assert k_CSD.stride(2) == v_CSD.stride(2) == 1
        self._object.hold(block, k_CSD, v_CSD, k_scale_CS, v_scale_CS, page)

    def release(self) -> None:
        """Let go of the tensors given to `hold`; each block must be told anew before it runs."""
        self._object.forget()

    def run(
        self,
        x_TD: Tensor,
        first: int,
        last: int,
        groups: Sequence[tuple[Tensor, PackedTiles]],
        ropes: Sequence[tuple[Tensor, Tensor]],
        alike: bool = False,
    ) -> None:
        """Blocks [first, last) on x_TD (fp32, bf16 or fp16, contiguous), in place.

        groups: slots of the new tokens int64 [T] and the packed plan, whose tiles all have few queries. ropes: cos and
        sin, fp32 [T, 1, r]. alike: a token's bits do not depend on what other tokens there are.
        """
        shared: list[Tensor] = []
        for slots_T, p in groups:
            shared += (slots_T, p.tiles, p.table, p.blocks, p.bits_at, p.bits, p.q_idx)
        turns = [table for pair in ropes for table in pair]
        self._object.run(x_TD, first, last, shared, turns, ALIKE_SPLIT if alike else 0, alike)

    def profile(self, on: bool) -> None:
        """Start to tell times by phase from nothing, or stop."""
        self._object.profile(on)

    def times(self) -> dict[str, float]:
        """Seconds by phase since `profile(True)`, as the first thread saw them, waits included."""
        return {name: spent * 1e-9 for name, spent in zip(PHASES, self._object.times(), strict=True)}


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _matrix(matrix: Matrix) -> Any:
    found = torch.classes.flexdecode.Matrix()
    for part in matrix.parts:
        if isinstance(part, Int4Tiles):
            found.add("int4", part.codes, part.scales, part.offsets, part.n, part.k)
        elif isinstance(part, Int8Tiles):
            found.add("int8", part.codes, part.scales, None, part.n, part.k)
        else:
            found.add("dense", part, None, None, part.shape[0], part.shape[1])
    if matrix.bias is not None:
        found.bias(matrix.bias.float().contiguous())
    return found
