"""What a mask is, and how masks combine: `&`, `|`, `~`, one mask for each head, and plain functions as masks.

Masks are values: they compare by what they were made of, plain functions by identity, and print as the expression that
makes them. Operands are kept in one order and without repeats, so that equal expressions are equal masks. Knows none of
the built-in masks. Shape letters: N blocks, Q queries, L keys, H heads.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexdecode.attention.functions import check_parameters, identity, mask_values, name_of
from flexdecode.attention.tables import one_line, take

UNBOUNDED = sys.maxsize

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Queries(NamedTuple):
    """Positions first … stop - 1; stop may be UNBOUNDED: every later query."""

    first: int
    stop: int


class Seen(NamedTuple):
    """For each block: whether any query may see any of its keys, and whether every query sees every one.

    Both are promises: where `some` is False nothing is visible, where `every` is True all is. What lies between is
    evaluated key by key.
    """

    some: Bools
    every: Bools


def unknown(first_N: Ints) -> Seen:
    """No promise, for as many blocks."""
    return Seen(np.ones(len(first_N), bool), np.zeros(len(first_N), bool))


class Mask:
    """Base of the masks. `m & n` shows what both show, `m | n` what either does, `~m` what m hides; one side may be a
    plain function."""

    rank: ClassVar[int] = 100  # place among the operands of `&` and `|`

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """bool, broadcastable to [Q, L], or to [H, Q, L] where heads differ.

        All int64: b 0-d, h 0-d or [H, 1, 1], q_idx [Q, 1], kv_idx [L]; or all of them 0-d, as torch's vmap has them.
        """
        raise NotImplementedError

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        """What the queries `q`, of whatever head, see of the blocks of keys [first, stop), none of them empty.

        Promises nothing here, which is right for any mask.
        """
        return unknown(first_N)

    @property
    def per_head(self) -> bool:
        """Whether heads may see different keys; `head` then gives each its own mask."""
        return False

    @property
    def looks_back(self) -> bool:
        """Whether it is certain that no query sees a key behind its own position."""
        return False

    def head(self, h: int) -> Mask:
        """The mask of query head `h`."""
        return self

    def check_heads(self, heads: int) -> None:
        """Raises ValueError where the mask was made for another number of query heads."""

    def __and__(self, other: Mask | MaskMod) -> Mask:
        return _join(And, (self, as_mask(other))) if callable(other) else NotImplemented

    def __or__(self, other: Mask | MaskMod) -> Mask:
        return _join(Or, (self, as_mask(other))) if callable(other) else NotImplemented

    def __rand__(self, other: MaskMod) -> Mask:
        return self & other

    def __ror__(self, other: MaskMod) -> Mask:
        return self | other

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise ValueError(f"{self} has no truth value: combine masks with & | ~ instead of and, or, not")


@dataclass(frozen=True)
class _Joined(Mask):
    """Two or more operands, none of them of the same kind. `&` and `|` make them so."""

    parts: tuple[Mask, ...]

    @property
    def per_head(self) -> bool:
        return any(part.per_head for part in self.parts)

    def head(self, h: int) -> Mask:
        return _join(type(self), [part.head(h) for part in self.parts]) if self.per_head else self

    def check_heads(self, heads: int) -> None:
        for part in self.parts:
            part.check_heads(heads)


@dataclass(frozen=True, repr=False)
class And(_Joined):
    """Visible where all are."""

    rank = 90

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return functools.reduce(operator.and_, (part(b, h, q_idx, kv_idx) for part in self.parts))

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        seen = [part.sees(q, first_N, stop_N) for part in self.parts]
        return Seen(np.logical_and.reduce([s.some for s in seen]), np.logical_and.reduce([s.every for s in seen]))

    @property
    def looks_back(self) -> bool:
        return any(part.looks_back for part in self.parts)

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Or(_Joined):
    """Visible where any is."""

    rank = 91

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return functools.reduce(operator.or_, (part(b, h, q_idx, kv_idx) for part in self.parts))

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        seen = [part.sees(q, first_N, stop_N) for part in self.parts]
        return Seen(np.logical_or.reduce([s.some for s in seen]), np.logical_or.reduce([s.every for s in seen]))

    @property
    def looks_back(self) -> bool:
        return all(part.looks_back for part in self.parts)

    def __repr__(self) -> str:
        return " | ".join(map(str, self.parts))


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Visible where `mask` is not."""

    mask: Mask
    rank = 92

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.mask(b, h, q_idx, kv_idx)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        some, every = self.mask.sees(q, first_N, stop_N)
        return Seen(~every, ~some)

    @property
    def per_head(self) -> bool:
        return self.mask.per_head

    def head(self, h: int) -> Mask:
        return ~self.mask.head(h)

    def check_heads(self, heads: int) -> None:
        self.mask.check_heads(heads)

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, _Joined) else f"~{self.mask}"


@dataclass(frozen=True, repr=False)
class PerHead(Mask):
    """Query head h has the mask masks[h]."""

    masks: tuple[Mask, ...]
    rank = 93

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(q_idx.shape, kv_idx.shape)
        if h.dim():
            heads = [(self.head(int(i)), i) for i in h.flatten()]
            distinct = dict.fromkeys(mask for mask, _ in heads if not mask.per_head)
            alike = {mask: mask(b, h, q_idx, kv_idx) for mask in distinct}
            if len(alike) == 1 and all(mask in alike for mask, _ in heads):
                return next(iter(alike.values()))
            answers = [alike[mask] if mask in alike else mask(b, i, q_idx, kv_idx) for mask, i in heads]
            return torch.stack([answer.expand(shape) for answer in answers])
        try:
            number = int(h)
        except RuntimeError:  # under vmap, where an index has no value to choose by
            answers = [mask(b, h, q_idx, kv_idx).expand(shape) for mask in self.masks]
            return take(torch.stack(answers), h, fault=_TOO_FEW)
        return self.head(number)(b, h, q_idx, kv_idx)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        seen = [mask.sees(q, first_N, stop_N) for mask in dict.fromkeys(self.masks)]
        return Seen(np.logical_or.reduce([s.some for s in seen]), np.logical_and.reduce([s.every for s in seen]))

    @property
    def looks_back(self) -> bool:
        return all(mask.looks_back for mask in self.masks)

    @property
    def per_head(self) -> bool:
        return True

    def head(self, h: int) -> Mask:
        if not 0 <= h < len(self.masks):
            raise ValueError(_TOO_FEW.format(size=len(self.masks), index=h))
        return self.masks[h].head(h)

    def check_heads(self, heads: int) -> None:
        if heads != len(self.masks):
            raise ValueError(
                f"per_head() has {len(self.masks)} masks, and there are {heads} query heads: give one for each"
            )
        for mask in self.masks:
            mask.check_heads(heads)

    def __repr__(self) -> str:
        return f"per_head([{', '.join(map(str, self.masks))}])"


_TOO_FEW = "per_head() has {size} masks, and query head {index} was asked: give one for each head"


@dataclass(frozen=True, repr=False, eq=False)
class Function(Mask):
    """A FlexAttention mask_mod: it is asked about every key, since nothing else is known of it."""

    fn: MaskMod
    rank = 94

    def __post_init__(self) -> None:
        check_parameters(self.fn, "mask")

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_values(self.fn, b, h, q_idx, kv_idx)

    @property
    def per_head(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and identity(self.fn) == identity(other.fn)

    def __hash__(self) -> int:
        return hash(identity(self.fn))

    def __repr__(self) -> str:
        return f"mask({name_of(self.fn)})"


def as_mask(x: Mask | MaskMod) -> Mask:
    """`x` itself if it is a mask, else the plain function as one. Raises ValueError where it is neither."""
    if isinstance(x, Mask):
        return x
    if not callable(x):
        raise ValueError(
            f"{one_line(x)} is no mask: use flexdecode.masks, or a function (b, h, q_idx, kv_idx) -> bool tensor"
        )
    return Function(x)


def per_head(masks: Sequence[Mask | MaskMod]) -> Mask:
    """Query head h has masks[h], a mask or a plain function; as many masks as query heads."""
    if isinstance(masks, Mask) or not isinstance(masks, Sequence) or not len(masks):
        raise ValueError(f"per_head({one_line(masks)}): wants a list of masks, one for each query head")
    return PerHead(tuple(as_mask(mask) for mask in masks))


def _join(kind: type[_Joined], masks: Sequence[Mask]) -> Mask:
    """The normal form: flat, without repeats, in one order."""
    flat = dict.fromkeys(p for mask in masks for p in (mask.parts if isinstance(mask, kind) else (mask,)))
    parts = sorted(flat, key=lambda part: (part.rank, repr(part), hash(part)))
    return parts[0] if len(parts) == 1 else kind(tuple(parts))
