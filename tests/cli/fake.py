"""A stand-in for flexdecode.llm: answers from a script, remembers what it was asked, never imports a model.

`install(monkeypatch, ...)` puts it where the command line imports LLM from. Run as a program
(`python -m tests.cli.fake '{"answers": [...]}' VERB ...`) it is the whole command line over the fake, for tests that
need a process of their own.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from flexdecode.generation.results import Chunk, Completion, Stats, TokenLogprob
from flexdecode.jobs import Finished, Job

INTERRUPT = "<ctrl-c>"  # a piece of an answer at which Ctrl-C arrives
SLOW = "<slow>"  # a piece at which the answer waits for a real signal
STATS = Stats(prompt_tokens=5, new_tokens=3, prefill_seconds=0.5, decode_seconds=0.25, time_to_first_token=0.5)


@dataclass
class Script:
    """What the fake will do, and what it was asked. Each answer is a list of texts, or one exception to raise."""

    answers: list[Any] = field(default_factory=lambda: [["Hello", ", ", "world"]])
    has_chat_template: bool = True
    load_error: Exception | None = None
    progress: bool = True
    calls: list[tuple[str, Any, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    overflows: list[str] = field(default_factory=list)
    closed: int = 0
    pace: float = 0.0  # seconds before each end of a job


class FakeTokenizer:
    def __init__(self, chat_template: str | None) -> None:
        self.hf = types.SimpleNamespace(chat_template=chat_template)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"t{token_id}" for token_id in ids)


def fake_llm_class(script: Script) -> type:
    class LLM:
        tokenizer = FakeTokenizer("{{ messages }}" if script.has_chat_template else None)
        generation_config: Mapping[str, Any] = {"temperature": 0.6, "do_sample": True}

        def __init__(self, model: str, **options: Any) -> None:
            script.options = {"model": model, **options}
            if script.load_error is not None:
                raise script.load_error
            if script.progress:
                options["progress"]("load", 50, 100)
                options["progress"]("load", 100, 100)

        def describe(self) -> dict[str, Any]:
            return {"family": "fake", "layers": 2, "weights_bytes": 1 << 20}

        def stream(self, prompt: str, params: Any = None) -> Iterator[Chunk]:
            script.calls.append(("stream", prompt, params))
            return self._answer(params)

        def stream_chat(self, messages: Any, params: Any = None, overflow: str = "error") -> Iterator[Chunk]:
            script.overflows.append(overflow)
            script.calls.append(("stream_chat", [dict(message) for message in messages], params))
            return self._answer(params)

        def complete(self, jobs: Iterator[Job]) -> Iterator[Finished]:
            """Answers "re: PROMPT", the later of two jobs first; a prompt that begins with "!" fails."""
            held: list[Job] = []
            for job in jobs:
                script.calls.append(("complete", job.messages or job.prompts, job.params))
                held.append(job)
                if len(held) == 2:
                    yield self._finished(held.pop())
            yield from map(self._finished, held)

        def _finished(self, job: Job) -> Finished:
            time.sleep(script.pace)
            prompt = str(job.prompts[0] if job.messages is None else job.messages[-1]["content"])
            if prompt == INTERRUPT:
                raise KeyboardInterrupt
            if prompt.startswith("!"):
                return Finished(job, error=ValueError(f"no answer to {prompt}"))
            completion = Completion(f"re: {prompt}", (1, 2, 3), "stop", 5, None, STATS)
            return Finished(job, (completion,) * job.answers)

        def _answer(self, params: Any) -> Iterator[Chunk]:
            pieces = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            if isinstance(pieces, Exception):
                raise pieces
            return self._chunks(list(pieces), params)

        def _chunks(self, pieces: list[str], params: Any) -> Iterator[Chunk]:
            try:
                for index, piece in enumerate(pieces):
                    if piece == INTERRUPT:
                        raise KeyboardInterrupt
                    if piece == SLOW:
                        time.sleep(60)
                    logprobs = None
                    if params.logprobs is not None:
                        logprobs = (TokenLogprob(index, -0.5, ((index, -0.5), (99, float("-inf")))[: params.logprobs]),)
                    yield Chunk(piece, (index,), logprobs)
                yield Chunk("", (), None, "stop", STATS)
            finally:
                script.closed += 1

    return LLM


def fake_module(script: Script) -> types.ModuleType:
    def describe_model(model: str, **options: Any) -> dict[str, Any]:
        script.calls.append(("describe_model", model, options))
        report = {"family": "fake", "layers": 2, "weights_bytes": 3 << 20, "parts": {"embedding_bytes": 1024}}
        asked = options["max_context"]
        return report if asked is None else {**report, "max_context": asked}

    module = types.ModuleType("flexdecode.llm")
    module.__dict__.update(LLM=fake_llm_class(script), describe_model=describe_model)
    return module


def install(monkeypatch: pytest.MonkeyPatch, **script: Any) -> Script:
    """The fake in place of flexdecode.llm until the test ends."""
    made = Script(**script)
    monkeypatch.setitem(sys.modules, "flexdecode.llm", fake_module(made))
    return made


def main() -> int:
    from flexdecode.cli.main import main as program

    sys.modules["flexdecode.llm"] = fake_module(Script(**json.loads(sys.argv[1])))
    return program(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
