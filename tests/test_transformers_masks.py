"""transformers' masks as plans: what they show, and how little of a cache is read for it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.sdpa_attention import repeat_kv

import flexdecode.transformers as ours
from flexdecode.attention.foreign import Everything, Shifted
from flexdecode.attention.masks import causal, chunked, window


def check(wanted: Tensor, got: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_a_static_cache_is_read_as_far_as_it_is_filled() -> None:
    """And what lies beyond, garbage or not, never shows."""
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 4096, 16)
    k[:, :, 101:] = math.nan
    mask = ours.step_mask(1, 1, 4096, torch.tensor(100), 0)
    out, _ = ours.attention_forward(nn.Module(), q, k, k, mask)
    plan = mask.plan(4, 2, 0)
    assert [tile.length for tile in plan.tiles] == [101]
    assert plan.visible_keys(1) == 101
    near = repeat_kv(k[:, :, :101], 2)
    check(nn.functional.scaled_dot_product_attention(q, near, near).transpose(1, 2), out)
    local = ours.step_mask(1, 1, 4096, 4000, 0, masking_utils.sliding_window_causal_mask_function(64))
    assert local.plan(4, 2, 0).visible_keys(1) <= 128


def test_a_position_that_counts_on_is_taken_when_the_mask_is_made() -> None:
    position = torch.tensor(3)
    mask = ours.step_mask(1, 1, 64, position, 0)
    position.add_(1)
    assert mask.first == 3


def test_known_masks_are_known_and_others_are_not() -> None:
    known, functions = ours.known_mask, masking_utils
    assert known(functions.causal_mask_function, 0, 7) == causal()
    assert known(functions.bidirectional_mask_function, 0, 7) == Everything()
    assert known(functions.sliding_window_causal_mask_function(5), 0, 7) == causal() & window(5)
    chunks = functions.chunked_causal_mask_function(8, torch.tensor([0, 3]))
    assert known(chunks, 1, 7) == causal() & Shifted(chunked(8), 4)
    for other in (lambda b, h, q, k: k <= q, functions.sliding_window_bidirectional_overlay(3)):
        assert known(other, 0, 7) is None
        assert known(functions.and_masks(functions.causal_mask_function, other), 0, 7) is None


FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(9),
    "chunks": masking_utils.chunked_causal_mask_function(16, torch.tensor([0, 5, 2])),
    "both ways": masking_utils.bidirectional_mask_function,
    "near": masking_utils.sliding_window_bidirectional_mask_function(7),
    "either": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 20 + b),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("offsets", [(0, 0), (70, 0), (70, 64)])
@pytest.mark.parametrize("padding", [None, "left", "holes", "short"])
@pytest.mark.parametrize("use_vmap", [False, True])
def test_every_mask_function(name: str, offsets: tuple[int, int], padding: str | None, use_vmap: bool) -> None:
    """Against the dense mask that transformers makes for sdpa."""
    q_offset, kv_offset = offsets
    there = None
    if padding:
        there = torch.ones(3, 90 if padding == "short" else 200, dtype=torch.bool)
        there[1, : 66 if padding == "left" else 3] = False
        there[2] = torch.rand(there.shape[1], generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"mask_function": FUNCTIONS[name], "attention_mask": there, "use_vmap": use_vmap}
    dense = masking_utils.sdpa_mask(3, 17, 130, q_offset, kv_offset, allow_is_causal_skip=False, **options)
    assert dense is not None
    q, k, v = torch.randn(3, 4, 17, 16), torch.randn(3, 2, 130, 16), torch.randn(3, 2, 130, 8)
    mask = ours.step_mask(3, 17, 130, q_offset, kv_offset, **options)
    out, _ = ours.attention_forward(nn.Module(), q, k, v, mask)
    wanted = nn.functional.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=dense)
    wanted = wanted.transpose(1, 2).where(dense[:, 0].any(-1)[:, :, None, None], 0.0)
    check(wanted, out)
