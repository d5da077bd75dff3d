"""What is recalled for a mask, and what must not be: anything that it depends on and that has changed."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flexdecode.attention import masks
from flexdecode.attention.recall import Recall

Mod = Callable[..., Tensor]
OFFSET = torch.tensor(0)
NUMBER = 0
STATE = SimpleNamespace(offset=0)
TABLE = np.zeros(3)


def by_closure(tensor: Tensor) -> Mod:
    return lambda b, h, q, k: k <= q + tensor


def by_default(tensor: Tensor) -> Mod:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, offset: Tensor = tensor) -> Tensor:
        return k <= q + offset

    return mod


def by_partial(tensor: Tensor) -> Mod:
    return partial(lambda offset, b, h, q, k: k <= q + offset, tensor)


def by_another(tensor: Tensor) -> Mod:
    inner = by_closure(tensor)
    return lambda b, h, q, k: inner(b, h, q, k) | (k == 0)


def by_a_list(tensor: Tensor) -> Mod:
    tensors = {"offsets": [tensor]}
    return lambda b, h, q, k: k <= q + tensors["offsets"][0]


def in_a_block_mask(tensor: Tensor) -> Any:
    return create_block_mask(by_closure(tensor), None, None, 3, 3, "cpu")


def in_a_mask(tensor: Tensor) -> Any:
    return masks.causal() | masks.mask(by_closure(tensor))


def counted(recall: Recall[int], source: object, shape: object = 0) -> int:
    """A new number each time that something is made."""
    counted.number += 1  # type: ignore[attr-defined]
    return recall.get(source, shape, lambda: counted.number)  # type: ignore[attr-defined]


counted.number = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make", [by_closure, by_default, by_partial, by_another, by_a_list, in_a_block_mask, in_a_mask]
)
def test_a_tensor_that_is_reached(make: Callable[[Tensor], Any]) -> None:
    recall: Recall[int] = Recall()
    tensor = torch.tensor(1)
    source = make(tensor)
    first = counted(recall, source)
    assert counted(recall, source) == first
    assert counted(recall, source, "another shape") != first
    tensor.add_(1)
    second = counted(recall, source)
    assert second != first
    assert counted(recall, source) == second
    assert counted(recall, make(torch.tensor(2))) != second


def test_numbers_are_compared() -> None:
    recall: Recall[int] = Recall()
    offset = 1

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + offset + math.floor(0.5)

    first = counted(recall, mod)
    assert counted(recall, mod) == first
    offset = 2
    assert counted(recall, mod) != first


def test_globals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    recall: Recall[int] = Recall()

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (lambda: k <= q + OFFSET + NUMBER)()

    first = counted(recall, mod)
    assert counted(recall, mod) == first
    monkeypatch.setitem(globals(), "NUMBER", 5)
    second = counted(recall, mod)
    assert second != first
    OFFSET.add_(1)
    assert counted(recall, mod) != second


def test_equal_masks_are_one() -> None:
    recall: Recall[int] = Recall()
    first = counted(recall, masks.causal() & masks.window(5))
    assert counted(recall, masks.window(5) & masks.causal()) == first
    assert counted(recall, masks.window(6) & masks.causal()) != first
    ids = counted(recall, masks.document([1, 1, 2]))
    assert counted(recall, masks.document([1, 1, 2])) == ids
    assert counted(recall, masks.document([1, 2, 2])) != ids


class Stateful:
    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q


STATEFUL = [
    Stateful(),
    Stateful().__call__,
    lambda b, h, q, k: k <= q + STATE.offset,
    lambda b, h, q, k, table=TABLE: k <= q + table[0],
    lambda b, h, q, k, kind=Stateful: k <= q,
    lambda b, h, q, k, module=gc: k <= q,
]


@pytest.mark.parametrize("source", STATEFUL, ids=range(len(STATEFUL)))
def test_what_may_change_unseen_is_never_recalled(source: object) -> None:
    recall: Recall[int] = Recall()
    assert counted(recall, source) != counted(recall, source)
    assert len(recall) == 0


def test_tensors_without_versions_are_known_by_content() -> None:
    recall: Recall[int] = Recall()
    with torch.inference_mode():
        tensor, large = torch.tensor([1.0]), torch.zeros(100_000)
        source = by_closure(tensor)
        first = counted(recall, source)
        assert counted(recall, source) == first
        tensor.add_(1)
        assert counted(recall, source) != first
        assert counted(recall, by_closure(large)) != counted(recall, by_closure(large))


def test_a_function_that_reaches_itself() -> None:
    recall: Recall[int] = Recall()

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mod(b, h, q - 1, k) if q.dim() else k <= q

    assert counted(recall, mod) == counted(recall, mod)


def test_what_is_gone_is_forgotten() -> None:
    """Another tensor may get the place, and so the id, of one that is gone."""
    recall: Recall[int] = Recall()
    seen = set()
    for _ in range(5):
        source = by_closure(torch.tensor(1))
        seen.add(counted(recall, source))
        del source
        gc.collect()
        assert len(recall) == 0
    assert len(seen) == 5


def test_only_the_last_are_kept() -> None:
    recall: Recall[int] = Recall(most=2)
    first, second = (counted(recall, masks.window(n)) for n in (1, 2))
    assert counted(recall, masks.window(1)) == first
    counted(recall, masks.window(3))
    assert len(recall) == 2
    assert counted(recall, masks.window(1)) == first
    assert counted(recall, masks.window(2)) != second
