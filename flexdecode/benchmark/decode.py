"""Decoding speed by length of context, for one or more attention backends beside each other.

A backend needs a model of its own. Where all fit into memory their steps are timed in turn, in the same rounds as the
reads that set the floor; else one model is loaded after the other, and each has reads of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch

from flexdecode.attention.attend import BACKENDS
from flexdecode.attention.cache import bytes_per_token
from flexdecode.benchmark import rounds
from flexdecode.benchmark.model import READ, Floor, check_context, facts
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Times, Work
from flexdecode.benchmark.rows import FAILURES, Row, failure
from flexdecode.benchmark.session import Session, random_keys
from flexdecode.llm import LLM
from flexdecode.memory import available_bytes

Fill = Literal["prefill", "random"]
_WARM_UP = 3  # steps; a backend that compiles does so before
_LEAST = _WARM_UP + 3  # tokens of context: one of prompt, one that the prefill makes, one timed
_ROOM = 1 << 30  # bytes to be left free where several models are held


@dataclass(frozen=True)
class Plan:
    """What is to be measured: `repetitions` steps (fewer in contexts that are shorter) at each of `lengths`, in each of
    which the last timed step makes the last token. `fill` says how keys and values come about."""

    model: str
    attentions: tuple[str, ...]
    lengths: tuple[int, ...]
    repetitions: int = 20
    fill: Fill = "prefill"

    def steps(self, length: int) -> int:
        return min(self.repetitions, length - _LEAST + 1)

    def prompt(self, length: int) -> int:
        return length - 1 - _WARM_UP - self.steps(length)

    def keys(self, length: int) -> int:
        """What the timed step in the middle sees."""
        return length - 1 - (self.steps(length) - 1) // 2


@dataclass
class _Runner:
    """One backend's model at one length. A step that fails is the last, and does not keep others from theirs."""

    llm: LLM
    session: Session | None = None
    prefill_seconds: float | None = None
    problem: BaseException | None = None

    def start(self, plan: Plan, length: int) -> None:
        new = 1 + _WARM_UP + plan.steps(length)
        try:
            session = self.session = Session(self.llm.engine, plan.prompt(length), new)
            if plan.fill == "random":
                with random_keys(self.llm.engine.model):
                    session.until_first_tokens()
            else:
                self.prefill_seconds = Work(session.until_first_tokens).seconds()
        except FAILURES as problem:
            self.problem = problem

    def step(self) -> None:
        if self.problem is not None:
            return
        assert self.session is not None
        try:
            self.session.step()
        except FAILURES as problem:
            self.problem = problem

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def bench(plan: Plan, load: Callable[[str], LLM]) -> Iterator[Row]:
    """A row for each length and backend, as it is measured. One that failed has `failure` and no times.

    `load` makes the model with a backend. Raises ValueError where no backend can serve, or the context ends too soon.
    """
    if min(plan.lengths) < _LEAST:
        raise ValueError(f"--lengths {min(plan.lengths)}: decoding is timed from {_LEAST} tokens on")
    known = ["auto", *(backend.name for backend in BACKENDS)]
    for name in plan.attentions:
        if name not in known:
            raise ValueError(f"attention backend {name!r} is not known (known: {', '.join(known)})")
    loaded: dict[str, LLM] = {}
    problems: dict[str, str] = {}  # in words: an exception would keep alive what was loaded before it
    for name in plan.attentions:
        if loaded and not _another_fits(loaded, plan):
            yield from _rows(plan, loaded, together=len(loaded) > 1)
            loaded.clear()
        try:
            loaded[name] = load(name)
        except FAILURES as problem:
            problems[name] = str(problem)
            continue
        check_context(loaded[name], max(plan.lengths), f"--lengths {max(plan.lengths)}")
    if len(problems) == len(plan.attentions):
        raise ValueError(next(iter(problems.values())))
    if loaded:
        yield from _rows(plan, loaded, together=len(loaded) > 1)
    for name, reason in problems.items():
        for length in plan.lengths:
            yield {**_columns(plan, name, length), **failure(ValueError(reason))}


def _another_fits(loaded: Mapping[str, LLM], plan: Plan) -> bool:
    """Whether one more model like these has room, and the keys of the longest context in each."""
    engine = next(iter(loaded.values())).engine
    cached = max(plan.lengths) * sum(bytes_per_token(layer, engine.cache.dtype) for layer in engine.cache.layers)
    needed = engine.model.weight_bytes + (len(loaded) + 1) * cached + _ROOM
    return available_bytes(engine.model.device) > needed


def _columns(plan: Plan, name: str, length: int) -> Row:
    return {"benchmark": "decode", "model": plan.model, "backend": name, "context": length, "batch": 1}


def _rows(plan: Plan, loaded: Mapping[str, LLM], together: bool) -> Iterator[Row]:
    for length in plan.lengths:
        try:
            measured = _measured(plan, loaded, length)
        except FAILURES as problem:  # no backend's own
            measured = dict.fromkeys(loaded, failure(problem))
        for name, found in measured.items():
            told = {**_columns(plan, name, length), **facts(loaded[name], plan.model)}
            yield {**told, "fill": plan.fill, "in_turn": together, **found}


@torch.inference_mode()
def _measured(plan: Plan, loaded: Mapping[str, LLM], length: int) -> dict[str, Row]:
    """What is to be told of each backend at one length."""
    runners = {name: _Runner(llm) for name, llm in loaded.items()}
    steps = plan.steps(length)
    with ExitStack() as stack:
        for runner in runners.values():
            stack.callback(runner.close)
            runner.start(plan, length)
        ready = {name: runner for name, runner in runners.items() if runner.problem is None}
        if ready:
            floor = Floor(next(iter(ready.values())).llm, plan.keys(length))
            works = {name: Work(runner.step) for name, runner in ready.items()}
            times = rounds.run({**works, READ: Work(floor.reader)}, steps, warm_up=_WARM_UP)
    told: dict[str, Row] = {}
    for name, runner in runners.items():
        if runner.problem is not None:
            told[name] = failure(runner.problem)
        else:
            told[name] = _figures(name, runner, floor, times)
            others = [one for one in ready if one != name and runners[one].problem is None]
            told[name] |= {f"times_{one}": times.ratio(one, name) for one in others}
            told[name] |= provenance(steps, _WARM_UP)
    return told


def _figures(name: str, runner: _Runner, floor: Floor, times: Times) -> Row:
    return {
        **times.spread(name),
        "tokens_per_second": 1e3 / times.ms(name),
        **floor.columns(times, step=name),
        "prefill_seconds": runner.prefill_seconds,
    }
