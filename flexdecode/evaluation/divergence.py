"""How far a model's predictions are from a reference's: Kullback-Leibler divergence and agreement, token by token.

The two need not be in memory together: of the reference its final hidden states and its head are kept, from which its
logits are made anew, bit for bit, while the model runs. (A token's hidden state takes 1 to 16 KiB, its logits 200 to
1000. The likeliest few log-probabilities would be small too, but no divergence can be had from them.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexdecode.evaluation.reading import Progress, Reading, logits_in_pieces, needed_tokenizer
from flexdecode.evaluation.spread import mean_and_error
from flexdecode.evaluation.texts import bos_prefix, encode
from flexdecode.evaluation.windows import Window, choose_context, cut
from flexdecode.llm import LLM
from flexdecode.models.decoder import Decoder

_FIRST_BUCKET = 16  # positions; each bucket ends at four times the last one's end


@dataclass(frozen=True)
class Bucket:
    """Figures of the inputs at positions first ... last of their windows."""

    first: int
    last: int
    tokens: int
    kl: float
    kl_error: float | None
    agreement: float


@dataclass(frozen=True)
class Largest:
    """The token before which the two differ most: `token` of document `document`, counted from 0, and both models'
    likeliest there."""

    kl: float
    document: int
    token: int
    text: str
    reference_top: str
    model_top: str


@dataclass(frozen=True)
class Divergence:
    """Means over `tokens` predictions. `kl` is KL(reference || model) in nats, `agreement` the share with the same
    likeliest token, both with standard errors by blocks of tokens; `kl_median` tells whether few tokens make the mean.
    Both perplexities are of the same tokens."""

    kl: float
    kl_error: float | None
    kl_median: float
    agreement: float
    agreement_error: float | None
    reference_perplexity: float
    model_perplexity: float
    tokens: int
    context: int
    bos: bool
    by_position: tuple[Bucket, ...]
    largest: Largest


@dataclass(frozen=True)
class Reference:
    """What is kept of a reference: what it read, its final hidden states [T, D] a window, and its head."""

    texts: Sequence[str]
    limit: int | None
    documents: list[list[int]]
    windows: list[tuple[int, Window]]
    context: int
    bos: bool
    hidden: list[Tensor]
    head: Decoder


def read_reference(
    llm: LLM,
    texts: Sequence[str],
    *,
    context: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Reference:
    """Let a reference read `texts` in windows side by side. The LLM cannot be used afterwards: its layers are let go.

    Raises ValueError for text without two tokens to read.
    """
    tokenizer, model = needed_tokenizer(llm), llm.engine.model
    context, prefix = choose_context(context, llm.max_context), bos_prefix(tokenizer)
    documents = encode(tokenizer, texts, limit)
    jobs = cut(documents, context, context, prefix)
    kept = Reference(texts, limit, documents, jobs, context, bool(prefix), [], model)
    total, done = sum(window.count for _, window in jobs), 0
    for number, window in jobs:
        inputs = window.inputs(documents[number])
        with Reading(llm, len(inputs)) as reading:
            kept.hidden.append(reading.read(inputs))
        done += window.count
        if progress is not None:
            progress("reading the reference", done, total)
    del model.layers, model.embed, model.stack  # what remains of the decoder is its head
    return kept


def divergence(reference: Reference, llm: LLM, progress: Progress | None = None) -> Divergence:
    """Let a model read what the reference has read, and compare. Log-probabilities are fp64, of fp32 logits.

    Raises ValueError where the two have not the same vocabulary or do not cut the text into the same tokens.
    """
    tokenizer, model = needed_tokenizer(llm), llm.engine.model
    check_vocabulary(reference.head.config.vocab_size, model.config.vocab_size)
    if encode(tokenizer, reference.texts, reference.limit) != reference.documents:
        raise ValueError(
            f"the tokenizers of the reference and of {llm.source.path} cut the text into different tokens, so there is "
            "no token to compare at"
        )
    figures, tops, where = [], [], []
    jobs = reference.windows
    total = sum(window.count for _, window in jobs)
    for (number, window), theirs_TD in zip(jobs, reference.hidden, strict=True):
        ids = reference.documents[number]
        inputs = window.inputs(ids)
        with Reading(llm, len(inputs)) as reading:
            hidden_TD = reading.read(inputs)
        rows_T4, tops_T2 = _compare(reference.head, theirs_TD, model, hidden_TD, window.targets(ids))
        if not rows_T4.isfinite().all():
            raise ValueError(f"document {number} has log-likelihoods that are not finite; try --dtype fp32")
        figures.append(rows_T4)
        tops.append(tops_T2)
        where += [(number, window.scored + i, i) for i in range(len(rows_T4))]
        if progress is not None:
            progress("comparing", len(where), total)
    all_T4, all_T2 = torch.cat(figures), torch.cat(tops)
    kl_T, same_T = all_T4[:, 0], all_T4[:, 1]
    kl, kl_error = mean_and_error(kl_T)
    agreement, agreement_error = mean_and_error(same_T)
    worst = int(kl_T.argmax())
    number, token, _ = where[worst]
    shown = [reference.documents[number][token], *all_T2[worst].tolist()]
    text, reference_top, model_top = (tokenizer.decode([i], skip_special_tokens=False) for i in shown)
    return Divergence(
        kl=kl,
        kl_error=kl_error,
        kl_median=float(kl_T.median()),
        agreement=agreement,
        agreement_error=agreement_error,
        reference_perplexity=math.exp(float(all_T4[:, 2].mean())),
        model_perplexity=math.exp(float(all_T4[:, 3].mean())),
        tokens=len(kl_T),
        context=reference.context,
        bos=reference.bos,
        by_position=_by_position(torch.tensor([position for *_, position in where]), kl_T, same_T),
        largest=Largest(float(kl_T[worst]), number, token, text, reference_top, model_top),
    )


def check_vocabulary(reference: int, model: int) -> None:
    """Raises ValueError where two vocabularies differ in size."""
    if reference != model:
        raise ValueError(
            f"the reference has a vocabulary of {reference} and the model one of {model}; only models with the same "
            "tokens can be compared"
        )


@torch.inference_mode()
def _compare(
    head: Decoder, hidden_TD: Tensor, model: Decoder, own_TD: Tensor, targets: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """A row a token: divergence, agreement and both negative log-likelihoods of its target, fp64 [T, 4]; and the
    likeliest token of both, int64 [T, 2]."""
    rows, tops, start = [], [], 0
    pairs = zip(logits_in_pieces(head, hidden_TD), logits_in_pieces(model, own_TD), strict=True)
    for theirs_RV, ours_RV in pairs:
        p_RV, q_RV = (x.double().log_softmax(-1) for x in (theirs_RV, ours_RV))
        # What has probability 0 under the reference adds nothing, whatever the model gives it.
        terms_RV = torch.where(p_RV == -math.inf, 0.0, p_RV.exp() * (p_RV - q_RV))
        wanted_R1 = torch.tensor(targets[start : start + len(p_RV)], dtype=torch.long).to(p_RV.device)[:, None]
        top_R2 = torch.stack([theirs_RV.argmax(-1), ours_RV.argmax(-1)], dim=-1)
        same_R = (top_R2[:, 0] == top_R2[:, 1]).double()
        nll = [-x_RV.gather(-1, wanted_R1)[:, 0] for x_RV in (p_RV, q_RV)]
        rows.append(torch.stack([terms_RV.sum(-1), same_R, *nll], dim=-1).cpu())
        tops.append(top_R2.cpu())
        start += len(p_RV)
    return torch.cat(rows), torch.cat(tops)


def _by_position(position_T: Tensor, kl_T: Tensor, same_T: Tensor) -> tuple[Bucket, ...]:
    found, first, end = [], 0, _FIRST_BUCKET
    longest = int(position_T.max())
    while first <= longest:
        inside_T = (position_T >= first) & (position_T < end)
        kl, error = mean_and_error(kl_T[inside_T])
        last, tokens = min(end - 1, longest), int(inside_T.sum())
        found.append(Bucket(first, last, tokens, kl, error, float(same_T[inside_T].mean())))
        first, end = end, end * 4
    return tuple(found)
