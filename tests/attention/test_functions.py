"""Plain functions as masks: a zoo of mods against torch's own evaluation, and one line for each thing they do wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

from flexdecode.attention.masks import UNBOUNDED, Mask, Queries, as_mask, causal, mask, per_head, sinks, window
from flexdecode.attention.scores import score
from tests.attention.test_masks import dense

HEADS, LENGTH = 3, 40
RANDOM = torch.Generator().manual_seed(0)
KEEP = torch.tensor([1, 7, 30])
OF_KEY = torch.rand(LENGTH, generator=RANDOM) > 0.5
OF_HEAD = torch.rand(HEADS, LENGTH, generator=RANDOM) > 0.5
OF_PAIR = torch.rand(HEADS, LENGTH, LENGTH, generator=RANDOM) > 0.5
IDS = torch.arange(LENGTH) // 7
OFFSETS = torch.tensor([[5]])


def in_window(size: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx) & (q_idx - kv_idx < size)


class Spaced:
    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx) % self.step == 0

    def method(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx) % (self.step + 1) == 0


ZOO: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: k <= q,
    "offset": lambda b, h, q, k: k <= q + OFFSETS[b, 0],  # not to be read with .item()
    "reduction": lambda b, h, q, k: (k == KEEP).any(),
    "reduction over a table": lambda b, h, q, k: ((k == KEEP) & (q > KEEP)).any() | (k <= q),
    "table of keys": lambda b, h, q, k: OF_KEY[k],
    "table of heads": lambda b, h, q, k: OF_HEAD[h, k] & (k <= q),
    "table of pairs": lambda b, h, q, k: OF_PAIR[h, q, k],
    "nested look-up": lambda b, h, q, k: OF_PAIR[h][q][k],
    "a row reduced": lambda b, h, q, k: OF_PAIR[h, :, k].any() ^ OF_PAIR[h, q, :].all(),
    "a constant index": lambda b, h, q, k: OF_PAIR[0, q, k],
    "from the end": lambda b, h, q, k: OF_KEY[k - 1],
    "document": lambda b, h, q, k: (IDS[q] == IDS[k]) & (k <= q),
    "head": lambda b, h, q, k: k + h < q,
    "head in where": lambda b, h, q, k: torch.where(h % 2 == 0, k <= q, q - k < 3),
    "head unused": lambda b, h, q, k: (h >= 0) & (k <= q),
    "batch": lambda b, h, q, k: (b == 0) & (k <= q),
    "only keys": lambda b, h, q, k: k < 5,
    "only queries": lambda b, h, q, k: q % 3 == 0,
    "constant": lambda b, h, q, k: torch.ones_like(k, dtype=torch.bool),
    "captured constant": lambda b, h, q, k: OF_KEY[0],
    "partial": functools.partial(in_window, 6),
    "object": Spaced(3),
    "method": Spaced(3).method,
    "defaults": lambda b, h, q, k, size=4: q - k < size,
    "torch's and": and_masks(lambda b, h, q, k: k <= q, lambda b, h, q, k: OF_HEAD[h, k]),
    "torch's or": or_masks(causal() & window(4), lambda b, h, q, k: (k == KEEP).any()),
    "torch's noop": noop_mask,
    "ours inside": lambda b, h, q, k: (causal() & (window(3) | sinks(2)))(b, h, q, k) | OF_KEY[k],
    "a mask of its own inside": lambda b, h, q, k: mask(ZOO["head"])(b, h, q, k) & per_head([causal()] * 3)(b, h, q, k),
}


@pytest.mark.parametrize("name", ZOO)
def test_a_function_is_what_torch_makes_of_it(name: str) -> None:
    fn = ZOO[name]
    # (torch counts the parameters of a method with its self, and takes it for a score_mod.)
    wanted = create_mask(lambda b, h, q, k: fn(b, h, q, k), 1, HEADS, LENGTH, LENGTH, device="cpu")[0]
    made = mask(fn)
    everything = range(LENGTH), range(LENGTH)
    assert torch.equal(dense(made, *everything, None), wanted)
    for h in range(HEADS):
        assert torch.equal(dense(made.head(h), *everything, h), wanted[h])
    some = [3, 39, 20], [0, 5, 38]  # a plan asks for the queries of a step and the keys of some blocks
    assert torch.equal(dense(made, *some, None), wanted[:, some[0]][:, :, some[1]])
    assert torch.equal(dense(made, [], [1]), wanted[0, :0, :1])
    assert torch.equal(dense(made, [1], [], None), wanted[:, :1, :0])
    again = create_mask(made & sinks(30), 1, HEADS, LENGTH, LENGTH, device="cpu")[0]
    assert torch.equal(again, wanted & (torch.arange(LENGTH) < 30))


@pytest.mark.parametrize("name", ZOO)
def test_heads_that_do_not_differ_are_seen_not_to(name: str) -> None:
    """vmap repeats what does not depend on h by a stride of 0, and a plan is then made once for all heads."""
    indices = torch.tensor(0), torch.arange(HEADS)[:, None, None], torch.arange(9)[:, None], torch.arange(9)
    uses_head = ("head", "table of heads", "table of pairs", "nested", "a row", "torch's and", "a mask of its own")
    assert mask(ZOO[name])(*indices).dim() == (3 if name.startswith(uses_head) else 2)
    assert mask(ZOO[name])(indices[0], indices[1][:1], *indices[2:]).dim() == 2


def test_nothing_is_skipped_on_a_guess() -> None:
    made = mask(lambda b, h, q, k: k < 0)
    assert made.per_head
    assert made.head(3) is made
    first = torch.arange(0, 640, 64).numpy()
    for q in (Queries(0, 1), Queries(5, UNBOUNDED)):
        for one in (made, ~made):
            some, every = one.sees(q, first, first + 64)
            assert some.all()
            assert not every.any()


def test_functions_combine_with_masks_on_either_side() -> None:
    fn = ZOO["reduction"]
    everything = range(LENGTH), range(LENGTH)
    shown, lower = dense(mask(fn), *everything), dense(causal(), *everything)
    assert torch.equal(dense(causal() & fn, *everything), shown & lower)
    assert fn & causal() == causal() & fn == mask(fn) & causal()
    assert fn | ~causal() == ~causal() | fn
    assert torch.equal(dense(~mask(fn) | fn & causal(), *everything), ~shown | lower)


def test_functions_are_equal_by_identity() -> None:
    one, two = ((lambda b, h, q, k: k < 1) for _ in range(2))
    assert mask(one) == mask(one)
    assert mask(one) != mask(two)
    assert len({mask(one), mask(one), mask(two), causal() & one, one & causal()}) == 3
    assert causal() & one & two == two & (causal() & one)
    spaced = Spaced(3)
    assert mask(spaced.method) == mask(spaced.method)
    assert mask(spaced.method) != mask(Spaced(3).method)
    assert as_mask(mask(one)) == mask(mask(one)) == mask(one)


def test_functions_have_names() -> None:
    spaced = Spaced(3)
    partial = functools.partial(functools.partial(in_window, 3))
    made = causal() & in_window_of_4 | spaced & mask(partial) | spaced.method
    assert str(made) == "causal() & mask(in_window_of_4) | mask(Spaced) & mask(in_window) | mask(method)"
    assert "mask(lambda at test_functions.py:" in str(mask(lambda b, h, q, k: k < 1))


def in_window_of_4(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return in_window(4, b, h, q_idx, kv_idx)


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda b, h, q, k: k <= q and k > 2, r"truth value.*use & \| ~"),
    (lambda b, h, q, k: not k <= q, "truth value"),
    (lambda b, h, q, k: 0 <= q - k < 5, "chained comparison"),
    (lambda b, h, q, k: k <= q if h < 2 else k < 3, "torch.where"),
    (lambda b, h, q, k: max(q, k) < 9, "torch.maximum"),
    (lambda b, h, q, k: [True, False][k], "captured lists as tensors"),
    (lambda b, h, q, k: torch.tensor(int(q) > 3), r"int\(\)"),
    (lambda b, h, q, k: OF_KEY[:k].any(), "a slice"),
    (lambda b, h, q, k: True, "returns True, not a bool tensor.*torch.ones_like"),
    (lambda b, h, q, k: None, "returns None, not a bool tensor"),
    (lambda b, h, q, k: k - q, r"returns torch.int64, not a bool tensor.*\.bool\(\)"),
    (lambda b, h, q, k: k == KEEP, r"shape \(3,\).*\.any\(\)"),
    # transformers#46682: an offset of one element made a mask of five dimensions.
    (lambda b, h, q, k: k <= q + torch.tensor([5]), r"shape \(1,\).*offset\[0\]"),
    # pytorch#137801: a captured table is as long as the sequence, and nothing beyond it may be asked for.
    (lambda b, h, q, k: KEEP[k] > q, "captured tensor of size 3, and its index 3 is out of range"),
    (lambda b, h, q, k: OF_HEAD[h + 1, k], "captured tensor of size 3, and its index 3 is out of range"),
    (lambda b, h, q, k: KEEP[k - 5] > q, "captured tensor of size 3, and its index"),
    (lambda b, h, q, k: torch.rand(()) < 0.5, "fails: RuntimeError: .*random"),
    (lambda b, h, q, k: k.no_such_thing, "fails: AttributeError: .*no_such_thing"),
    (lambda b, h, q, k: {}[3], "fails: KeyError: 3"),
    (lambda b, h, q, k: mask(lambda b, h, q, k: 4)(b, h, q, k), "returns 4, not a bool tensor"),
]


@pytest.mark.parametrize(("fn", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_wrong_function_is_refused_in_one_line(fn: Callable[..., Any], words: str) -> None:
    for made in (mask(fn), causal() & fn, ~mask(fn)):
        with pytest.raises(ValueError, match=rf"^mask function lambda at test_functions.py:\d+ .*{words}") as caught:
            dense(made, range(9), range(9), None)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda b, h, q: q, r"takes \(b, h, q\), and is called with \(b, h, q_idx, kv_idx\)"),
        (lambda score, b, h, q, k: score, r"takes \(score, b, h, q, k\)"),
        (lambda: causal(), r"takes \(\).*pass what it returns"),
        (window, r"mask function window takes \(size\)"),
        (in_window, r"takes \(size, b, h, q_idx, kv_idx\)"),
        (functools.partial(in_window, 3, 4), "mask function in_window"),
        (Spaced, "mask function Spaced"),
    ],
)
def test_a_function_of_other_arguments_is_refused(fn: Callable[..., Any], words: str) -> None:
    for make in (mask, lambda fn: causal() & fn, lambda fn: per_head([causal(), fn])):
        with pytest.raises(ValueError, match=words):
            make(fn)


def test_a_table_exactly_as_long_as_what_is_asked() -> None:
    """pytorch#137801: padding to whole blocks asked for indices that a captured table does not have."""
    made = causal() & (lambda b, h, q, k: OF_KEY[q] | OF_KEY[k])
    assert dense(made, [LENGTH - 1], range(LENGTH)).shape == (1, LENGTH)
    with pytest.raises(ValueError, match=f"index {LENGTH} is out of range"):
        dense(made, [LENGTH - 1], range(LENGTH + 1))


@pytest.mark.parametrize("length", [1, 7, 33, 40])
def test_one_object_at_many_lengths(length: int) -> None:
    """pytorch#137779: a mask that captures lengths failed at the second shape."""
    made: Mask = mask(lambda b, h, q, k: (k <= q) & (k < torch.tensor(length)))
    for asked in (3, 40, 12):
        shown = dense(made, range(asked), range(asked))
        assert torch.equal(shown, torch.ones(asked, asked).tril().bool() & (torch.arange(asked) < length))


def test_a_score_function_is_told_from_a_mask() -> None:
    with pytest.raises(ValueError, match=r"score function .*takes \(b, h, q, k\), and is called with \(score, b"):
        score(lambda b, h, q, k: q)
