"""How the tests of the engine run it, and what one request alone answers: the oracle of every schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexdecode import LLM, SamplingParams
from flexdecode.config import EngineConfig
from flexdecode.generation.engine import Engine
from flexdecode.generation.request import Request
from flexdecode.generation.scheduler import Work
from flexdecode.generation.speculative import Proposer
from tests.checkpoints import VOCAB, tiny

PAGE = 16


def model(d: Path, family: str = "llama", mask: str | None = None, **config: Any) -> Any:
    """A decoder with random weights of a family."""
    tiny(d, family, **config)
    return LLM(d, dtype="fp32", mask=mask).engine.model


def longrope(d: Path, border: int = 48) -> Any:
    """A decoder whose keys turn otherwise from `border` tokens on."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0, 8, 16, 32] * 2, "rope_type": "longrope"}
    rope = {**factors, "rope_theta": 10000.0, "original_max_position_embeddings": border, "factor": 4.0}
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 16, "max_position_embeddings": 192}
    return model(d, "phi3", original_max_position_embeddings=border, rope_parameters=rope, **sizes)


def engine(model: Any, **options: Any) -> Engine:
    config = {"max_context": 256, "kv_tokens": 2048, "page": PAGE, "prefill_chunk": 64} | options
    return Engine(model, EngineConfig(**config))


class Steps:
    """A clock by which a run of the model takes a second, whatever it computes, so that every right guess pays; and
    what each run computed."""

    def __init__(self) -> None:
        self.works: list[list[Work]] = []

    def __call__(self) -> float:
        return float(len(self.works))

    @property
    def count(self) -> int:
        return len(self.works)


def speculating(model: Any, proposer: Callable[[], Proposer], **options: Any) -> tuple[Engine, Steps]:
    """An engine that speculates, and the clock that it goes by."""
    config = {"max_context": 256, "kv_tokens": 2048, "page": PAGE, "prefill_chunk": 64} | options
    steps = Steps()
    e = Engine(model, EngineConfig(**config), steps, proposer)
    compute = e._runner.run

    def run_and_count(works: Sequence[Work]) -> Any:
        steps.works.append(list(works))
        return compute(works)

    e._runner.run = run_and_count  # type: ignore[method-assign]
    return e, steps


class Told:
    """A proposer that knows the answer and how much of it to tell: `right` tokens, and then others, up to what is
    asked for."""

    def __init__(self, prompt: int, answer: Sequence[int], right: Callable[[], int]) -> None:
        self._prompt, self._answer, self._right = prompt, answer, right

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        known, right = len(tokens) - self._prompt, self._right()
        coming = [*self._answer[known:], 0]
        wrong = [(token + 1) % VOCAB for token in coming[right:]]
        return [*coming[:right], *wrong][:most]

    def close(self) -> None:
        self._answer = ()


RIGHT, WRONG = (lambda: 99), (lambda: 0)


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
