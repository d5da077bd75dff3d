"""The same tokens by whatever schedule: alone, among neighbours, in chunks, from a reused prefix, preempted, forked.

The oracle is the request alone in an engine of its own that reuses nothing.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexdecode import SamplingParams
from flexdecode.generation.request import Request
from tests.generation.running import RIGHT, WRONG, Oracle, Told, engine, params, run, speculating
from tests.oracles import ids

KINDS = ["llama", "mistral", "gemma3_text", "gpt_oss", "sinks"]
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 11}, {"temperature": 0.7, "seed": 8, "min_p": 0.02}]
WAYS += [{"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "logprobs": 2}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "chunk"), [(1, 1), (1, 17), (2, 1), (2, 512), (7, 17), (64, 512)])
def test_neighbours_and_chunks_change_nothing(models: Any, oracles: Any, kind: str, batch: int, chunk: int) -> None:
    """Ragged neighbours of any sampling."""
    seeds = [n % 10 for n in range(batch - 1)]
    cases = [(ids(1 + 11 * n % 50, seed=n), params(4 + n % 7, **WAYS[n % len(WAYS)])) for n in seeds]
    cases.insert(batch // 2, (ids(37), params(12, **WAYS[batch % 2])))
    e = engine(models[kind], prefill_chunk=chunk, kv_tokens=8192)
    requests = [e.add(*case) for case in cases]
    got = run(e, *requests)
    for case, tokens in zip(cases, got, strict=True):
        assert tokens == oracles[kind](*case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_preempted_and_resumed(models: Any, oracles: Any, kind: str, way: dict[str, Any]) -> None:
    """What a sampler counted and drew is kept; the keys are computed anew."""
    for reuse in (False, True):
        e = engine(models[kind], kv_tokens=9 * 16, prefix_reuse=reuse)
        cases = [(ids(20 + n, seed=n), params(60, **way)) for n in range(4)]
        requests = [e.add(*case) for case in cases]
        assert run(e, *requests) == [oracles[kind](*case) for case in cases]
        # Where every layer has a short window, what a request holds does not grow, and admission knows that.
        assert any(r.preemptions for r in requests) == (kind != "mistral")
        assert requests[0].preemptions == 0
        assert requests[3].stats().preemptions == requests[3].preemptions


class EngineMachine(RuleBasedStateMachine):
    """add, add choices, step, abort, ask for logits, in any order, in a cache that is too small for all, with guesses
    that are right, wrong, or both by turns."""

    models: dict[str, Any]
    oracles: dict[str, Oracle]

    @initialize(
        kind=st.sampled_from(KINDS),
        chunk=st.sampled_from([1, 7, 40, 512]),
        pages=st.integers(6, 20),
        most=st.integers(1, 6),
        reuse=st.booleans(),
        page=st.sampled_from([4, 16]),
        guesses=st.sampled_from([None, "right", "wrong", "mixed", "mixed"]),
    )
    def start(self, kind: str, chunk: int, pages: int, most: int, reuse: bool, page: int, guesses: str | None) -> None:
        self.oracle, self.pages = self.oracles[kind], pages * 16 // page
        options = {"prefill_chunk": chunk, "max_running": most, "prefix_reuse": reuse}
        options |= {"kv_tokens": pages * 16, "page": page}
        if guesses is None:
            self.engine = engine(self.models[kind], **options)
        else:
            chance = random.Random(0)
            right = {"right": RIGHT, "wrong": WRONG, "mixed": lambda: chance.randrange(8)}[guesses]
            self.engine, _ = speculating(self.models[kind], lambda: Told(*self.coming.pop(0), right), **options)
        self.coming: list[tuple[int, list[int]]] = []
        self.open: list[tuple[Request, list[int], SamplingParams]] = []

    # Prompts begin alike, so that they find each other's pages.
    prompts = st.tuples(st.sampled_from([1, 2]), st.integers(0, 50), st.sampled_from([3, 4]), st.integers(1, 20))

    @rule(
        prompt=prompts,
        new=st.integers(0, 25),
        way=st.sampled_from(WAYS),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def add(self, prompt: tuple[int, int, int, int], new: int, way: dict[str, Any], n: int, priority: int) -> None:
        first, shared, second, rest = prompt
        tokens = [*ids(shared, seed=first), *ids(rest, seed=second)]
        choices = [params(new, **way).choice(i) for i in range(n)]
        self.coming = [(len(tokens), self.oracle(tokens, own)) for own in choices]
        for request, own in zip(self.engine.add_choices(tokens, choices, (), priority), choices, strict=True):
            self.open.append((request, tokens, own))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.busy:
                self.engine.step()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(self.open[data.draw(st.integers(0, len(self.open) - 1))][0])

    @rule(count=st.integers(1, 40))
    def logits(self, count: int) -> None:
        assert len(self.engine.logits(ids(count), 9)) == count

    @invariant()
    def tokens_are_those_of_the_lone_request(self) -> None:
        for request, tokens, own in getattr(self, "open", []):
            wanted = self.oracle(tokens, own)
            assert request.output_ids == wanted[: len(request.output_ids)]
            assert request.finish_reason in (None, "abort") or request.output_ids == wanted
        self.open = [case for case in getattr(self, "open", []) if case[0].finish_reason is None]

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            going = list(self.open)
            run(self.engine, *[request for request, _, _ in going])
            self.tokens_are_those_of_the_lone_request()
            assert self.engine.cache.lengths == {}
            assert self.engine.cache.free_pages() == [self.pages] * len(self.engine.cache.groups)


@pytest.fixture(scope="module", autouse=True)
def _prepared(models: dict[str, Any], oracles: dict[str, Oracle]) -> None:
    EngineMachine.models, EngineMachine.oracles = models, oracles


EngineMachine.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=15)
TestEngineMachine = EngineMachine.TestCase
