"""What a model must do at the least, in products: counted from its config and its masks. Times nothing.

A floating-point operation is a multiplication or an addition, so a product of [M, K] and [K, N] has 2·M·N·K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from flexdecode.attention.cache import CacheLayer
from flexdecode.attention.plan import Tile, plan_tiles
from flexdecode.attention.visible import BLOCK
from flexdecode.config import LayerConfig, MlpConfig, ModelConfig

Shape = tuple[int, int]  # outputs, inputs


def layer_products(config: ModelConfig) -> Counter[Shape]:
    """How often a token is multiplied by a matrix of each shape, the head left out; of experts, by those it uses."""
    found: Counter[Shape] = Counter()
    for layer in config.layers:
        found.update(_products(layer, config.hidden_size))
    return found


def _products(layer: LayerConfig, hidden: int) -> Iterable[Shape]:
    a, ff = layer.attention, layer.feed_forward
    yield (a.heads + 2 * a.kv_heads) * a.head_dim, hidden
    yield hidden, a.heads * a.head_dim
    if not isinstance(ff, MlpConfig):
        yield ff.experts, hidden
    for _ in range(1 if isinstance(ff, MlpConfig) else ff.experts_per_token):
        yield 2 * ff.intermediate_size, hidden
        yield hidden, ff.intermediate_size


def product_flops(config: ModelConfig, tokens: int) -> int:
    """Of the products that a prefill of `tokens` tokens must make: all layers' for each, the head's for the last."""
    a_token = sum(count * n * k for (n, k), count in layer_products(config).items())
    return 2 * (tokens * a_token + config.vocab_size * config.hidden_size)


def attention_flops(config: ModelConfig, cache_layers: Sequence[CacheLayer], tokens: int) -> int:
    """Of a prefill's attention: 4 · head_dim for each pair of a query and a key that it sees, in each head."""
    heads = [layer.attention.heads for layer in config.layers]
    total = 0
    for (layer, count_of), layers in Counter(zip(cache_layers, heads, strict=True)).items():
        tiles = plan_tiles(layer.mask, np.arange(tokens), tokens, heads=count_of, kv_heads=layer.kv_heads)
        dims = layer.head_dim + (layer.v_head_dim or layer.head_dim)
        total += layers * 2 * dims * visible_pairs(tiles, count_of, layer.kv_heads)
    return total


def visible_pairs(tiles: Sequence[Tile], heads: int, kv_heads: int) -> int:
    """Pairs of a query and a key that it sees, summed over query heads."""
    group, total = heads // kv_heads, 0
    for tile in tiles:
        seen = tile.seen
        first = seen.blocks_N[seen.bits_at_N < 0].astype(np.int64) * BLOCK
        whole = tile.count * int((np.minimum(first + BLOCK, tile.length) - first).sum())
        bits = int(np.unpackbits(np.ascontiguousarray(seen.bits_MR).view(np.uint8)).sum())
        if tile.kv_head is None:
            total += heads * (whole + bits)
        else:  # rows of bits are the group's heads one after the other, or stand for all of them
            total += group * whole + bits * (1 if seen.bits_MR.shape[1] == group * tile.count else group)
    return total
