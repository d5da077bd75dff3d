"""One answer on its way from the model to a file: printed while it grows, gathered whole, and told as figures.

Knows chunks (generation.results) and streams, no model. Text goes where the caller says; figures are plain data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from flexdecode.memory import peak_cuda_bytes, peak_resident_bytes, size

if TYPE_CHECKING:
    from flexdecode.generation.results import Chunk, Stats, TokenLogprob


@dataclass
class Answer:
    """What has arrived of an answer. `finish_reason` is "abort" when Ctrl-C ended it, and then `stats` is None."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stats: Stats | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def interrupted(self) -> bool:
        return self.finish_reason == "abort"


def receive(chunks: Iterator[Chunk], write: Callable[[str], None]) -> Answer:
    """Reads `chunks` to their end and gives each text to `write` as it comes. Ctrl-C closes the iterator, which aborts
    the request, and gives back what came so far; any other exception closes it and goes on."""
    answer = Answer()
    try:
        for chunk in chunks:
            answer.token_ids.extend(chunk.token_ids)
            if chunk.logprobs is not None:
                answer.logprobs = [*(answer.logprobs or []), *chunk.logprobs]
            answer.finish_reason = chunk.finish_reason or answer.finish_reason
            answer.stats = chunk.stats or answer.stats
            if chunk.text:
                answer.pieces.append(chunk.text)
                write(chunk.text)
    except KeyboardInterrupt:
        answer.finish_reason = "abort"
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            close()
    return answer


def stats_line(stats: Stats) -> str:
    """The figures of one answer in one line. A rate is left out where there is nothing to divide."""
    parts = [
        _counted("prompt", stats.prompt_tokens, stats.prefill_tokens_per_second),
        _counted("new", stats.new_tokens, stats.decode_tokens_per_second),
        f"first token {stats.time_to_first_token:.3f} s",
        f"peak memory {size(peak_resident_bytes())}",
    ]
    if stats.proposed_tokens:
        parts.insert(2, f"{stats.accepted_tokens} of {stats.proposed_tokens} proposed were right")
    cuda = peak_cuda_bytes()
    if cuda is not None:
        parts.append(f"peak CUDA memory {size(cuda)}")
    return " | ".join(parts)


def _counted(what: str, tokens: int, rate: float) -> str:
    plural = "" if tokens == 1 else "s"
    return f"{what} {tokens} token{plural}" + (f", {rate:.1f} tok/s" if rate > 0 else "")


def as_data(answer: Answer) -> dict[str, Any]:
    """The answer for --json. Seconds, bytes and tokens per second; a logprob of minus infinity is null."""
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "logprobs": None if answer.logprobs is None else [logprob_data(entry) for entry in answer.logprobs],
        "stats": None if answer.stats is None else _stats(answer.stats),
    }


def _stats(stats: Stats) -> dict[str, Any]:
    return {
        **asdict(stats),
        "prefill_tokens_per_second": stats.prefill_tokens_per_second,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "peak_memory_bytes": peak_resident_bytes(),
        "peak_cuda_memory_bytes": peak_cuda_bytes(),
    }


def logprob_data(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": _finite(entry.logprob),
        "top": [[token_id, _finite(logprob)] for token_id, logprob in entry.top],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
