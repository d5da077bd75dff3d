"""What generation gives back: chunks while it runs, a completion at its end, and the figures of both.

Plain data; metrics are defined here once. Seconds are wall time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token's natural-log probability under the raw logits, and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Stats:
    """Figures of one request. Time to first token runs from submission to the first sampled token and so includes
    the prefill; decode time runs from the first sampled token to the last. `reused_tokens` of the prompt were found in
    the cache and not computed for this request; `preemptions` counts how often it had to give its room in the cache to
    another and was computed anew. `proposed_tokens` were computed on a guess, and `accepted_tokens` of them were right
    and came without a step of their own."""

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token: float
    reused_tokens: int = 0
    preemptions: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Of the tokens that were computed."""
        computed = self.prompt_tokens - self.reused_tokens
        return computed / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first over the time they took: the first one belongs to the prefill."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 and self.new_tokens > 1 else 0.0


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer. The last one carries finish_reason and stats, and may have empty text."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer. `token_ids` holds every generated id, the stopping one included."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None
    stats: Stats
