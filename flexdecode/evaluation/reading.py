"""Reading tokens through a model to have its predictions, the logits of a few rows at a time.

Logits are large (49,152 words take 192 KiB a token in fp32), final hidden states are small: a whole window's are kept,
and the head is applied to pieces of them. Knows no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

from flexdecode.llm import LLM
from flexdecode.models.decoder import Decoder
from flexdecode.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]  # (what, how many are done, of)

_PIECE_BYTES = 16 << 20  # of fp32 logits


class Reading:
    """A sequence that is being read. A context manager; leaving it gives back the cache's pages.

    `final` is the most tokens that it will hold: the length that decides the regime of a rope which changes with it.
    """

    def __init__(self, llm: LLM, final: int) -> None:
        model = llm.engine.model
        if model.looks_ahead:
            raise ValueError(
                "under this mask a token may see the one that it is to predict, so likelihoods mean nothing; use a "
                "mask that looks back only"
            )
        if final > llm.max_context:
            raise ValueError(
                f"{final} tokens are to be read and the context ends at {llm.max_context}; raise max_context "
                "(--max-context)"
            )
        self._llm, self._final = llm, final
        self._sequence = llm.engine.cache.new()

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Read on; the final hidden states [T, D] of these tokens, normalized, in the compute type."""
        engine = self._llm.engine
        size, vocab = engine.config.prefill_chunk, engine.model.config.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"token ids reach from {min(ids)} to {max(ids)}, and the vocabulary has {vocab}")
        hidden = [self._step(ids[start : start + size]) for start in range(0, len(ids), size)]
        return torch.cat(hidden)

    def _step(self, ids: Sequence[int]) -> Tensor:
        model, cache = self._llm.engine.model, self._llm.engine.cache
        slots = cache.append([self._sequence], [len(ids)])
        step = model.step(cache, slots, [self._sequence], [len(ids)], [self._final])
        hidden_TD: Tensor = model(torch.tensor(ids, dtype=torch.long).to(model.device), step)
        return hidden_TD

    def fork(self) -> Reading:
        """Another reading that goes on from here; each is left by itself."""
        twin = copy(self)
        twin._sequence = self._llm.engine.cache.fork(self._sequence)
        return twin

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.engine.cache.free(self._sequence)


def needed_tokenizer(llm: LLM) -> Tokenizer:
    """The model's tokenizer. Raises ValueError where it has none."""
    if llm.tokenizer is None:
        raise ValueError(f"{llm.source.path}: there is no tokenizer, so no text can be read")
    return llm.tokenizer


def piece_rows(vocab: int) -> int:
    """Rows of logits that are made at a time."""
    return max(1, _PIECE_BYTES // (4 * vocab))


@torch.inference_mode()
def logits_in_pieces(model: Decoder, hidden_RD: Tensor) -> Iterator[Tensor]:
    """fp32 logits [rows, V] of consecutive rows, at most 16 MiB of them at a time (one row where that is more)."""
    for piece_RD in hidden_RD.split(piece_rows(model.config.vocab_size)):
        yield model.logits(piece_RD)


@torch.inference_mode()
def log_likelihoods(model: Decoder, hidden_RD: Tensor, targets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Natural-log probability, fp64 [R] on the CPU, of target r at row r; and whether it is the likeliest, bool [R]."""
    assert len(targets) == len(hidden_RD)
    wanted_R = torch.tensor(targets, dtype=torch.long).to(hidden_RD.device)
    found, first, start = [], [], 0
    for logits_RV in logits_in_pieces(model, hidden_RD):
        own_R = wanted_R[start : start + len(logits_RV)]
        chosen_R = logits_RV.gather(-1, own_R[:, None])[:, 0]
        found.append((chosen_R.double() - logits_RV.logsumexp(-1).double()).cpu())
        first.append((logits_RV.argmax(-1) == own_R).cpu())
        start += len(logits_RV)
    return torch.cat(found), torch.cat(first)


def branch_likelihoods(
    llm: LLM, start: Sequence[int], branches: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    """For each branch what `log_likelihoods` gives of its tokens after `start`, which is read once."""
    assert start
    assert all(branches)
    found = []
    with Reading(llm, len(start) + max(map(len, branches)) - 1) as reading:
        last_1D = reading.read(start)[-1:]
        for branch in branches:
            rows = [last_1D]
            if len(branch) > 1:
                with reading.fork() as twin:
                    rows.append(twin.read(branch[:-1]))
            found.append(log_likelihoods(llm.engine.model, torch.cat(rows), branch))
    return found
