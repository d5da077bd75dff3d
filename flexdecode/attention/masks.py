"""Masks: FlexAttention mask_mods that also know their span.

A mask is called as `mask(b, h, q_idx, kv_idx)` with broadcastable integer tensors and returns a bool tensor; q_idx and
kv_idx are absolute positions in the sequence, always. Beside that a mask tells, for one query position, an interval
outside which no key is visible and whether every key inside is, so that nothing has to be read to know what can be
skipped. Masks compare and hash by value: layers with equal masks share a plan and a page table.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from flexdecode.config import AttentionConfig

UNBOUNDED = sys.maxsize


class Span(NamedTuple):
    """Keys in [start, stop) may be visible, none outside is; `full` says that all inside are."""

    start: int
    stop: int
    full: bool


class Mask:
    """Base of the built-in masks. `m & n` shows what both show."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        raise NotImplementedError

    def span(self, q: int) -> Span:
        """The span of the query at position `q`."""
        raise NotImplementedError

    def horizon(self, q: int) -> int:
        """The first key that any query at position `q` or later can see: keys before it may be forgotten."""
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees its own position and all before."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx

    def span(self, q: int) -> Span:
        return Span(0, q + 1, True)

    def horizon(self, q: int) -> int:
        return 0


@dataclass(frozen=True)
class Window(Mask):
    """No key `size` or more positions back: with `causal`, exactly `size` keys, the query's own included."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"window({self.size}): a window shows at least 1 key, the query's own")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < self.size

    def span(self, q: int) -> Span:
        return Span(max(0, q - self.size + 1), UNBOUNDED, True)

    def horizon(self, q: int) -> int:
        return max(0, q - self.size + 1)


@dataclass(frozen=True)
class Chunked(Mask):
    """Positions are cut into chunks of `size`; a query sees its own chunk (Llama 4's local layers)."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"chunked({self.size}): a chunk holds at least 1 position")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // self.size == kv_idx // self.size

    def span(self, q: int) -> Span:
        start = q - q % self.size
        return Span(start, start + self.size, True)

    def horizon(self, q: int) -> int:
        return q - q % self.size


@dataclass(frozen=True)
class And(Mask):
    """Visible where both are."""

    left: Mask
    right: Mask

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.left(b, h, q_idx, kv_idx) & self.right(b, h, q_idx, kv_idx)

    def span(self, q: int) -> Span:
        a, b = self.left.span(q), self.right.span(q)
        start = max(a.start, b.start)
        return Span(start, max(start, min(a.stop, b.stop)), a.full and b.full)

    def horizon(self, q: int) -> int:
        return max(self.left.horizon(q), self.right.horizon(q))


def causal() -> Mask:
    """A query sees its own position and all before."""
    return Causal()


def window(size: int) -> Mask:
    """Sliding window of `size` keys, the query's own included."""
    return Window(size)


def chunked(size: int) -> Mask:
    """Only the query's own chunk of `size` positions."""
    return Chunked(size)


def of(layer: AttentionConfig) -> Mask:
    """The mask that a model's layer was trained with."""
    mask = causal()
    if layer.window is not None:
        mask &= window(layer.window)
    if layer.chunk is not None:
        mask &= chunked(layer.chunk)
    return mask
