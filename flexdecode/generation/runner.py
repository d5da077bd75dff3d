"""One step on the model: tokens in, logits of the rows that are wanted out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexdecode.attention.cache import KVCache
from flexdecode.generation.scheduler import Work
from flexdecode.models.decoder import Decoder


class Runner:
    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache

    @torch.inference_mode()
    def run(self, works: Sequence[Work]) -> Tensor:
        """Compute `works` and return fp32 logits [rows of the works, vocab], in their order: of a work that completes,
        those after its last known token and after each proposed one."""
        rows: list[int] = []
        row = 0
        for work in works:
            row += work.count
            rows += range(row - work.rows, row)
        hidden_TD = self._hidden(works)
        if len(rows) != hidden_TD.shape[0]:
            hidden_TD = hidden_TD[torch.tensor(rows, dtype=torch.long, device=hidden_TD.device)]
        return self.model.logits(hidden_TD) if rows else hidden_TD.new_empty(0, self.model.config.vocab_size)

    @torch.inference_mode()
    def run_all(self, work: Work) -> Tensor:
        """fp32 logits of every token of one work, [count, vocab]."""
        return self.model.logits(self._hidden([work]))

    def _hidden(self, works: Sequence[Work]) -> Tensor:
        ids = [t for w in works for t in w.tokens]
        sequences = [w.request.sequence for w in works if w.request.sequence is not None]
        hidden_TD = self.compute(ids, sequences, [w.count for w in works], [w.request.length for w in works])
        for work in works:
            work.request.cached += work.count
        return hidden_TD

    @torch.inference_mode()
    def compute(
        self, ids: Sequence[int], sequences: Sequence[int], counts: Sequence[int], final: Sequence[int]
    ) -> Tensor:
        """Append `counts[i]` of the tokens to `sequences[i]`, which will be `final[i]` long or longer; their hidden
        states [T, D]."""
        tokens_T = torch.tensor(ids, dtype=torch.long).to(self.model.device)
        slots = self.cache.append(sequences, counts)
        step = self.model.step(self.cache, slots, sequences, counts, final)
        hidden_TD: Tensor = self.model(tokens_T, step)
        return hidden_TD
