"""Plain Python functions as mods, evaluated as FlexAttention evaluates them: on scalar indices, under vmap.

A mod may reduce over what it has captured, as in `(kv_idx == keep).any()`; called with whole vectors of positions it
would quietly answer something else. What a function does wrong becomes one line that names it and says what to write.
Knows no mask, no score and no cache. Shape letters: Q queries, L keys, H heads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor

from flexdecode.attention.tables import one_line, out_of_range

Kind = Literal["mask", "score"]

_PARAMETERS: dict[Kind, tuple[str, ...]] = {
    "mask": ("b", "h", "q_idx", "kv_idx"),
    "score": ("score", "b", "h", "q_idx", "kv_idx"),
}


class _RefusedError(ValueError):
    """Says all that a user needs: not to be explained again."""


def name_of(fn: Callable[..., Any]) -> str:
    """What to call a function in a message."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name: str = getattr(fn, "__name__", type(fn).__name__)
    code = getattr(fn, "__code__", None)
    if name == "<lambda>" and code is not None:
        return f"lambda at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return name


def identity(fn: Callable[..., Any]) -> tuple[int, ...]:
    """What makes two functions one; a method is another object each time that it is looked up."""
    return (id(fn.__self__), id(fn.__func__)) if isinstance(fn, MethodType) else (id(fn),)


def check_parameters(fn: Callable[..., Any], kind: Kind) -> None:
    """Raises ValueError where `fn` does not take what a mod of this kind is called with."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # written in C: it does not tell
        return
    wanted = _PARAMETERS[kind]
    if _binds(signature, wanted):
        return
    remedy = f"; if it makes a {kind}, pass what it returns" if _binds(signature, ()) else ""
    raise ValueError(
        f"{kind} function {name_of(fn)} takes ({', '.join(signature.parameters)}), "
        f"and is called with ({', '.join(wanted)}){remedy}"
    )


def _binds(signature: inspect.Signature, arguments: tuple[str, ...]) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def mask_values(fn: Callable[..., Any], b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """bool [H, Q, L] of a mask_mod; [Q, L] where h is 0-d or the answer does not depend on it.

    b is 0-d, h 0-d or [H, 1, 1], q_idx 0-d or [Q, 1], kv_idx 0-d or [L]. Raises ValueError where the function is none
    that FlexAttention could call.
    """

    def one(*indices: Tensor) -> Tensor:
        return _checked(fn, "mask", fn(*indices))

    indices = (b, h, q_idx, kv_idx)
    mapped: Callable[..., Tensor] = one
    for axis in (3, 2, 1):
        if indices[axis].dim():
            mapped = torch.vmap(mapped, in_dims=tuple(0 if i == axis else None for i in range(4)))
    if not all(index.numel() for index in indices):
        shape = torch.broadcast_shapes(*(index.shape for index in indices))
        return torch.zeros(shape, dtype=torch.bool, device=kv_idx.device)
    with _explained(fn, "mask"):
        values = mapped(*(index.flatten() if index.dim() else index for index in indices))
    # vmap repeats what does not depend on an index by a stride of 0.
    return values[0] if h.dim() and (len(values) == 1 or values.stride(0) == 0) else values


def score_values(
    fn: Callable[..., Any], score_HQL: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    """What a score_mod makes of score_HQL, in its dtype; or of a 0-d score, where all indices are 0-d too.

    b is 0-d, the other indices 0-d or as in `mask_values`. Raises ValueError where the function is none that
    FlexAttention could call.
    """

    def one(*arguments: Tensor) -> Tensor:
        return _checked(fn, "score", fn(*arguments))

    if score_HQL.numel() == 0:
        return score_HQL
    with _explained(fn, "score"):
        if score_HQL.dim() == 0:
            return one(score_HQL, b, h, q_idx, kv_idx).to(score_HQL.dtype)
        heads, queries, keys = score_HQL.shape
        mapped: Callable[..., Tensor] = one
        for axis in (4, 3, 2):
            mapped = torch.vmap(mapped, in_dims=(0, *(0 if i == axis else None for i in range(1, 5))))
        flat = h.reshape(-1).expand(heads), q_idx.reshape(-1).expand(queries), kv_idx.reshape(-1).expand(keys)
        return mapped(score_HQL, b, *flat).to(score_HQL.dtype)


def _checked(fn: Callable[..., Any], kind: Kind, answer: object) -> Tensor:
    """The answer for one pair of positions, if it is a scalar tensor of the right type."""
    wanted = "a bool tensor" if kind == "mask" else "a floating tensor"
    who = f"{kind} function {name_of(fn)}"
    if not isinstance(answer, Tensor):
        like = "torch.ones_like(kv_idx, dtype=torch.bool)" if kind == "mask" else "torch.zeros_like(score)"
        raise _RefusedError(f"{who} returns {one_line(answer)}, not {wanted}: make it one, as with {like}")
    if kind == "mask" and answer.dtype != torch.bool:
        raise _RefusedError(f"{who} returns {answer.dtype}, not {wanted}: compare, or end with .bool()")
    if kind == "score" and not answer.dtype.is_floating_point:
        raise _RefusedError(f"{who} returns {answer.dtype}, not {wanted}: use torch.where(condition, score, -inf)")
    if answer.dim():
        raise _RefusedError(
            f"{who} returns shape {tuple(answer.shape)} for a query and a key, wanted is (): index captured tensors "
            "down to one value (offset[0] where offset has shape (1,)), or reduce them (.any(), .sum())"
        )
    return answer


@contextmanager
def _explained(fn: Callable[..., Any], kind: Kind) -> Iterator[None]:
    try:
        yield
    except _RefusedError:
        raise
    except Exception as error:
        raise _RefusedError(f"{kind} function {name_of(fn)} {_fault(error)}") from error


def _fault(error: Exception) -> str:
    text = str(error)
    found = out_of_range(error)
    if found is not None:
        index, size = found
        return (
            f"has a captured tensor of size {size}, and its index {index} is out of range: make it as long as the "
            "positions that are asked, or clamp the index"
        )
    if "data-dependent control flow" in text:
        return (
            "takes the truth value of a tensor (if, and, or, not, min, max or a chained comparison): use & | ~, "
            "torch.where, torch.minimum and torch.maximum"
        )
    if ".item()" in text:
        return (
            "makes a Python number of an index (int(), .item(), a slice, or indexing a list): keep it a tensor, and "
            "captured lists as tensors"
        )
    return f"fails: {type(error).__name__}: {' '.join(text.split()) or 'no message'}"
