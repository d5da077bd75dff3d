"""Masks against brute force: every query and key up to 80, every built-in and every `&` of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from flexdecode.attention import masks
from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import Mask, causal, chunked, window
from flexdecode.config import AttentionConfig
from tests.attention.dense import visible

LENGTH = 80
POSITIONS = torch.arange(LENGTH)
BUILT_IN: dict[str, Mask] = {
    "causal": causal(),
    **{f"window({n})": window(n) for n in (1, 2, 7, 79, 80, 81, 1000)},
    **{f"chunked({n})": chunked(n) for n in (1, 2, 7, 79, 80, 81, 1000)},
}


def shown(name: str, q: int, kv: int) -> bool:
    """docs/conventions.md, said with plain numbers."""
    size = int(name[name.index("(") + 1 : -1]) if "(" in name else 0
    if name.startswith("window"):
        return q - kv < size
    return q // size == kv // size if name.startswith("chunked") else kv <= q


ONE = st.one_of(
    st.just(causal()),
    st.integers(1, 90).map(window),
    st.integers(1, 90).map(chunked),
)
ANY = st.recursive(ONE, lambda inner: st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]), max_leaves=5)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_pair(name: str) -> None:
    wanted = torch.tensor([[shown(name, q, kv) for kv in range(LENGTH)] for q in range(LENGTH)])
    assert torch.equal(visible(BUILT_IN[name], POSITIONS, LENGTH), wanted)


@given(ONE, ONE)
@settings(deadline=None)
def test_and_shows_what_both_show(a: Mask, b: Mask) -> None:
    both = visible(a, POSITIONS, LENGTH) & visible(b, POSITIONS, LENGTH)
    assert torch.equal(visible(a & b, POSITIONS, LENGTH), both)


@given(ANY)
@settings(deadline=None, max_examples=60)
def test_span_is_the_visible_interval(mask: Mask) -> None:
    """Nothing outside is visible and, since every built-in is an interval, everything inside is."""
    dense = visible(mask, POSITIONS, LENGTH)
    for q in range(LENGTH):
        start, stop, full = mask.span(q)
        assert full
        assert 0 <= start <= stop
        wanted = torch.zeros(LENGTH, dtype=torch.bool)
        wanted[start:stop] = True
        assert torch.equal(dense[q], wanted), f"query {q}: {start}, {stop}"


@given(ANY)
@settings(deadline=None, max_examples=60)
def test_horizon_is_the_first_key_still_needed(mask: Mask) -> None:
    """No later query sees a key before it (or pages would be lost), and some query sees it (or pages would stay)."""
    ahead = 3 * LENGTH  # beyond any size here, so that every later query that matters is among them
    dense = visible(mask, torch.arange(ahead), ahead)
    first = torch.where(dense.any(1), dense.int().argmax(1), ahead)
    for q in range(LENGTH):
        assert mask.horizon(q) == int(first[q:].min())


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_a_window_shows_exactly_its_size(size: int) -> None:
    """B44: one library's window of W shows W keys, another's W + 1. Ours shows W, the query's own among them."""
    mask = causal() & window(size)
    dense = visible(mask, POSITIONS, LENGTH)
    assert dense.sum(1).tolist() == [min(size, q + 1) for q in range(LENGTH)]
    assert bool(dense.diagonal().all())
    start, stop, _ = mask.span(LENGTH)
    assert stop - start == size


def test_positions_may_be_far() -> None:
    """Spans of a long context are plain numbers, also beyond 2 ** 31."""
    far = 2**33
    assert (causal() & window(4)).span(far) == (far - 3, far + 1, True)
    assert (causal() & chunked(1000)).span(far) == (far - far % 1000, far + 1, True)
    q = torch.tensor([far])
    assert visible(causal() & window(4), q, 3).tolist() == [[False, False, False]]


@pytest.mark.parametrize("make", [window, chunked])
@pytest.mark.parametrize("size", [0, -1, -4096])
def test_sizes_below_one_are_refused(make: type[Mask], size: int) -> None:
    with pytest.raises(ValueError, match=rf"\({size}\).*at least 1"):
        make(size)  # type: ignore[call-arg]


def test_masks_are_values() -> None:
    """Layers whose masks are equal share one page table, however the masks came to be."""

    def made() -> list[Mask]:
        pairs = [causal() & window(4), causal() & window(5), causal() & chunked(4)]
        return [causal(), window(4), window(5), chunked(4), *pairs, causal() & window(4) & chunked(4)]

    for i, mask in enumerate(made()):
        assert [mask == other for other in made()] == [i == j for j in range(len(made()))]
        assert hash(mask) == hash(made()[i])
    assert len({*made(), *made()}) == len(made())
    layers = [CacheLayer(1, 4, mask) for mask in (causal() & window(4), causal(), causal() & window(4))]
    assert KVCache(layers, 8).group_of == (0, 1, 0)


def test_the_mask_of_a_layer() -> None:
    layer = AttentionConfig(heads=2, kv_heads=1, head_dim=8, scale=1.0, rope=None)
    assert masks.of(layer) == causal()
    assert masks.of(replace(layer, window=6)) == causal() & window(6)
    assert masks.of(replace(layer, chunk=6)) == causal() & chunked(6)
    both = visible(masks.of(replace(layer, window=6, chunk=8)), POSITIONS, LENGTH)
    assert torch.equal(both, visible(causal() & window(6) & chunked(8), POSITIONS, LENGTH))


@pytest.mark.parametrize("mask", [causal(), causal() & window(7), causal() & chunked(5)], ids=str)
def test_torch_takes_ours_as_mask_mods(mask: Mask) -> None:
    """The signature is FlexAttention's, down to being traced under vmap with scalar indices."""
    made = create_mask(mask, None, None, 33, 40, device="cpu")
    assert torch.equal(made[0, 0], visible(mask, torch.arange(33), 40))
