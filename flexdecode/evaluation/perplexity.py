"""Perplexity of documents under a model, read in windows that may overlap."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexdecode.evaluation.reading import Progress, Reading, log_likelihoods, needed_tokenizer
from flexdecode.evaluation.spread import mean_and_error
from flexdecode.evaluation.texts import bos_prefix, encode
from flexdecode.evaluation.windows import Window, choose_context, cut
from flexdecode.llm import LLM


@dataclass(frozen=True)
class Perplexity:
    """exp of `nll`, the mean negative log-likelihood in nats of `tokens` tokens, which stand for `bytes` bytes of text.

    Errors are standard errors, of `nll` by blocks of tokens and of the perplexity by the delta method:
    perplexity * nll_error. None where the text is too short for one.
    """

    perplexity: float
    perplexity_error: float | None
    nll: float
    nll_error: float | None
    bits_per_byte: float
    tokens: int
    bytes: int
    documents: int
    context: int
    stride: int
    bos: bool


def perplexity(
    llm: LLM,
    texts: Sequence[str],
    *,
    context: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of `texts`, each a document of its own.

    context: tokens that the model sees at most, BOS included; by default 1024 or what the model takes. stride: how far
    a window is from the last; half the context by default, the context for windows side by side. limit: take the first
    so many tokens only. Sums are fp64, of fp32 logits.

    Raises ValueError for text without two tokens to read, and for logits that are not finite.
    """
    tokenizer = needed_tokenizer(llm)
    context = choose_context(context, llm.max_context)
    stride = max(1, context // 2) if stride is None else stride
    prefix = bos_prefix(tokenizer)
    documents = encode(tokenizer, texts, limit)
    jobs = cut(documents, context, stride, prefix)
    scored: list[Tensor] = []
    counted: Counter[int] = Counter()
    total, done = sum(window.count for _, window in jobs), 0
    for number, window in jobs:
        scored.append(_nll(llm, window, documents[number], number))
        counted.update(window.targets(documents[number]))
        done += window.count
        if progress is not None:
            progress("scoring", done, total)
    nll_T = torch.cat(scored)
    mean, error = mean_and_error(nll_T)
    size = sum(len(tokenizer.token_bytes(token)) * times for token, times in counted.items())
    value = math.exp(mean)
    return Perplexity(
        perplexity=value,
        perplexity_error=None if error is None else value * error,
        nll=mean,
        nll_error=error,
        bits_per_byte=float(nll_T.sum()) / math.log(2) / max(size, 1),
        tokens=len(nll_T),
        bytes=size,
        documents=len(documents),
        context=context,
        stride=stride,
        bos=bool(prefix),
    )


def _nll(llm: LLM, window: Window, ids: Sequence[int], number: int) -> Tensor:
    """Negative log-likelihoods of a window's targets, fp64."""
    inputs = window.inputs(ids)
    with Reading(llm, len(inputs)) as reading:
        hidden_TD = reading.read(inputs)
    found_T, _ = log_likelihoods(llm.engine.model, hidden_TD[window.row :], window.targets(ids))
    if not found_T.isfinite().all():
        at = window.scored + int((~found_T.isfinite()).nonzero()[0])
        raise ValueError(f"token {at} of document {number} has a log-likelihood that is not finite; try --dtype fp32")
    return -found_T
