"""The mask and the score modification of a model's layers: its own, and a user's beside or instead of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexdecode.attention import masks, scores
from flexdecode.attention.cache import CacheLayer
from flexdecode.attention.masks import Mask
from flexdecode.attention.scores import Score, ScoreMod, evaluate
from flexdecode.config import AttentionConfig, LayerConfig


@dataclass(frozen=True)
class Mods:
    """What a user adds to every layer. A mask shows what both it and the model's show, or with `replace_mask` what it
    shows alone; a score modification comes after the model's."""

    mask: Mask | None = None
    score: Score | None = None
    replace_mask: bool = False

    def __post_init__(self) -> None:
        if self.replace_mask and self.mask is None:
            raise ValueError("replace_mask asks for the model's own mask to be replaced, and no mask was given")

    def check(self, heads: int) -> None:
        """Ask once, for the first query and key. Raises ValueError where a function is none that can be asked: better
        now than after a model has been loaded and a prompt read."""
        b, h_H, first = torch.tensor(0), torch.arange(heads), torch.zeros(1, dtype=torch.long)
        if self.mask is not None:
            self.mask.check_heads(heads)
            self.mask(b, h_H[:, None, None], first[:, None], first)
        if self.score is not None:
            self.score.check_heads(heads)
            evaluate(self.score, torch.zeros(heads, 1, 1), b, h_H, first, first)

    def mask_of(self, layer: AttentionConfig) -> Mask:
        """The mask of a layer. Raises ValueError where it does not fit the layer's heads."""
        own = masks.of(layer)
        if self.mask is None:
            return own
        self.mask.check_heads(layer.heads)
        return self.mask if self.replace_mask else own & self.mask

    def cache_layers(self, layers: Sequence[LayerConfig]) -> list[CacheLayer]:
        """What a cache of these layers must hold."""
        return [CacheLayer(x.attention.kv_heads, x.attention.head_dim, self.mask_of(x.attention)) for x in layers]

    def score_of(self, layer: AttentionConfig) -> ScoreMod | None:
        """The score modification of a layer, None where there is none."""
        own = scores.softcap(layer.softcap) if layer.softcap else None
        if self.score is None:
            return own
        self.score.check_heads(layer.heads)
        return self.score if own is None else own.then(self.score)
