"""What a verb says about a loaded model: under --verbose the form of its prompts, the settings and the choices made;
under --explain what the last decode step read and how near its time came to the floor that this sets.

Knows LLM and SamplingParams from the outside; writes to stderr.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields
from statistics import median
from typing import TYPE_CHECKING, Any

from flexdecode.cli.text import note
from flexdecode.memory import size

if TYPE_CHECKING:
    from flexdecode.generation.explain import Explanation
    from flexdecode.generation.params import SamplingParams
    from flexdecode.generation.results import Chunk, Stats
    from flexdecode.llm import LLM


def has_chat_template(llm: LLM) -> bool:
    return llm.tokenizer is not None and bool(llm.tokenizer.hf.chat_template)


def settings(params: SamplingParams) -> str:
    """The fields of `params` that are set to something."""
    values = ((field.name, getattr(params, field.name)) for field in fields(params))
    # Not a plain comparison with False, which 0 equals: a temperature of 0 is a setting.
    return ", ".join(
        f"{name} {value}"
        for name, value in values
        if value is not None and value is not False and value not in ((), {})
    )


def explain(llm: LLM, params: SamplingParams, chat: bool) -> None:
    """On stderr: the form of the prompt, the settings in force, and the choices that LLM made."""
    note("prompt: " + ("in the model's chat template" if chat else "as it is, no chat template"))
    note(f"sampling: {settings(params.resolve(llm.generation_config))}")
    for key, value in llm.describe().items():
        note(f"{key}: {value}")


class Watch:
    """Chunks as they come, and how long the model took for each: not what is done with a chunk in between."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self._seconds: list[float] = []  # a token each; those that came in one chunk share its time

    def __iter__(self) -> Iterator[Chunk]:
        first = True
        try:
            while True:
                start = time.perf_counter()
                chunk = next(self._chunks, None)
                if chunk is None:
                    return
                count = len(chunk.token_ids)
                if not first and count:
                    self._seconds += [(time.perf_counter() - start) / count] * count
                first = first and not count  # the first one holds the prefill
                yield chunk
        finally:
            close = getattr(self._chunks, "close", None)
            if close is not None:
                close()

    @property
    def median_seconds(self) -> float | None:
        """Of a token after the first chunk; None where there was none."""
        return median(self._seconds) if self._seconds else None


def last_step(llm: LLM, stats: Stats | None) -> Explanation | None:
    """The last decode step of an answer, None where it had none. The last token is never read back."""
    if stats is None or stats.new_tokens < 2:
        return None
    return llm.explain(stats.prompt_tokens + stats.new_tokens - 1)


def explanation_data(found: Explanation | None, median_seconds: float | None) -> dict[str, Any] | None:
    """The explanation for --json: seconds, bytes, and bytes per second."""
    if found is None:
        return None
    fraction = None if median_seconds is None else found.floor_seconds / median_seconds
    return found.as_dict() | {"step_seconds": median_seconds, "fraction_of_floor": fraction}


def explanation_lines(found: Explanation | None, median_seconds: float | None) -> Iterator[str]:
    """What a decode step read, the floor that this sets, and the time taken."""
    if found is None:
        yield "no decode step to explain: the answer ended with its first token"
        return
    experts = "" if found.experts is None else f" ({found.experts[0]} of {found.experts[1]} experts a token)"
    yield (
        f"the last step, at {found.context} tokens, read {size(found.weights_bytes)} of weights{experts} and "
        f"{size(found.kv_bytes)} of keys and values; masks spared it {size(found.kv_skipped_bytes)}"
    )
    for kv in found.kv:
        yield f"  {kv.layers} layers under {kv.mask}: {kv.keys:.10g} of {found.context} keys, {size(kv.read_bytes)}"
    yield f"  floor {_rate(found.floor_seconds)} at {found.read_bytes_per_second / 1e9:.1f} GB/s, as measured now"
    if median_seconds is not None:
        yield (
            f"  taken {_rate(median_seconds)} in the median, "
            f"{found.floor_seconds / median_seconds:.0%} of what memory allows"
        )


def _rate(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms a token ({1 / seconds:,.0f} tok/s)"
