"""Masks against brute force: every query and key up to 80, every built-in and random expressions of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from flexdecode.attention import masks
from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import (
    UNBOUNDED,
    And,
    Mask,
    Or,
    Queries,
    block_diagonal,
    causal,
    chunked,
    dilated,
    document,
    per_head,
    prefix_lm,
    sinks,
    window,
)
from flexdecode.config import AttentionConfig

LENGTH = 80
AHEAD = 400  # beyond any size here, so that every later query that matters is among them
HEADS = 3
IDS = [i // 30 for i in range(AHEAD)]


def dense(mask: Mask, q_idx: Sequence[int] | range, keys: Sequence[int] | range, head: int | None = 0) -> Tensor:
    """bool [Q, L] of the call as plans make it; [H, Q, L] for head=None."""
    heads = torch.tensor(head) if head is not None else torch.arange(HEADS)[:, None, None]
    answer = mask(torch.tensor(0), heads, torch.tensor(q_idx)[:, None], torch.tensor(keys))
    assert answer.dtype == torch.bool
    shape = (len(q_idx), len(keys))
    return answer.expand(shape if head is not None else (HEADS, *shape))


def block_of(position: int, sizes: Sequence[int]) -> int:
    return sum(position >= end for end in itertools.accumulate(sizes[:-1]))


BUILT_IN: list[tuple[Mask, Callable[[int, int], bool]]] = [
    (causal(), lambda q, k: k <= q),
    *[(window(n), lambda q, k, n=n: q - k < n) for n in (1, 2, 7, 79, 80, 81, 1000)],
    *[(chunked(n), lambda q, k, n=n: q // n == k // n) for n in (1, 2, 7, 79, 80, 81, 1000)],
    *[(sinks(n), lambda q, k, n=n: k < n) for n in (0, 1, 4, 79, 80, 1000)],
    *[(prefix_lm(n), lambda q, k, n=n: k <= q or k < n) for n in (0, 1, 33, 80)],
    *[
        (dilated(w, s), lambda q, k, w=w, s=s: q - k in range(0, w * s, s))
        for w, s in ((1, 1), (1, 5), (4, 1), (4, 3), (100, 7), (3, 50))
    ],
    (document(IDS), lambda q, k: IDS[q] == IDS[k]),
    (document([5, 5, 2, 5] * 20), lambda q, k: (q % 4 == 2) == (k % 4 == 2)),
    *[
        (block_diagonal(sizes), lambda q, k, sizes=sizes: block_of(q, sizes) == block_of(k, sizes))
        for sizes in ([5], [1, 1, 1], [30, 2, 48], [100, 3], [7] * 20)
    ],
    (~causal(), lambda q, k: k > q),
    (causal() & (window(5) | sinks(2)), lambda q, k: k <= q and (q - k < 5 or k < 2)),
]

ONE = st.one_of(
    st.just(causal()),
    st.integers(1, 90).map(window),
    st.integers(1, 90).map(chunked),
    st.integers(0, 90).map(sinks),
    st.builds(dilated, st.integers(1, 9), st.integers(1, 10)),
    st.lists(st.integers(1, 40), min_size=1, max_size=6).map(block_diagonal),
    st.lists(st.integers(1, 60), min_size=1, max_size=6).map(
        lambda sizes: document([7 * block_of(i, sizes) % 5 for i in range(AHEAD)])
    ),
)


def combined(inner: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    return st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        inner.map(lambda a: ~a),
    )


ANY = st.recursive(ONE, combined, max_leaves=6)
HEADED = st.recursive(ONE | st.lists(ANY, min_size=HEADS, max_size=HEADS).map(per_head), combined, max_leaves=4)
QUERIES = st.builds(
    lambda first, count: Queries(first, UNBOUNDED if count is None else first + count),
    st.integers(0, 150),
    st.none() | st.integers(1, 3) | st.integers(1, 90),
)
BLOCKS = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=8)


def truth(mask: Mask, q: Queries, blocks: list[tuple[int, int]]) -> tuple[list[bool], list[bool]]:
    """(some, every) by looking at every pair, of every head."""
    q_idx = range(q.first, AHEAD if q.stop == UNBOUNDED else q.stop)
    parts = [dense(mask, q_idx, range(first, first + count), None) for first, count in blocks]
    return [bool(p.any()) for p in parts], [bool(p.all()) for p in parts]


def promised(mask: Mask, q: Queries, blocks: list[tuple[int, int]]) -> tuple[list[bool], list[bool]]:
    first = np.array([first for first, _ in blocks], np.int64)
    some, every = mask.sees(q, first, first + np.array([count for _, count in blocks]))
    assert some.dtype == every.dtype == np.bool_
    assert some.shape == every.shape == first.shape
    return some.tolist(), every.tolist()


@pytest.mark.parametrize(("mask", "shown"), BUILT_IN, ids=lambda x: str(x) if isinstance(x, Mask) else "")
def test_every_pair(mask: Mask, shown: Callable[[int, int], bool]) -> None:
    wanted = torch.tensor([[shown(q, k) for k in range(LENGTH)] for q in range(LENGTH)])
    assert torch.equal(dense(mask, range(LENGTH), range(LENGTH)), wanted)


@given(HEADED, QUERIES, BLOCKS)
@settings(deadline=None, max_examples=150)
def test_sees_never_lies(mask: Mask, q: Queries, blocks: list[tuple[int, int]]) -> None:
    some, every = promised(mask, q, blocks)
    really_some, really_every = truth(mask, q, blocks)
    for i, block in enumerate(blocks):
        assert some[i] or not really_some[i], f"{mask}: {q} sees some of {block}"
        assert really_every[i] or not every[i], f"{mask}: {q} does not see all of {block}"


@given(ONE, QUERIES, BLOCKS)
@settings(deadline=None, max_examples=150)
def test_a_built_in_sees_exactly(mask: Mask, q: Queries, blocks: list[tuple[int, int]]) -> None:
    """Nothing is read that no query sees. (Documents whose numbers come back later are known only roughly.)"""
    if isinstance(mask, masks.Document):
        ids = mask.ids.tensor.tolist()
        if len(list(itertools.groupby(ids))) > len(set(ids)):
            return
    assert promised(mask, q, blocks) == truth(mask, q, blocks)


@given(ANY, ANY)
@settings(deadline=None)
def test_algebra_is_boolean(a: Mask, b: Mask) -> None:
    area = range(0, 160, 3), range(LENGTH)
    shown_a, shown_b = dense(a, *area), dense(b, *area)
    assert torch.equal(dense(a & b, *area), shown_a & shown_b)
    assert torch.equal(dense(a | b, *area), shown_a | shown_b)
    assert torch.equal(dense(~a, *area), ~shown_a)


@given(ANY, ANY, ANY)
@settings(deadline=None)
def test_equal_expressions_are_equal_masks(a: Mask, b: Mask, c: Mask) -> None:
    """Two masks that differ only in how they were written would be two page tables."""
    for one, two in (
        (a & b, b & a),
        (a | b, b | a),
        (a & (b & c), (c & a) & b),
        (a | (b | c), (c | a) | b),
        (a & a, a),
        (a | a, a),
        (~~a, a),
        (a & b & a, b & a),
        (~(a & b), ~(b & a)),
    ):
        assert one == two
        assert hash(one) == hash(two)
        assert str(one) == str(two)


def test_masks_are_values() -> None:
    """Layers whose masks are equal share one page table, however the masks came to be."""

    def made() -> list[Mask]:
        pairs = [causal() & window(4), causal() & window(5), causal() & chunked(4), causal() | window(4)]
        packed = [document([0, 1]), document([0, 0]), block_diagonal([1, 2]), block_diagonal([2, 1])]
        heads = [per_head([causal(), window(4)]), per_head([window(4), causal()]), dilated(2, 3), dilated(3, 2)]
        single = [causal(), ~causal(), window(4), window(5), chunked(4), sinks(4)]
        return [*single, *pairs, *packed, *heads, causal() & window(4) & chunked(4)]

    for i, mask in enumerate(made()):
        assert [mask == other for other in made()] == [i == j for j in range(len(made()))]
        assert hash(mask) == hash(made()[i])
    assert len({*made(), *made()}) == len(made())
    layers = [CacheLayer(1, 4, mask) for mask in (causal() & window(4), causal(), window(4) & causal())]
    assert KVCache(layers, 8).group_of == (0, 1, 0)


def test_documents_compare_by_content_of_their_own() -> None:
    ids = torch.tensor([0, 0, 1], dtype=torch.int32)
    made = document(ids)
    assert made == document([0, 0, 1]) == document(np.array([0, 0, 1]))
    ids[0] = 5
    assert made == document((0, 0, 1))


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (causal() & (window(4096) | sinks(4)), "causal() & (window(4096) | sinks(4))"),
        (sinks(4) & window(8) | causal(), "causal() | window(8) & sinks(4)"),
        (~causal() & window(3), "window(3) & ~causal()"),
        (~(causal() & window(3)), "~(causal() & window(3))"),
        (~(causal() | window(3)) & sinks(1), "sinks(1) & ~(causal() | window(3))"),
        (prefix_lm(7), "causal() | sinks(7)"),
        (per_head([causal(), window(3) | sinks(1)]), "per_head([causal(), window(3) | sinks(1)])"),
        (document([0, 0, 3]), "document([0, 0, 3])"),
        (document(range(40)), "document([0, 1, 2, 3, 4, 5, 6, 7, …, 32, 33, 34, 35, 36, 37, 38, 39])"),
        (block_diagonal([3, 4]), "block_diagonal([3, 4])"),
        (dilated(4, 2), "dilated(4, 2)"),
    ],
)
def test_a_mask_prints_as_what_makes_it(mask: Mask, text: str) -> None:
    assert str(mask) == repr(mask) == text


def test_operands_are_flat() -> None:
    mask = causal() & window(4) & (chunked(2) & ~sinks(1))
    assert isinstance(mask, And)
    assert mask.parts == (causal(), window(4), chunked(2), ~sinks(1))
    either = sinks(1) | (causal() | sinks(1))
    assert isinstance(either, Or)
    assert either.parts == (causal(), sinks(1))


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_a_window_shows_exactly_its_size(size: int) -> None:
    """B44: one library's window of W shows W keys, another's W + 1. Ours shows W, the query's own among them."""
    shown = dense(causal() & window(size), range(LENGTH), range(LENGTH))
    assert shown.sum(1).tolist() == [min(size, q + 1) for q in range(LENGTH)]
    assert bool(shown.diagonal().all())


@pytest.mark.parametrize("mask", [mask for mask, _ in BUILT_IN if "document" not in str(mask)], ids=str)
def test_a_decoded_row_is_the_prefilled_row(mask: Mask) -> None:
    """attention-gym#46: at one query, a mask that counts from 0 sees only the first key."""
    whole = dense(mask, range(LENGTH), range(LENGTH))
    for q in (0, 1, 41, LENGTH - 1):
        assert torch.equal(dense(mask, [q], range(LENGTH))[0], whole[q])


def test_positions_may_be_far() -> None:
    """Positions beyond 2 ** 31, and sizes up to 2 ** 62, are plain numbers."""
    far = 2**33
    q = Queries(far, far + 1)
    blocks = [(far - 130, 64), (far - 63, 64), (0, 64)]
    assert promised(causal() & window(100), q, blocks) == ([True, True, False], [False, True, False])
    assert promised(dilated(2**31, 2**31), q, [(0, 1), (1, 1), (0, 2)]) == ([True, False, True], [True, False, False])
    assert dense(causal() & window(4), [far], [far - 4, far - 3, far, far + 1]).tolist() == [[False, True, True, False]]
    for mask in (window(2**62), sinks(2**62), dilated(2**61, 2), chunked(2**62), block_diagonal([2**62])):
        later = Queries(far, UNBOUNDED)
        assert promised(mask, later, [(0, 64)])[0] == [True]
        assert bool(dense(mask, [far], [far])) is ("sinks" not in str(mask) or far < 2**62)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *[(lambda m=m, n=n: m(n), rf"\({n}\).*at least 1") for m in (window, chunked) for n in (0, -1, -4096)],
        (lambda: sinks(-1), r"sinks\(-1\).*at least 0"),
        (lambda: prefix_lm(-1), "at least 0"),
        (lambda: dilated(0, 1), r"dilated\(0, 1\).*at least 1"),
        (lambda: dilated(1, 0), r"dilated\(1, 0\).*at least 1"),
        (lambda: dilated(2**40, 2**40), "more than"),
        (lambda: window(2**63), "more than"),
        (lambda: window(4.0), "4.0 is no whole number"),
        (lambda: window(True), "True is no whole number"),
        (lambda: window("4"), "'4' is no whole number"),
        (lambda: window(torch.tensor([1, 2])), "is no whole number"),
        (lambda: block_diagonal([]), "at least 1 size"),
        (lambda: block_diagonal([3, 0]), r"block_diagonal\(\[3, 0\]\).*at least 1"),
        (lambda: block_diagonal(3), "list of sizes"),
        (lambda: block_diagonal([2**62, 1]), "more than"),
        (lambda: document([]), r"shape \(0,\)"),
        (lambda: document([[1], [2]]), r"shape \(2, 1\)"),
        (lambda: document([0.5]), "float32"),
        (lambda: document("abc"), "list of integers"),
        (lambda: document(causal()), "list of integers"),
        (lambda: per_head([]), "list of masks"),
        (lambda: per_head(causal()), "list of masks"),
        (lambda: per_head([3]), "3 is no mask"),
        (lambda: causal() and window(4), r"causal\(\) has no truth value.*& \| ~"),
        (lambda: not causal(), "no truth value"),
        (lambda: causal() & window, r"takes \(size\), and is called with \(b, h, q_idx, kv_idx\)"),
        (lambda: causal() & causal, "if it makes a mask, pass what it returns"),
        (lambda: masks.as_mask(None), "None is no mask"),
        (lambda: masks.as_mask(torch.ones(3, 3)), "is no mask"),
    ],
)
def test_what_makes_no_mask_is_refused_in_one_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_whole_numbers_of_other_kinds() -> None:
    assert window(np.int64(4)) == window(torch.tensor(4)) == window(4)
    assert str(window(np.int64(4))) == "window(4)"


def test_and_with_what_is_no_mask() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        causal() & 4


@pytest.mark.parametrize(("q", "k"), [([0], [79, 80]), ([80], [0]), ([500], [3]), ([-1], [0]), ([0], [-1])])
def test_positions_without_a_document_are_refused(q: list[int], k: list[int]) -> None:
    """pytorch#137801: an index beyond a captured table reads what is not there; -1 reads the wrong end."""
    asked = next(i for i in (*q, *k) if not 0 <= i < 80)
    with pytest.raises(ValueError, match=rf"document\(\) has 80 ids, and position {asked} was asked"):
        dense(document([0] * 80), q, k)
    with pytest.raises(ValueError, match="document"):
        create_mask(document([0] * 80), None, None, 81, 81, device="cpu")


def test_nothing_is_promised_beyond_the_ids() -> None:
    """So that the key is asked for, and the call can refuse."""
    mask = document([0] * 80)
    assert promised(mask, Queries(10, 90), [(0, 64)]) == ([True], [False])
    assert promised(mask, Queries(80, UNBOUNDED), [(0, 64)]) == ([True], [False])
    assert promised(mask, Queries(10, 11), [(64, 64), (0, 64), (64, 16)]) == ([True, True, True], [False, True, True])
    assert promised(mask, Queries(10, UNBOUNDED), [(0, 64)]) == ([True], [True])


def test_a_mask_for_each_head() -> None:
    parts = [causal(), causal() & window(3), ~causal()]
    mask = per_head(parts)
    area = range(LENGTH), range(LENGTH)
    wanted = torch.stack([dense(part, *area) for part in parts])
    assert mask.per_head
    assert torch.equal(dense(mask, *area, None), wanted)
    assert [mask.head(h) for h in range(3)] == parts
    for h in range(3):
        assert torch.equal(dense(mask, *area, h), wanted[h])
    both = window(9) & (mask | sinks(1))
    assert both.per_head
    assert (~both).head(1) == ~(window(9) & ((causal() & window(3)) | sinks(1)))
    assert torch.equal(dense(~both, *area, None)[2], ~dense(window(9) & (~causal() | sinks(1)), *area))
    assert per_head([mask] * 3).head(1) == parts[1]


def test_heads_that_do_not_differ_are_answered_once() -> None:
    q, k = torch.arange(5)[:, None], torch.arange(5)
    heads = torch.tensor([1, 2])[:, None, None]
    answer = per_head([~causal(), causal(), causal()])(torch.tensor(0), heads, q, k)
    assert answer.shape == (5, 5)
    assert torch.equal(answer, k <= q)


def test_a_number_of_masks_that_is_not_the_number_of_heads() -> None:
    mask = ~(per_head([causal(), window(3)]) & sinks(5)) | causal()
    mask.check_heads(2)
    for heads in (1, 3):
        with pytest.raises(ValueError, match=rf"2 masks, and there are {heads} query heads"):
            mask.check_heads(heads)
    with pytest.raises(ValueError, match="2 masks, and query head 2 was asked"):
        mask.head(2)
    with pytest.raises(ValueError, match="2 masks, and query head 2 was asked"):
        dense(mask, [0], [0], None)
    with pytest.raises(ValueError, match="2 masks, and query head 2 was asked"):
        create_mask(mask, None, 3, 4, 4, device="cpu")
    causal().check_heads(7)


def test_the_mask_of_a_layer() -> None:
    layer = AttentionConfig(heads=2, kv_heads=1, head_dim=8, scale=1.0, rope=None)
    assert masks.of(layer) == causal()
    assert masks.of(replace(layer, window=6)) == causal() & window(6)
    assert masks.of(replace(layer, chunk=6)) == causal() & chunked(6)
    assert masks.of(replace(layer, window=6, chunk=8)) == causal() & window(6) & chunked(8)


@given(HEADED)
@settings(deadline=None, max_examples=60)
def test_torch_takes_ours_as_mask_mods(mask: Mask) -> None:
    """The signature is FlexAttention's, down to being traced under vmap with scalar indices."""
    made = create_mask(mask, None, HEADS, 33, 40, device="cpu")
    assert torch.equal(made[0], dense(mask, range(33), range(40), None))
