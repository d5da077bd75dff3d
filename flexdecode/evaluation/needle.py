"""Retrieval by depth and length: is a fact found that stands somewhere in a long prompt?

Two scores. `found` asks the model and looks for the answer in what it says, greedily. `likelihood` is graded, for
models too small to answer: of ten answers that differ in a number only, the share of probability of the right one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

from flexdecode.evaluation.haystack import Haystack, Needle, Prompt, draw_needle
from flexdecode.evaluation.reading import Progress, branch_likelihoods, needed_tokenizer
from flexdecode.generation.params import SamplingParams
from flexdecode.llm import LLM

ANSWER_TOKENS = 32
_STRIDE = 7919  # sentences that two trials' haystacks begin apart: a prime, so that many trials begin at many places


@dataclass(frozen=True)
class Found:
    """One trial. `length` and `depth` are what was asked for, `prompt_tokens` and `at` what was made of it: `at` is the
    share of the text before the fact. `margin` is by how many nats the right answer is likelier than the likeliest
    wrong one."""

    length: int
    depth: float
    trial: int
    prompt_tokens: int
    at: float
    found: bool
    likelihood: float
    logprob: float
    margin: float
    answer: str
    said: str
    chat: bool


@dataclass(frozen=True)
class Summary:
    """Over all trials of all lengths and depths. The error is that of the mean over trials, which have facts and texts
    of their own; None for a single one."""

    found: int
    asked: int
    likelihood: float
    likelihood_error: float | None
    chat: bool


def needle(
    llm: LLM,
    text: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    trials: Sequence[int] = (0,),
    progress: Progress | None = None,
) -> Iterator[Found]:
    """Ask for each length (tokens of the prompt), depth (0 to 1) and trial, in that order.

    A trial is a number that decides on the fact and on the place in the text where the haystack begins, for all lengths
    and depths alike. Prompts use the chat template where there is one. Raises ValueError, before the first answer, for
    lengths that the text or the model has no room for.
    """
    tokenizer = needed_tokenizer(llm)
    _check(lengths, depths, trials)
    hidden = [draw_needle(trial, text) for trial in trials]
    haystacks = [Haystack(tokenizer, text, _STRIDE * trial) for trial in trials]
    for haystack, fact in zip(haystacks, hidden, strict=True):
        _check_room(llm, max(lengths), max(ANSWER_TOKENS, *map(len, haystack.candidates(fact))))
        haystack.prompt(fact, min(lengths), 0.0)
        haystack.prompt(fact, max(lengths), 0.0)
    total, done = sum(lengths) * len(depths) * len(trials), 0
    for length in lengths:
        for depth in depths:
            for trial, haystack, fact in zip(trials, haystacks, hidden, strict=True):
                prompt = haystack.prompt(fact, length, depth)
                yield _ask(llm, haystack, fact, prompt, (length, depth, trial))
                done += length
                if progress is not None:
                    progress("asking", done, total)


def _check(lengths: Sequence[int], depths: Sequence[float], trials: Sequence[int]) -> None:
    if not lengths or not depths or not trials:
        raise ValueError(
            f"{len(lengths)} lengths, {len(depths)} depths and {len(trials)} trials: at least 1 of each is needed"
        )
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"a depth of {depth} lies outside of the text: wants 0 to 1")


def _check_room(llm: LLM, length: int, answer: int) -> None:
    if length + answer > llm.max_context:
        raise ValueError(
            f"a length of {length} and {answer} tokens of answer make {length + answer}, and the context ends at "
            f"{llm.max_context}; ask for less or raise max_context (--max-context)"
        )


def _ask(llm: LLM, haystack: Haystack, fact: Needle, prompt: Prompt, cell: tuple[int, float, int]) -> Found:
    # A penalty on repetition would forbid the one thing that is asked for.
    greedy = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, repetition_penalty=1.0)
    (said,) = llm.generate_batch([prompt.ids], greedy)
    scores = candidate_logprobs(llm, prompt.ids, haystack.candidates(fact))
    return Found(
        *cell,
        prompt_tokens=len(prompt.ids),
        at=prompt.depth,
        found=fact.answer in said.text.replace(",", ""),
        likelihood=float(scores.softmax(0)[0]),
        logprob=float(scores[0]),
        margin=float(scores[0] - scores[1:].max()),
        answer=fact.answer,
        said=said.text,
        chat=haystack.chat,
    )


def candidate_logprobs(llm: LLM, prompt: Sequence[int], candidates: Sequence[Sequence[int]]) -> torch.Tensor:
    """Natural-log probability, fp64 [candidates], of what each has beyond the beginning that all share. The prompt and
    that beginning are read once. No candidate may be the beginning of another."""
    shared = 0
    while len({candidate[shared] for candidate in candidates}) == 1:
        shared += 1
    found = branch_likelihoods(llm, [*prompt, *candidates[0][:shared]], [c[shared:] for c in candidates])
    return torch.stack([logprobs.sum() for logprobs, _ in found])


def summarize(found: Sequence[Found]) -> Summary:
    by_trial: dict[int, list[float]] = {}
    for one in found:
        by_trial.setdefault(one.trial, []).append(one.likelihood)
    means = [fmean(values) for values in by_trial.values()]
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Summary(sum(one.found for one in found), len(found), fmean(means), error, found[0].chat)
