"""The built-in masks: FlexAttention mask_mods that know of themselves which blocks of keys a query sees.

A mask is called as FlexAttention calls a mask_mod, `mask_mod(b, h, q_idx, kv_idx) -> bool tensor`, with absolute
positions. A built-in mask also answers for whole blocks of keys at once (`sees`), so that a plan skips a block that no
query sees and needs no bits for one that all see. How masks combine is in algebra.py, whose names are taken from here.
Knows no cache and no tensor of keys. Shape letters: N blocks, L positions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from flexdecode.attention.algebra import (
    UNBOUNDED,
    And,
    Bools,
    Function,
    Ints,
    Mask,
    MaskMod,
    Not,
    Or,
    PerHead,
    Queries,
    Seen,
    as_mask,
    per_head,
    unknown,
)
from flexdecode.attention.tables import Table, abbreviated, one_line, take
from flexdecode.config import AttentionConfig

__all__ = [
    "UNBOUNDED",
    "And",
    "BlockDiagonal",
    "Bools",
    "Causal",
    "Chunked",
    "Dilated",
    "Document",
    "Function",
    "Ints",
    "Mask",
    "MaskMod",
    "Not",
    "Or",
    "PerHead",
    "Queries",
    "Seen",
    "Sinks",
    "Window",
    "as_mask",
    "block_diagonal",
    "causal",
    "chunked",
    "dilated",
    "document",
    "mask",
    "of",
    "per_head",
    "prefix_lm",
    "sinks",
    "window",
]

_MOST = 2**62  # of any size: its int64 arithmetic with a position cannot overflow


@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """A query sees its own position and all before."""

    rank = 0

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return Seen(first_N < q.stop, stop_N <= q.first + 1)

    @property
    def looks_back(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "causal()"


@dataclass(frozen=True, repr=False)
class Window(Mask):
    """No key `size` or more positions back: with `causal`, exactly `size` keys, the query's own included."""

    size: int
    rank = 1

    def __post_init__(self) -> None:
        _set_whole(self, "size", 1, "a window shows at least 1 key, the query's own")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < self.size

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return Seen(stop_N > q.first - self.size + 1, first_N >= q.stop - self.size)

    def __repr__(self) -> str:
        return f"window({self.size})"


@dataclass(frozen=True, repr=False)
class Chunked(Mask):
    """Positions are cut into chunks of `size`; a query sees its own chunk (Llama 4's local layers)."""

    size: int
    rank = 2

    def __post_init__(self) -> None:
        _set_whole(self, "size", 1, "a chunk holds at least 1 position")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // self.size == kv_idx // self.size

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        size = self.size
        return _same_part(q.first // size, (q.stop - 1) // size, first_N // size, (stop_N - 1) // size)

    def __repr__(self) -> str:
        return f"chunked({self.size})"


@dataclass(frozen=True, repr=False)
class Dilated(Mask):
    """The keys 0, step, 2 · step … positions back, `window` of them."""

    window: int
    step: int
    rank = 3

    def __post_init__(self) -> None:
        _set_whole(self, "window", 1, "the window shows at least 1 key, the query's own")
        _set_whole(self, "step", 1, "a step is at least 1 position")
        _check_most(self, self.window * self.step)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        back = q_idx - kv_idx
        return (back >= 0) & (back < self.window * self.step) & (back % self.step == 0)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        # Every distance back between these two occurs: all can be multiples of a step above 1 only where there is one.
        least, most = q.first - (stop_N - 1), (q.stop - 1) - first_N
        furthest = (self.window - 1) * self.step
        next_multiple = -(-np.clip(least, 0, furthest + 1) // self.step) * self.step
        every = (least >= 0) & (most <= furthest)
        if self.step > 1:
            every &= (least == most) & (least % self.step == 0)
        return Seen(next_multiple <= np.minimum(most, furthest), every)

    def __repr__(self) -> str:
        return f"dilated({self.window}, {self.step})"


@dataclass(frozen=True, repr=False)
class Sinks(Mask):
    """The first `size` keys, for every query (StreamingLLM: Xiao et al., 2023)."""

    size: int
    rank = 4

    def __post_init__(self) -> None:
        _set_whole(self, "size", 0, "the number of keys is at least 0")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < self.size

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return Seen(first_N < self.size, stop_N <= self.size)

    def __repr__(self) -> str:
        return f"sinks({self.size})"


@dataclass(frozen=True, repr=False)
class BlockDiagonal(Mask):
    """Consecutive blocks of these sizes; a query sees all of its own. The last block goes on without end."""

    sizes: tuple[int, ...]
    rank = 5

    def __post_init__(self) -> None:
        sizes = tuple(_whole(f"{self}", size, 1, "a block holds at least 1 position") for size in self.sizes)
        if not sizes:
            raise ValueError("block_diagonal([]): wants at least 1 size")
        object.__setattr__(self, "sizes", sizes)
        _check_most(self, sum(sizes))

    @functools.cached_property
    def _begins(self) -> Tensor:
        """Where the second block begins, and each one after it."""
        return torch.tensor(self.sizes[:-1], dtype=torch.int64).cumsum(0)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        begins = self._begins.to(q_idx.device)
        return torch.bucketize(q_idx, begins, right=True) == torch.bucketize(kv_idx, begins, right=True)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        def block(positions: ArrayLike) -> Ints:
            return np.searchsorted(self._begins.numpy(), positions, side="right")

        return _same_part(int(block(q.first)), int(block(q.stop - 1)), block(first_N), block(stop_N - 1))

    def __repr__(self) -> str:
        return f"block_diagonal({abbreviated(self.sizes)})"


@dataclass(frozen=True, repr=False)
class Document(Mask):
    """Packed documents: position i belongs to document ids[i], and a query sees the keys of its own."""

    ids: Table
    rank = 6

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        fault = "document() has {size} ids, and position {index} was asked: give an id to each position of the context"
        return take(self.ids.tensor, q_idx, fault=fault) == take(self.ids.tensor, kv_idx, fault=fault)

    @functools.cached_property
    def _order_L(self) -> Ints:
        """Documents counted as they begin, so that packed ones ascend; one entry more than positions, for reduceat."""
        _, first, number = np.unique(self.ids.tensor.numpy(), return_index=True, return_inverse=True)
        return np.append(np.argsort(np.argsort(first))[number.ravel()], 0)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        order_L, length = self._order_L, self.ids.tensor.numel()
        # There is no query after the last id to promise anything to: the call refuses it.
        stop = length if q.stop == UNBOUNDED else q.stop
        if not 0 <= q.first < stop <= length:
            return unknown(first_N)
        beyond_N = stop_N > length
        edges = np.stack([np.where(beyond_N, 0, first_N), np.where(beyond_N, 1, stop_N)], 1).ravel()
        low_N, high_N = np.minimum.reduceat(order_L, edges)[::2], np.maximum.reduceat(order_L, edges)[::2]
        own = order_L[q.first : stop]
        some, every = _same_part(int(own.min()), int(own.max()), low_N, high_N)
        return Seen(some | beyond_N, every & ~beyond_N)

    def __repr__(self) -> str:
        return f"document({abbreviated(self.ids.tensor.tolist())})"


def causal() -> Mask:
    """A query sees its own position and all before."""
    return Causal()


def window(size: int) -> Mask:
    """Sliding window of `size` keys, the query's own included."""
    return Window(size)


def chunked(size: int) -> Mask:
    """Only the query's own chunk of `size` positions."""
    return Chunked(size)


def dilated(window: int, step: int) -> Mask:
    """Dilated sliding window: the keys at q - k = 0, step, 2 · step … (window - 1) · step; none after the query."""
    return Dilated(window, step)


def sinks(size: int) -> Mask:
    """The first `size` keys, for every query: `causal() & (window(w) | sinks(4))` is StreamingLLM's mask."""
    return Sinks(size)


def prefix_lm(size: int) -> Mask:
    """Causal, and all queries see all of the first `size` keys: `causal() | sinks(size)`."""
    return Causal() | Sinks(size)


def block_diagonal(sizes: Sequence[int]) -> Mask:
    """Consecutive blocks of these sizes, each seen whole from inside and not from outside. The last block goes on: what
    is generated belongs to it."""
    if isinstance(sizes, str | Mask) or not isinstance(sizes, Sequence):
        raise ValueError(f"block_diagonal({one_line(sizes)}): wants a list of sizes")
    return BlockDiagonal(tuple(sizes))


def document(ids: Sequence[int] | Tensor) -> Mask:
    """Packed documents: a query sees the keys of the document that its own position belongs to.

    ids: integers by position, a sequence or a tensor [length]. The call raises ValueError for a position beyond them.
    """
    try:
        numbers = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"document({one_line(ids)}): wants a list of integers, the document of each position"
        ) from None
    if numbers.dim() != 1 or not numbers.numel() or numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise ValueError(
            f"document(): the ids are {numbers.dtype} of shape {tuple(numbers.shape)}, wanted are integers [length]"
        )
    return Document(Table(numbers.to("cpu", torch.int64)))


def mask(fn: MaskMod) -> Mask:
    """A FlexAttention mask_mod as a mask, evaluated as torch does: on scalar indices, under vmap.

    `fn(b, h, q_idx, kv_idx)` returns a 0-d bool tensor. Nothing is skipped on a guess: every key is asked. Raises
    ValueError where `fn` takes other arguments, and when it is evaluated where it does what vmap cannot (`and`, `or`,
    `if`, `int()`), returns something else, or has captured a tensor shorter than the positions that are asked.
    """
    return as_mask(fn)


def of(layer: AttentionConfig) -> Mask:
    """The mask that a model's layer was trained with."""
    mask = causal()
    if layer.window is not None:
        mask &= window(layer.window)
    if layer.chunk is not None:
        mask &= chunked(layer.chunk)
    return mask


def _same_part(q_first: int, q_last: int, k_first_N: Ints, k_last_N: Ints) -> Seen:
    """Where a query sees the keys of its own part: the parts that queries and each block of keys reach over."""
    some = (k_first_N <= q_last) & (k_last_N >= q_first)
    return Seen(some, some & (k_first_N == k_last_N) if q_first == q_last else np.zeros_like(some))


def _whole(what: str, value: object, least: int, wanted: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{what}: {one_line(value)} is no whole number; {wanted}") from None
    if number < least:
        raise ValueError(f"{what}: {wanted}")
    return number


def _set_whole(mask: Mask, name: str, least: int, wanted: str) -> None:
    value = getattr(mask, name)
    object.__setattr__(mask, name, _whole(str(mask), value, least, wanted))
    _check_most(mask, getattr(mask, name))


def _check_most(mask: Mask, reach: int) -> None:
    if reach > _MOST:
        raise ValueError(f"{mask}: reaches {reach} positions, more than {_MOST}")
