"""A smaller model that goes on where requests are: the draft of speculative decoding (Leviathan et al., 2023), greedy.

Each request has a sequence in the draft's cache, which holds tokens that are the request's for good. A proposal is made
on a fork of it, so that one that proves wrong leaves no trace, and no mask's given-back pages are ever missed. Knows
token ids only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flexdecode.generation.engine import Engine
from flexdecode.generation.runner import Runner
from flexdecode.generation.sampler import first_greatest
from flexdecode.generation.speculative import DraftModel


@dataclass(eq=False)
class _Text:
    """What the draft has read of one request, and the token that it would put next."""

    sequence: int | None = None
    read: int = 0
    regime: tuple[int, ...] = ()
    next: int = -1


class Draft:
    """`engine` is the draft's own, of which only model, cache and limits are used; `vocab_size` the other model's."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._runner = Runner(engine.model, engine.cache)
        self._held: OrderedDict[_Text, None] = OrderedDict()  # those with a sequence, the least recently used first

    def proposer(self) -> DraftModel:
        """The draft as it serves one request."""
        text = _Text()
        return DraftModel(partial(self._continue, text), self._vocab_size, partial(self._forget, text))

    def _continue(self, text: _Text, tokens: Sequence[int], most: int) -> list[int]:
        """The greedy continuation; none where the draft's context, vocabulary or cache ends."""
        most = min(most, self._engine.config.max_context - len(tokens))
        if most < 1 or max(tokens[text.read :], default=0) >= self._engine.model.config.vocab_size:
            return []
        final = len(tokens) + most
        regime = self._engine.model.rope_regime(final)
        if text.sequence is not None and regime != text.regime:  # every key is of the wrong angle
            self._forget(text)
        if not self._make_room(text, final - text.read):
            return []
        try:
            return self._go_on(text, tokens, most, regime)
        except BaseException:  # what is held may be less than what was read
            self._forget(text)
            raise

    def _go_on(self, text: _Text, tokens: Sequence[int], most: int, regime: tuple[int, ...]) -> list[int]:
        cache, chunk, final = self._engine.cache, self._engine.config.prefill_chunk, len(tokens) + most
        if text.sequence is None:
            text.sequence, text.regime = cache.new(regime), regime
        self._held[text] = None
        self._held.move_to_end(text)
        for start in range(text.read, len(tokens), chunk):
            text.next = self._read(text.sequence, tokens[start : start + chunk], final)
        text.read = len(tokens)
        found, twin = [text.next], cache.fork(text.sequence)
        try:
            while len(found) < most:
                found.append(self._read(twin, found[-1:], final))
        finally:
            cache.free(twin)
        return found

    @torch.inference_mode()
    def _read(self, sequence: int, ids: Sequence[int], final: int) -> int:
        """The likeliest token after these."""
        hidden_TD = self._runner.compute(ids, [sequence], [len(ids)], [final])
        logits_RV: Tensor = self._engine.model.logits(hidden_TD[-1:])
        return first_greatest(logits_RV[0])

    def _make_room(self, text: _Text, count: int) -> bool:
        """Whether there is room for so many more tokens and a copy of a page, if need be without what is held for
        others."""
        wanted = count + self._engine.cache.page
        while self._engine.cache.free_tokens() < wanted:
            other = next((held for held in self._held if held is not text), None)
            if other is None:
                return False
            self._forget(other)
        return True

    def _forget(self, text: _Text) -> None:
        if text.sequence is not None:
            self._engine.cache.free(text.sequence)
            del self._held[text]
        text.sequence, text.read = None, 0
