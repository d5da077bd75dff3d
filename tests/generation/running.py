"""How the tests of the engine run it, and what one request alone answers: the oracle of every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexdecode import LLM, SamplingParams
from flexdecode.config import EngineConfig
from flexdecode.generation.engine import Engine
from flexdecode.generation.request import Request
from tests.checkpoints import tiny

PAGE = 16


def model(d: Path, family: str = "llama", mask: str | None = None, **config: Any) -> Any:
    """A decoder with random weights of a family."""
    tiny(d, family, **config)
    return LLM(d, dtype="fp32", mask=mask).engine.model


def engine(model: Any, **options: Any) -> Engine:
    config = {"max_context": 256, "kv_tokens": 2048, "page": PAGE, "prefill_chunk": 64} | options
    return Engine(model, EngineConfig(**config))


def params(new: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new, ignore_eos=True, **({"temperature": 0.0} | options)).resolve({})


def run(e: Engine, *requests: Request) -> list[list[int]]:
    """Run until all is done; the tokens of `requests`."""
    while e.busy:
        e.step()
    assert all(request.finish_reason is not None for request in requests)
    return [request.output_ids for request in requests]


class Oracle:
    """The tokens of a request that has the engine to itself, with nothing to reuse."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = {}

    def __call__(self, prompt: Sequence[int], wanted: SamplingParams) -> list[int]:
        key = tuple(prompt), wanted
        if key not in self._known:
            e = engine(self._model, prefix_reuse=False)
            self._known[key] = run(e, e.add(prompt, wanted))[0]
        return self._known[key]


def idle_pages(e: Engine) -> list[int]:
    """Pages by group that are held by nobody, which is all of them once all is done."""
    assert e.cache.lengths == {}
    return [group.pages - group.free_pages for group in e.cache.groups]
