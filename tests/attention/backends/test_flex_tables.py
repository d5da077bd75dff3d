"""The tables of a plan, read back as FlexAttention's kernels read them: pages, bits and positions against the mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.attention.backends.flex_tables import Batch, lay_out, row_block
from flexdecode.attention.masks import Mask, causal, chunked, window
from flexdecode.attention.plan import AttentionPlan, plan_attention
from flexdecode.attention.visible import BLOCK
from tests.attention.dense import ByBatch, ByHead, Filled, Holes, Keys, Stripes, filled, visible

KV_HEADS = 2
MASKS: dict[str, Mask] = {
    "causal": causal(),
    "window70": causal() & window(70),
    "chunked16": causal() & chunked(16),
    "holes": Holes(3),
    "nothing": Holes(1),
    "stripes": Stripes(7, first=20),
    "keys": Keys(3),
    "by batch": ByBatch(),
    "heads": ByHead((causal(), causal() & window(5), Holes(2))),
    "opaque heads": ByHead((causal(), Stripes(5)), opaque=True),
}


def laid_out(
    lengths: list[int], q_lens: list[int], mask: Mask, group: int, scattered: int = 0
) -> tuple[Filled, AttentionPlan, tuple[Batch, ...]]:
    f = filled(lengths, mask, last=q_lens, kv_heads=KV_HEADS, page=BLOCK, scattered=scattered)
    plan = plan_attention(f.cache, f.sequences, q_lens, mask, heads=KV_HEADS * group)
    return f, plan, lay_out(plan, group, KV_HEADS, pool(f), torch.device("cpu"))


def pool(f: Filled) -> int:
    return f.cache.groups[0].pages


def bits(words: Tensor) -> Tensor:
    """bool [..., BLOCK] of words."""
    return (words[..., None] >> torch.arange(BLOCK)) & 1 == 1


def seen(batch: Batch, b: int, c: int, row: int) -> dict[int, Tensor]:
    """Page -> bool [BLOCK] for one row of a call, as a kernel finds it: partial pages by bits, full ones without."""
    t, block = batch.tables, row // row_block(batch.tables.words_WR.shape[1])
    c = min(c, t.at_BCP.shape[1] - 1)
    partial = t.partial_BCNP[b, c, block, : t.partial_BCN[b, c, block]].tolist()
    full = t.full_BCNP[b, c, block, : t.full_BCN[b, c, block]].tolist()
    assert len({*partial, *full}) == len(partial) + len(full)
    found = {page: bits(t.words_WR[t.at_BCP[b, c, page], row]) for page in partial}
    for page in full:  # the bits say the same, whoever asks them
        assert bool(bits(t.words_WR[t.at_BCP[b, c, page], row]).all())
    for page in set(range(t.at_BCP.shape[2])) - {*partial, *full}:
        assert not bool(bits(t.words_WR[t.at_BCP[b, c, page], row]).any())
    return found | {page: torch.ones(BLOCK, dtype=torch.bool) for page in full}


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_tables_say_what_the_mask_says(data: st.DataObject) -> None:
    """Whatever a page holds past the sequence's end is never visible (B53), nor is anything to a row that pads."""
    mask = MASKS[data.draw(st.sampled_from(sorted(MASKS)))]
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
    q_lens = [data.draw(st.one_of(st.just(1), st.just(n), st.integers(1, n))) for n in lengths]
    group = data.draw(st.sampled_from([1, 3]))
    _, plan, batches = laid_out(lengths, q_lens, mask, group, data.draw(st.integers(0, 2)))
    sequence_of = np.repeat(np.arange(len(lengths)), q_lens)
    position_of = np.concatenate([np.arange(n - q, n) for n, q in zip(lengths, q_lens, strict=True)])
    wanted = [
        visible(mask, torch.arange(n - q, n), n, heads=KV_HEADS * group, batch=i)
        for i, (n, q) in enumerate(zip(lengths, q_lens, strict=True))
    ]
    done: list[int] = []
    for batch in batches:
        t = batch.tables
        held = dict(zip(batch.take_T.tolist(), batch.rows_T.tolist(), strict=True))
        done += held.values()
        for at, packed in list(held.items())[:: max(1, len(held) // 8)]:
            assert batch.source[at] == packed
            b, query = divmod(at, batch.queries)
            i, position = int(sequence_of[packed]), int(position_of[packed])
            assert (int(t.batch_B[b]), int(t.last_B[b])) == (i, lengths[i] - 1)
            for h in range(KV_HEADS * group):
                c, row = h // group, h % group * batch.queries + query
                assert t.q_idx_BR[b, row] == position
                keys = torch.zeros(lengths[i], dtype=torch.bool)
                for page, here in seen(batch, b, c, row).items():
                    places = t.logical_BP[b, page] * BLOCK + torch.arange(BLOCK)[here]
                    keys[places] = True  # and none lies beyond the sequence
                assert torch.equal(keys, wanted[i][h, position - lengths[i] + q_lens[i]])
        padding = sorted(set(range(len(batch.source))) - held.keys())
        for at in padding[:: max(1, len(padding) // 4)]:
            b, query = divmod(at, batch.queries)
            if not any(b * batch.queries <= other < (b + 1) * batch.queries for other in held):
                assert not bool((t.partial_BCN[b] + t.full_BCN[b]).any())
            else:
                for page, here in seen(batch, b, 0, query).items():
                    whole = page in t.full_BCNP[b, 0, 0, : t.full_BCN[b, 0, 0]].tolist()
                    assert whole or not bool(here.any())
    assert sorted(done) == list(range(plan.rows))


@pytest.mark.parametrize("mask", [causal(), Keys(3), Stripes(7), ByHead((causal(), Stripes(5)))], ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("q_len", [1, 4, 100])
def test_shapes_do_not_follow_the_context(mask: Mask, group: int, q_len: int) -> None:
    """Every other shape would be another compilation (pytorch#141486, #136196)."""
    shapes = set()
    for length in (q_len, 63 + q_len, 64 + q_len, 65 + q_len, 400):
        f, _, batches = laid_out([length, 600 - length], [q_len, q_len], mask, group)
        shapes |= {(pool(f), tuple((b.queries, *(x.shape for x in b.tables)) for b in batches))}
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("q_lens", "queries"),
    [
        ([1], [2]),
        ([2, 1], [2]),
        ([3], [4]),
        ([16, 1], [16, 2]),
        ([17], [128]),
        ([130], [128]),
        ([300, 5], [128, 8]),
        ([128 * 5], [128, 128]),
    ],
)
def test_buckets(q_lens: list[int], queries: list[int]) -> None:
    """A prompt's last rows go with its others, however few; a lone row never goes alone."""
    _, _, batches = laid_out(q_lens, q_lens, causal(), 1)
    assert [batch.queries for batch in batches] == queries
    assert all(len(batch.tables.last_B) in (1, 4) for batch in batches)


def test_a_group_is_rows_enough() -> None:
    _, _, batches = laid_out([1], [1], causal(), 3)
    assert [batch.queries for batch in batches] == [1]


@pytest.mark.parametrize(
    ("rows", "block"), [(1, 16), (16, 16), (17, 32), (112, 128), (128, 128), (129, 128), (896, 128)]
)
def test_blocks_of_rows_fit_tiles_of_triton(rows: int, block: int) -> None:
    """q_len 100 with 2 heads left torch without a kernel to choose (pytorch#185349)."""
    assert row_block(rows) == block


def test_tails_are_what_follows_a_sequence() -> None:
    for lengths in ([70, 64, 129], [1, 128, 63]):
        f, _, batches = laid_out(lengths, [1, 1, 1], causal(), 3, scattered=1)
        wanted = set()
        for sequence, length in zip(f.sequences, lengths, strict=True):
            last = f.cache.groups[0].table(sequence)[-1] * BLOCK
            wanted |= set(range(last + length % BLOCK, last + BLOCK)) if length % BLOCK else set()
        assert set(batches[0].tails.tolist()) == wanted


def test_a_page_that_no_row_reads_has_no_tail() -> None:
    _, _, batches = laid_out([70], [1], Stripes(64), 3)
    assert len(batches[0].tails) == 64 - 6
    _, _, batches = laid_out([70], [1], Stripes(100), 3)
    assert len(batches[0].tails) == 0
