"""What a model must multiply, counted by hand and against masks spelled out key by key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flexdecode import LLM
from flexdecode.attention.masks import Mask, causal, mask, per_head, window
from flexdecode.attention.plan import plan_tiles
from flexdecode.benchmark.cases import causal_in_python
from flexdecode.benchmark.work import attention_flops, layer_products, product_flops, visible_pairs
from tests.checkpoints import VOCAB, tiny

MASKS = [
    causal(),
    causal() & window(70),
    mask(causal_in_python),
    per_head([causal(), causal() & window(5), causal() & window(70), causal()]),
    mask(lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx % (h + 1) == 0)),
]


@pytest.mark.parametrize("own", MASKS, ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_pairs_are_those_that_the_mask_shows(own: Mask, length: int, kv_heads: int) -> None:
    q_idx, kv_idx, h = torch.arange(length)[:, None], torch.arange(length), torch.arange(4)[:, None, None]
    seen = own(torch.tensor(0), h, q_idx, kv_idx).expand(4, length, length)
    tiles = plan_tiles(own, np.arange(length), length, heads=4, kv_heads=kv_heads)
    assert visible_pairs(tiles, 4, kv_heads) == int(seen.sum())


def test_products_of_a_dense_model(tmp_path: Path) -> None:
    tiny(tmp_path)
    config = LLM(tmp_path).config
    assert layer_products(config) == {(256, 128): 4, (128, 128): 4, (512, 128): 4, (128, 256): 4}
    a_token = 4 * 128 * (256 + 128 + 512 + 256)
    assert product_flops(config, 10) == 2 * (10 * a_token + VOCAB * 128)


def test_products_of_experts_are_those_that_a_token_uses(tmp_path: Path) -> None:
    tiny(tmp_path, "mixtral")
    config = LLM(tmp_path).config
    ff = config.layers[0].feed_forward
    found = layer_products(config)
    assert found[ff.experts, 128] == 4  # type: ignore[union-attr]
    assert found[128, ff.intermediate_size] == 4 * ff.experts_per_token  # type: ignore[union-attr]


def test_attention_is_counted_under_each_layers_mask(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma3_text", layer_types=["sliding_attention"] * 3 + ["full_attention"])
    llm = LLM(tmp_path)
    a_pair = 4 * 32 * 4
    full, sliding = 100 * 101 // 2, 16 * 17 // 2 + 84 * 16
    found = attention_flops(llm.config, llm.engine.cache.layers, 100)
    assert found == a_pair * (full + 3 * sliding)
