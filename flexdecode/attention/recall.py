"""Recall: what was derived from a mask, for the layers that bring the same mask again.

The same means: everything that a mask's answers depend on is unchanged. A function is known by its code and by what it
reaches (closure, defaults, globals); a tensor by its identity and its version, which every in-place change raises, or
in inference mode, which counts no versions, by its content. Where something is reached whose state cannot be told (an
object of some class, a module that is not a library's), nothing is recalled. Not seen: changes that bypass torch's
version counter (`tensor.data`, a numpy array that shares the memory).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexdecode.attention.masks import Mask
from flexdecode.attention.tables import Table

V = TypeVar("V")
_LIBRARIES = {"torch", "math", "numpy", "operator", "builtins"}
_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_SMALL = 1 << 14  # elements
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class _UnknownError(Exception):
    """Something whose state cannot be told."""


class Recall(Generic[V]):
    """The last `most` values, by mask and shape."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._held: OrderedDict[Hashable, tuple[V, tuple[weakref.ref[Any], ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, source: object, shape: Hashable, make: Callable[[], V]) -> V:
        """The value of `source` at `shape`: recalled, or made anew."""
        reached: list[object] = []
        try:
            key = (_print_of(source, reached, set()), shape)
        except _UnknownError:
            return make()
        found = self._held.get(key)
        # An identity is that of the object it was taken from only while that object lives.
        if found is not None and all(ref() is not None for ref in found[1]):
            self._held.move_to_end(key)
            return found[0]
        value = make()
        forget = partial(self._forget, key)
        self._held[key] = (value, tuple(weakref.ref(thing, forget) for thing in reached))
        while len(self._held) > self._most:
            self._held.popitem(last=False)
        return value

    def _forget(self, key: Hashable, _: object) -> None:
        self._held.pop(key, None)


def _print_of(thing: Any, reached: list[object], open_: set[int]) -> Hashable:
    """What `thing`'s behaviour depends on; objects known by identity are added to `reached`."""
    if isinstance(thing, _VALUES):
        return (type(thing), thing)
    if isinstance(thing, Table):
        return thing
    if isinstance(thing, Tensor):
        if thing.is_inference():  # it counts no versions: known by content, where that is quick
            if thing.device.type != "cpu" or thing.numel() > _SMALL:
                raise _UnknownError
            return (thing.dtype, thing.shape, thing.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        reached.append(thing)
        return (id(thing), thing._version)
    if id(thing) in open_:
        return "again"
    open_ = open_ | {id(thing)}

    def inner(value: object) -> Hashable:
        return _print_of(value, reached, open_)

    if isinstance(thing, tuple | list):
        return (type(thing), *map(inner, thing))
    if isinstance(thing, dict):
        return (dict, *((inner(name), inner(value)) for name, value in thing.items()))
    if isinstance(thing, partial):
        return (partial, inner(thing.func), inner(thing.args), inner(thing.keywords))
    if isinstance(thing, MethodType):
        return (MethodType, inner(thing.__func__), inner(thing.__self__))
    if isinstance(thing, BlockMask):
        lists = [inner(getattr(thing, name)) for name in _LISTS]
        return (BlockMask, thing.seq_lengths, thing.BLOCK_SIZE, inner(thing.mask_mod), *lists)
    if isinstance(thing, Mask):
        names = getattr(thing, "__dataclass_fields__", None)
        if names is None:
            raise _UnknownError
        return (type(thing), *(inner(getattr(thing, name)) for name in names))
    if isinstance(thing, FunctionType):
        reached.append(thing.__code__)
        try:
            cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        except ValueError:  # not filled yet
            raise _UnknownError from None
        used = [(name, thing.__globals__[name]) for name in _names(thing.__code__) if name in thing.__globals__]
        return (id(thing.__code__), *map(inner, (thing.__defaults__, thing.__kwdefaults__, cells, used)))
    home = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or ""
    if isinstance(thing, ModuleType | type | BuiltinFunctionType) and home.split(".")[0] in _LIBRARIES:
        return id(thing)  # a library's: it stays
    raise _UnknownError


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function and those written inside it may look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
