"""What is said of a mask is what a plan does and what the mask shows, and the parts named do decide it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdecode.attention.cache import CacheLayer, bytes_per_token
from flexdecode.attention.explain import (
    Span,
    alike_heads,
    explain,
    explain_row,
    heads_wanted,
    keys_seen,
    shown,
)
from flexdecode.attention.masks import (
    And,
    Bools,
    Ints,
    Mask,
    Or,
    causal,
    chunked,
    dilated,
    document,
    mask,
    per_head,
    sinks,
    window,
)
from flexdecode.attention.plan import plan_tiles
from flexdecode.attention.reasons import State, normal, parts_of
from flexdecode.attention.visible import BLOCK
from tests.attention.dense import Blurred, Counting, Holes
from tests.attention.test_masks import HEADED, HEADS

thirds = mask(lambda b, h, q, k: (q - k) % 3 == 0)
of_head = mask(lambda b, h, q, k: (k % 2 == 0) | (h % 2 == 0))
ANY = st.one_of(
    HEADED, st.tuples(HEADED, HEADED.map(Blurred)).map(lambda x: x[0] & x[1]), HEADED.map(lambda m: m & thirds)
)
STREAMING = causal() & (window(4096) | sinks(4))


def bits(m: Mask, q_idx: Ints, length: int, head: int) -> Bools:
    """bool [Q, L] by asking the mask for every pair."""
    answer = m(torch.tensor(0), torch.tensor(head), torch.from_numpy(q_idx)[:, None], torch.arange(length))
    found: Bools = answer.expand(len(q_idx), length).numpy()
    return found


def state(block_QL: Bools) -> State:
    return State.FULL if block_QL.all() else State.PARTIAL if block_QL.any() else State.SKIPPED


def with_only(form: Mask, kept: tuple[Mask, ...], other: bool, q_idx: Ints, length: int, head: int) -> Bools:
    """The bits of a normal form all of whose parts but `kept` show everything, or nothing."""
    if isinstance(form, (And, Or)):
        inner = [with_only(part, kept, other, q_idx, length, head) for part in form.parts]
        join = np.logical_and if isinstance(form, And) else np.logical_or
        joined: Bools = join.reduce(inner)
        return joined
    return bits(form, q_idx, length, head) if form in kept else np.full((len(q_idx), length), other)


@given(ANY, st.integers(1, 300), st.data())
@settings(deadline=None, max_examples=150)
def test_blocks_are_a_plans_and_their_reasons_suffice(m: Mask, length: int, data: st.DataObject) -> None:
    head = data.draw(st.integers(0, HEADS - 1))
    row = data.draw(st.none() | st.integers(0, length - 1))
    q_idx = np.arange(length) if row is None else np.array([row])
    found = explain(m, length, q_idx, head=head)
    # A plan of the whole mask, in which each query head has a kv head of its own.
    tiles = plan_tiles(m, q_idx, length, heads=HEADS, kv_heads=HEADS)
    tiles = [tile for tile in tiles if tile.kv_head in (None, head)]
    assert [(q.first, q.stop) for q in found.queries] == [(t.q_idx_Q[0], t.q_idx_Q[-1] + 1) for t in tiles]
    for t, tile in enumerate(tiles):
        planned = dict(zip(tile.seen.blocks_N.tolist(), tile.seen.bits_at_N.tolist(), strict=True))
        got = {n: s for n, s in enumerate(found.states_TN[t].tolist()) if s != State.SKIPPED}
        assert {n: s == State.PARTIAL for n, s in got.items()} == {n: at >= 0 for n, at in planned.items()}
    exact = bits(m, q_idx, length, head)
    assert found.pairs == exact.sum()
    assert found.all_pairs == exact.size
    assert np.array_equal(shown(m, length, q_idx, head=head), exact)
    form = normal(m.head(head))
    assert np.array_equal(bits(form, q_idx, length, head), exact)
    for t, tile in enumerate(tiles):
        rows = slice(tile.row, tile.row + tile.count)
        for span in found.spans(t):
            here = slice(span.first * BLOCK, (span.last + 1) * BLOCK)
            check_reason(form, span, tile.q_idx_Q, length, head, exact[rows], here)


def check_reason(form: Mask, span: Span, q_idx: Ints, length: int, head: int, exact_QL: Bools, here: slice) -> None:
    """The span's keys are of its state, and the parts named are enough to make them so, whatever the others show."""
    assert span.by
    assert set(span.by) <= set(parts_of(form))
    blocks = [slice(a, a + BLOCK) for a in range(here.start, min(here.stop, length), BLOCK)]
    for block in blocks:
        assert state(exact_QL[:, block]) == span.state
        own = [state(bits(part, q_idx, length, head)[:, block]) for part in span.by]
        if span.state == State.PARTIAL:
            assert set(own) == {State.PARTIAL}
        elif all(s == span.state for s in own):
            hidden = span.state == State.SKIPPED
            assert state(with_only(form, span.by, hidden, q_idx, length, head)[:, block]) == span.state


@given(ANY, st.integers(1, 200), st.data())
@settings(deadline=None, max_examples=80)
def test_a_row_is_the_masks_key_by_key(m: Mask, length: int, data: st.DataObject) -> None:
    head, position = data.draw(st.integers(0, HEADS - 1)), data.draw(st.integers(0, length - 1))
    spans = explain_row(m, length, position, head=head)
    q_idx, form = np.array([position]), normal(m.head(head))
    exact = bits(m, q_idx, length, head)[0]
    assert [x.first for x in spans] == [0, *(x.last + 1 for x in spans[:-1])]
    assert spans[-1].last == length - 1
    for span in spans:
        keys = slice(span.first, span.last + 1)
        assert span.state in (State.FULL, State.SKIPPED)
        assert (exact[keys] == (span.state == State.FULL)).all()
        hidden = span.state == State.SKIPPED
        kept = with_only(form, span.by, hidden, q_idx, length, head)[0, keys]
        assert (kept != hidden).all(), "one key is never seen in part, so its reasons always suffice"


@pytest.mark.parametrize(
    ("m", "length", "position", "wanted"),
    [
        (
            STREAMING,
            8192,
            8191,
            [
                (0, 3, State.FULL, (causal(), sinks(4))),
                (4, 4095, State.SKIPPED, (window(4096), sinks(4))),
                (4096, 8191, State.FULL, (causal(), window(4096))),
            ],
        ),
        (
            causal() & ~(window(100) & ~sinks(4)),
            300,
            250,
            [
                # A block that is settled whole is told whole: keys 0 to 63 need no sinks, and 251 to 255 no causality.
                (0, 150, State.FULL, (causal(), ~window(100))),
                (151, 255, State.SKIPPED, (sinks(4), ~window(100))),
                (256, 299, State.SKIPPED, (causal(), sinks(4), ~window(100))),
            ],
        ),
        (
            causal() & (chunked(4) | thirds),
            8,
            6,
            [
                (0, 0, State.FULL, (causal(), thirds)),
                (1, 2, State.SKIPPED, (chunked(4), thirds)),
                (3, 3, State.FULL, (causal(), thirds)),
                (4, 5, State.FULL, (causal(), chunked(4))),
                (6, 6, State.FULL, (causal(), chunked(4), thirds)),
                (7, 7, State.SKIPPED, (causal(),)),
            ],
        ),
    ],
    ids=["streaming", "not", "function"],
)
def test_what_decides_each_key(
    m: Mask, length: int, position: int, wanted: list[tuple[int, int, State, tuple[Mask, ...]]]
) -> None:
    got = explain_row(m, length, position)
    assert [(x.first, x.last, x.state, x.by) for x in got] == wanted


def test_what_decides_each_block() -> None:
    """Skipped: what hides it; full: what shows it; partial: what shows a part; together where none does alone."""
    found = explain(STREAMING, 8192, np.array([8191]))
    assert [(x.first, x.last, x.state, x.by) for x in found.spans(0)] == [
        (0, 0, State.PARTIAL, (sinks(4),)),
        (1, 63, State.SKIPPED, (window(4096), sinks(4))),
        (64, 127, State.FULL, (causal(), window(4096))),
    ]
    assert found.deciders(State.SKIPPED) == {(window(4096), sinks(4)): 63}
    assert found.count(State.FULL) == 64
    assert found.density == 4100 / 8192
    assert found.keys_read == 65 * BLOCK
    together = explain(window(4) & sinks(4), 64, np.array([60]))
    assert [(x.state, x.by) for x in together.spans(0)] == [(State.SKIPPED, (window(4), sinks(4)))]
    split = explain(~(~sinks(10) & ~~window(54)), 64, np.array([63]))
    assert [(x.state, x.by) for x in split.spans(0)] == [(State.PARTIAL, (sinks(10), ~window(54)))]
    halves = explain(sinks(10) | window(54), 64, np.array([63]))
    assert [(x.state, x.by) for x in halves.spans(0)] == [(State.FULL, (window(54), sinks(10)))]


def test_a_prefill_counts_every_block_once() -> None:
    found = explain(causal() & window(64), 1024)
    assert found.states_TN.shape == (8, 16)
    assert sum(found.count(s) for s in State) == 128
    assert sum(sum(found.deciders(s).values()) for s in State) == 128
    assert found.deciders(State.SKIPPED)[(causal(),)] == 56
    assert found.pairs == sum(min(q + 1, 64) for q in range(1024))


def test_a_function_is_asked_only_where_a_plan_asks_it() -> None:
    """It may hold a table as long as the window, and answer for nothing beyond."""
    inner = Holes(2)
    planned, explained = Counting(inner), Counting(inner)
    q_idx = np.array([1000])
    plan_tiles(causal() & window(64) & planned, q_idx, 1024, heads=1, kv_heads=1)
    explain(causal() & window(64) & explained, 1024, q_idx)
    assert set(explained.keys) == set(planned.keys) != set()
    near = torch.arange(256) % 3 > 0
    m = causal() & window(100) & mask(lambda b, h, q, k: near[q - k + 64])
    assert explain(m, 2000, np.array([1999])).pairs == int(near[64:164].sum())
    assert [x.last for x in explain_row(m, 2000, 1999)][-1] == 1999


def test_bytes_are_those_of_the_visible_blocks() -> None:
    found = explain(causal() & window(64), 1000, np.array([999]))
    assert found.keys_read == 64 + 40  # a part of block 14, and the last block, which ends with the sequence
    for dtype, each in ((torch.bfloat16, 2 * 128 * 2), (torch.int8, 2 * 128 + 8), (torch.float32, 2 * 128 * 4)):
        assert found.bytes_read(3, 128, dtype) == 104 * 3 * each
        assert bytes_per_token(CacheLayer(3, 128, causal()), dtype) == 3 * each


def test_heads_that_see_the_same_stand_together() -> None:
    q_idx = np.arange(100)
    near, far = causal() & window(3), causal()
    assert alike_heads(causal(), 100, q_idx, 4) == [[0, 1, 2, 3]]
    assert alike_heads(per_head([near, far, near, causal()]), 100, q_idx, 4) == [[0, 2], [1, 3]]
    assert alike_heads(of_head, 100, q_idx, 5) == [[0, 2, 4], [1, 3]]
    assert alike_heads(per_head([far, far & of_head, far & of_head]), 100, q_idx, 3) == [[0, 2], [1]]
    assert alike_heads(thirds, 100, q_idx, 3) == [[0, 1, 2]]
    # Other words for the same keys, and masks that differ in bits alone.
    assert alike_heads(per_head([causal(), causal() & window(100)]), 100, q_idx, 2) == [[0, 1]]
    assert alike_heads(per_head([far & dilated(9, 2), far & dilated(9, 3)]), 50, np.array([49]), 2) == [[0], [1]]


def test_each_head_is_explained_by_its_own_mask() -> None:
    m = causal() & per_head([window(8), of_head])
    first, second = (explain(m, 64, np.array([63]), head=h) for h in (0, 1))
    assert (first.mask, first.pairs) == (causal() & window(8), 8)
    assert (second.mask, second.pairs) == (causal() & of_head, 32)
    assert explain(m, 64, np.array([63]), head=1).spans(0)[0].by == (of_head,)


@pytest.mark.parametrize(
    ("m", "wanted"),
    [(causal(), None), (thirds, None), (causal() & ~per_head([causal(), thirds]), 2), (per_head([causal()] * 3), 3)],
    ids=["any", "function", "inside", "list"],
)
def test_heads_that_a_mask_was_made_for(m: Mask, wanted: int | None) -> None:
    assert heads_wanted(m) == wanted


def test_keys_seen_are_those_of_each_kv_heads_queries() -> None:
    m = per_head([causal() & window(3), causal() & sinks(2), causal(), causal()])
    tiles = plan_tiles(m, np.array([99]), 100, heads=4, kv_heads=2)
    assert keys_seen(tiles, 2) == 5 + 100
    assert keys_seen(plan_tiles(causal() & window(70), np.array([99]), 100, heads=4, kv_heads=2), 2) == 2 * 70
    assert keys_seen(plan_tiles(causal(), np.arange(100), 100, heads=4, kv_heads=2), 2) == 2 * 100


@pytest.mark.parametrize("what", [explain, shown, lambda m, n, head=0: explain_row(m, n, 0, head=head)])
def test_mistakes_are_told(what: object) -> None:
    assert callable(what)
    with pytest.raises(ValueError, match="0 keys"):
        what(causal(), 0)
    with pytest.raises(ValueError, match=r"per_head.* has 2 masks, and query head 2"):
        what(per_head([causal(), causal()]), 10, head=2)
    with pytest.raises(ValueError, match="4 ids, and position"):
        what(document([0, 0, 1, 1]), 10)
