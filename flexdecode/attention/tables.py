"""Look-up tables that mods hold: tensors that compare by content, and look-ups that never wrap or crash.

Knows neither masks nor scores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

_OUT_OF_RANGE = re.compile(r"index (-?\d+) is out of bounds for dimension \d+ with size (\d+)")
_SHOWN = 16  # numbers of a list that are written out
_CHARACTERS = 60  # of a value that is quoted


class Table:
    """A copy of a tensor, int64 or fp32, that compares and hashes by its content."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        # Bytes keep their hash, and two that are one object are equal without a look.
        self._content = self.tensor.cpu().numpy().tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        mine, its = self.tensor, other.tensor
        return mine.dtype == its.dtype and mine.shape == its.shape and self._content == other._content

    def __hash__(self) -> int:
        return hash((self.tensor.shape, self._content))


def take(table: Tensor, *indices: Tensor, fault: str) -> Tensor:
    """The entries of `table` at `indices`, one for each of its first dimensions; also under vmap.

    Raises ValueError where one is out of range, negative or not: `fault` with {index} and {size} filled in.
    """
    # A negative index would count from the end; moved down by the size it is out of range instead.
    down = [torch.where(i < 0, i - size, i) for i, size in zip(indices, table.shape, strict=False)]
    try:
        taken: Tensor = torch.ops.aten.index.Tensor(table.to(indices[0].device), down)
    except IndexError as error:
        found = out_of_range(error)
        if found is None:
            raise
        index, size = found
        raise ValueError(fault.format(index=index if index >= 0 else index + size, size=size)) from None
    return taken


def out_of_range(error: Exception) -> tuple[int, int] | None:
    """(index, size) of a look-up that torch refused."""
    found = _OUT_OF_RANGE.search(str(error)) if isinstance(error, IndexError) else None
    return (int(found[1]), int(found[2])) if found else None


def one_line(value: object) -> str:
    """What a user gave, for a message: a tensor or a long list would fill many lines."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"


def abbreviated(values: Sequence[object]) -> str:
    """A list as it is written in Python, the middle of a long one left out."""
    if len(values) <= _SHOWN:
        return f"[{', '.join(map(str, values))}]"
    half = _SHOWN // 2
    return f"[{', '.join(map(str, values[:half]))}, …, {', '.join(map(str, values[-half:]))}]"
