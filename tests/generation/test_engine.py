"""The engine: requests come and go, are refused, end, and are counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdecode import LLM
from flexdecode.config import EngineConfig
from flexdecode.generation.engine import Engine
from tests.checkpoints import tiny
from tests.generation.running import engine, params, run
from tests.oracles import assert_close, expected, ids


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    d = tmp_path_factory.mktemp("model")
    tiny(d, request.param)
    return LLM(d, dtype="fp32").engine.model


def test_requests_that_come_and_go_at_any_time(model: Any) -> None:
    prompts = [ids(5 + 7 * n, seed=n) for n in range(8)]
    alone = [run(e, e.add(p, params(3 + i)))[0] for i, p in enumerate(prompts) for e in [engine(model)]]
    e = engine(model, max_running=3)
    requests = []
    for i, prompt in enumerate(prompts):
        requests.append(e.add(prompt, params(3 + i)))
        e.step()
    assert run(e, *requests) == alone
    assert e.cache.lengths == {}


def test_abort_at_every_stage_frees_everything(model: Any) -> None:
    free = engine(model).cache.free_tokens()
    wanted = run(e := engine(model), e.add(ids(20), params(10)))[0]
    for steps in range(6):
        e = engine(model, prefill_chunk=8)
        doomed, other = e.add(ids(30, seed=9), params(10)), e.add(ids(20), params(10))
        for _ in range(steps):
            e.step()
        e.abort(doomed)
        e.abort(doomed)
        assert doomed.finish_reason == "abort"
        assert run(e, other) == [wanted]
        assert e.cache.free_tokens() == free
        e.abort(other)
        assert other.finish_reason == "length"


def test_a_sampled_request_draws_the_same_beside_others(model: Any) -> None:
    own = params(25, temperature=1.0, seed=11, top_p=0.9)
    wanted = run(e := engine(model), e.add(ids(12), own))[0]
    e = engine(model)
    neighbours = [params(25, temperature=t, seed=s) for t, s in ((1.0, 11), (0.7, 12), (0.0, None))]
    requests = [e.add(ids(12), own), *[e.add(ids(30, seed=i), p) for i, p in enumerate(neighbours)]]
    assert run(e, *requests)[0] == wanted


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    d = tmp_path_factory.mktemp("llama")
    tiny(d, num_hidden_layers=2)
    return LLM(d, dtype="fp32").engine.model


def test_logits_leave_running_requests_alone(tiny_llama: Any) -> None:
    wanted = run(e := engine(tiny_llama), e.add(ids(20), params(10)))[0]
    e = engine(tiny_llama)
    request = e.add(ids(20), params(10))
    e.step()
    first = e.logits(ids(33), 7)
    assert run(e, request) == [wanted]
    assert_close(e.logits(ids(33)), first)
    with pytest.raises(ValueError, match="chunk"):
        e.logits(ids(3), 0)


@pytest.mark.parametrize("lengths", [range(14, 19), range(31, 34)])
def test_the_window_forgets_the_right_key(lengths: range, tmp_path: Path) -> None:
    """B43: forgetting one step early or late shows exactly when the length reaches the window."""
    hf = tiny(tmp_path, "mistral")
    llm = LLM(tmp_path, dtype="fp32")
    sequence = ids(33 + 40, seed=8)
    wanted = expected(hf, sequence)
    for length in lengths:
        e = Engine(llm.engine.model, EngineConfig(max_context=256, kv_tokens=256, page=4))
        got = e.logits(sequence[:length], length)
        rest = e.logits(sequence[: length + 40], 1)
        assert_close(got, wanted[:length])
        assert_close(rest, wanted[: length + 40])


def test_a_window_of_8_shows_8_keys(tmp_path: Path) -> None:
    """B44."""
    tiny(tmp_path, "mistral", num_hidden_layers=1, sliding_window=8)
    llm = LLM(tmp_path, dtype="fp32")
    base = ids(20)
    last = llm.logits(base)[-1]
    for changed, visible in ((12, True), (11, False), (0, False), (19, True)):
        other = list(base)
        other[changed] = (other[changed] + 1) % 256
        assert torch.equal(llm.logits(other)[-1], last) != visible


def test_windows_give_their_pages_back(tmp_path: Path) -> None:
    tiny(tmp_path, "mistral")
    llm = LLM(tmp_path, dtype="fp32")
    e = Engine(llm.engine.model, EngineConfig(max_context=256, kv_tokens=256, page=4))
    request = e.add(ids(30), params(200))
    for _ in range(150):
        e.step()
    assert request.sequence is not None
    held = [p for p in e.cache.groups[0].table(request.sequence) if p >= 0]
    assert len(held) <= 16 // 4 + 2


def test_the_clock_defines_the_figures(tiny_llama: Any) -> None:
    """B107: prefill, first token and decode are told apart, and by which tokens each is divided."""
    ticks = itertools.count()
    e = Engine(tiny_llama, EngineConfig(max_context=64, kv_tokens=64), clock=lambda: float(next(ticks)))
    request = e.add(ids(10), params(4))  # submitted 0
    run(e, request)  # started 1, tokens at 2, 3, 4, 5
    stats = request.stats()
    assert (stats.prompt_tokens, stats.new_tokens) == (10, 4)
    assert (stats.time_to_first_token, stats.prefill_seconds, stats.decode_seconds) == (2.0, 1.0, 3.0)
    assert stats.prefill_tokens_per_second == 10.0
    assert stats.decode_tokens_per_second == 1.0


@pytest.mark.parametrize("option", ["max_context", "kv_tokens", "page", "max_running", "prefill_chunk"])
def test_an_engine_needs_some_of_everything(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        EngineConfig(**({"max_context": 64, "kv_tokens": 64} | {option: 0}))


def test_logits_take_the_room_of_running_requests_for_a_while(tiny_llama: Any) -> None:
    """They are preempted and go on afterwards; what does not fit even so is refused with both numbers."""
    wanted = run(e := engine(tiny_llama), e.add(ids(40), params(20)))[0]
    e = engine(tiny_llama, kv_tokens=80)
    request = e.add(ids(40), params(20))
    e.step()
    assert_close(e.logits(ids(70)), engine(tiny_llama).logits(ids(70)))
    assert request.preemptions == 1
    with pytest.raises(ValueError, match="32 tokens after 64 do not fit into a cache of 80"):
        e.logits(ids(96), 32)
    assert run(e, request) == [wanted]
