"""attend over sequences that come in steps: cut in any way, in any order, while pages go back to the pool."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.attention.attend import attend
from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import Mask, causal, chunked, sinks, window
from flexdecode.attention.pages import GIVEN_BACK
from flexdecode.attention.plan import plan_attention
from flexdecode.attention.request import Backend
from tests.attention.dense import (
    BACKENDS,
    MASKS,
    ByBatch,
    ByHead,
    Ends,
    Holes,
    check,
    dense,
    fill_unused,
    filled,
    queries,
    run,
    visible,
)
from tests.grids import by_name

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=by_name)


@every_backend
@pytest.mark.parametrize("name", ["causal", "window5", "window70", "chunked16", "ends", "by_head"])
def test_a_decode_row_is_the_prefills(backend: Backend, name: str) -> None:
    """The first fault everybody meets: a causal mask at q_len 1 that thinks the query stands at position 0."""
    mask = MASKS[name]
    whole, q = filled([80], mask), queries([80], 6, 16)
    prefill = run(whole, q, [80], mask, backend)
    cache = KVCache([CacheLayer(2, 16, mask)], 160, page=16, dtype=torch.float32)
    sequence = cache.new()
    for t in range(80):
        here = slice(t, t + 1)
        cache.write(0, cache.append([sequence], [1]), whole.k[0][here], whole.v[0][here])
        row = attend(q[here], cache, 0, plan_attention(cache, [sequence], [1], mask, heads=6), backend=backend)
        torch.testing.assert_close(row, prefill[here], atol=1e-5, rtol=1e-5)


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_chunks_are_the_whole(data: st.DataObject) -> None:
    """Prefill cut anywhere, for several sequences at once; pages given back on the way are overwritten with NaN."""
    mask = data.draw(
        st.sampled_from(
            [
                causal(),
                causal() & window(5),
                causal() & window(33),
                causal() & chunked(16),
                Holes(3),
                Ends(6, 10),
                ByHead((Ends(6, 10), causal() & window(5))),
            ]
        )
    )
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=3))
    whole = filled(lengths, mask, seed=3)
    q = queries(lengths, 4, 16)
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    for backend in BACKENDS:
        cache = KVCache([CacheLayer(2, 16, mask)], 2 * sum(lengths) + 64, page=8, dtype=torch.float32)
        sequences, done = [cache.new() for _ in lengths], [0] * len(lengths)
        out = torch.full((sum(lengths), 4, 16), math.nan)
        dice = random.Random(data.draw(st.integers(0, 99)))
        while done != lengths:
            jobs = [i for i in range(len(lengths)) if done[i] < lengths[i]]
            jobs = dice.sample(jobs, dice.randint(1, len(jobs)))
            counts = [dice.randint(1, lengths[i] - done[i]) for i in jobs]
            parts = [slice(done[i], done[i] + n) for i, n in zip(jobs, counts, strict=True)]
            slots = cache.append([sequences[i] for i in jobs], counts)
            new_k = torch.cat([whole.k[i][p] for i, p in zip(jobs, parts, strict=True)])
            new_v = torch.cat([whole.v[i][p] for i, p in zip(jobs, parts, strict=True)])
            cache.write(0, slots, new_k, new_v)
            fill_unused(cache, math.nan)
            plan = plan_attention(cache, [sequences[i] for i in jobs], counts, mask, heads=4)
            rows = torch.cat([torch.arange(p.start, p.stop) + firsts[i] for i, p in zip(jobs, parts, strict=True)])
            out[rows] = attend(q[rows], cache, 0, plan, backend=backend)  # type: ignore[assignment]
            for i, n in zip(jobs, counts, strict=True):
                done[i] += n
        check(out, whole, q, lengths, mask)


@every_backend
@pytest.mark.parametrize("page", [1, 8, 64])
@pytest.mark.parametrize("mask", [Ends(5, 20), causal() & (window(20) | sinks(5))], ids=str)
def test_pages_of_the_middle_serve_another(backend: Backend, page: int, mask: Mask) -> None:
    """The first keys and a window: what lies between goes back to the pool while the sequence grows. A neighbour that
    takes those pages fills them with what is no number, and the sequence decodes as if it were alone."""
    length, heads = 4 * 64 + 40, 4
    most = (5 + 20 + 30) // page + 5  # pages of one sequence, a chunk of 30 tokens among them
    cache = KVCache([CacheLayer(2, 16, mask)], 2 * most * page, page=page, dtype=torch.float32)
    neighbour, sequence = cache.new(), cache.new()
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(length, 2, 16, generator=generator) for _ in range(2))
    q = torch.randn(length, heads, 16, generator=generator)
    taken: tuple[set[int], set[int]] = set(), set()
    steps = [1] * (length - 30)
    steps[40:40] = [30]  # a chunk on the way
    for count in steps:
        first = cache.length(sequence)
        here = slice(first, first + count)
        poison = torch.full((1, 2, 16), math.nan)
        cache.write(0, cache.append([neighbour], [1]), poison, poison)
        slots = cache.append([sequence], [count])
        cache.write(0, slots, k[here], v[here])
        out = attend(q[here], cache, 0, plan_attention(cache, [sequence], [count], mask), backend=backend)
        assert isinstance(out, Tensor)
        seen = visible(mask, torch.arange(here.start, here.stop), here.stop)
        wanted, _ = dense(q[here], k[: here.stop], v[: here.stop], seen)
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
        for numbers, owner in zip(taken, (neighbour, sequence), strict=True):
            numbers |= {*cache.groups[0].table(owner)} - {GIVEN_BACK}
    assert cache.groups[0].has_holes(sequence)
    assert taken[0] & taken[1]


@every_backend
@pytest.mark.parametrize("name", sorted(MASKS))
def test_a_tree_of_drafts(backend: Backend, name: str) -> None:
    """Queries in any order, siblings at one position: each sees what the mask shows at its position."""
    mask, lengths = MASKS[name], [90, 150]
    positions = [torch.tensor([85, 86, 86, 87, 86]), torch.tensor([149, 140, 140, *range(130, 150)])]
    q_lens = [len(p) for p in positions]
    f = filled(lengths, mask, last=[20, 40])
    q = queries(q_lens, 6, 16)
    plan = plan_attention(f.cache, f.sequences, q_lens, mask, positions, heads=6)
    out = attend(q, f.cache, 0, plan, backend=backend)
    assert isinstance(out, Tensor)
    for i, rows in enumerate((slice(0, 5), slice(5, 28))):
        seen = visible(mask, positions[i], lengths[i], heads=6, batch=i)
        wanted, _ = dense(q[rows], f.k[i], f.v[i], seen)
        torch.testing.assert_close(out[rows].double(), wanted, atol=1e-5, rtol=1e-5)


@every_backend
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [3, 20, 2]], ids=str)
def test_a_sequence_keeps_its_number_in_any_step(backend: Backend, q_lens: list[int]) -> None:
    """Masks by b: a step of some of the caller's sequences, in another order, is told which they are."""
    mask = ByBatch()
    f = filled([70, 100, 9], mask, last=q_lens)
    q = queries(q_lens, 4, 16)
    wanted = run(f, q, q_lens, mask, backend)
    firsts = [0, q_lens[0], q_lens[0] + q_lens[1]]
    order = [2, 0]
    rows = torch.cat([torch.arange(q_lens[i]) + firsts[i] for i in order])
    counts = [q_lens[i] for i in order]
    plan = plan_attention(f.cache, [f.sequences[i] for i in order], counts, mask, batch=order)
    out = attend(q[rows], f.cache, 0, plan, backend=backend)
    assert isinstance(out, Tensor)
    assert torch.equal(out, wanted[rows])
