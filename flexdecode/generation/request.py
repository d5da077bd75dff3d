"""A request on its way: its tokens, how far they are in the cache, and when things happened to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flexdecode.generation.params import SamplingParams
from flexdecode.generation.results import FinishReason, Stats, TokenLogprob
from flexdecode.generation.sampler import Sampler
from flexdecode.generation.speculator import Speculator


@dataclass(eq=False)
class Request:
    """One prompt and what came of it. `params` are resolved and validated; `max_tokens` is set.

    `cached` counts the tokens whose keys are in the cache; `regime` is the rope regime under which they were made.
    Requests are served by `priority`, lower first, and then as they came. `followers` are further answers to the same
    prompt, which wait for it to be computed. `speculator` guesses how it goes on, None where nobody does.
    """

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    sampler: Sampler
    eos_token_ids: frozenset[int]
    priority: int = 0
    clock: Callable[[], float] = time.perf_counter
    speculator: Speculator | None = None
    sequence: int | None = None
    cached: int = 0
    regime: tuple[int, ...] = ()
    followers: list[Request] = field(default_factory=list)
    reused: int | None = None  # tokens of the prompt that were found when it was first admitted
    preemptions: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ValueError | None = None
    submitted: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """Its place among all requests."""
        return self.priority, self.number

    @property
    def length(self) -> int:
        """Tokens known so far, the prompt's included."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def most_cached(self) -> int:
        """Tokens that can ever be in the cache: the last sampled one is never read back."""
        return len(self.prompt_ids) + max(0, self.max_tokens - 1)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids [start, stop) of prompt and output."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.output_ids[start - prompt : stop - prompt]
        return [*self.prompt_ids[start:stop], *self.output_ids[: max(0, stop - prompt)]]

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Record a sampled token and decide whether it is the last. An end token wins over a spent budget."""
        now = self.clock()
        if not self.output_ids:
            self.first_token = now
        self.last_token = now
        self.output_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        count, p = len(self.output_ids), self.params
        ends = token_id in p.stop_token_ids or (token_id in self.eos_token_ids and not p.ignore_eos)
        if ends and count >= p.min_tokens:
            self.finish_reason = "stop"
        elif count >= self.max_tokens:
            self.finish_reason = "length"

    def stats(self) -> Stats:
        first = self.first_token or self.clock()
        return Stats(
            prompt_tokens=len(self.prompt_ids),
            new_tokens=len(self.output_ids),
            prefill_seconds=first - (self.started or self.submitted),
            decode_seconds=max(0.0, self.last_token - self.first_token),
            time_to_first_token=first - self.submitted,
            reused_tokens=self.reused or 0,
            preemptions=self.preemptions,
            proposed_tokens=0 if self.speculator is None else self.speculator.counts.proposed,
            accepted_tokens=0 if self.speculator is None else self.speculator.counts.accepted,
        )
