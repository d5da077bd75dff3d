"""Guessed tokens in the engine: the same answers in fewer steps, and nothing taken from anybody."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdecode import LLM
from flexdecode.generation.engine import Engine
from flexdecode.generation.ngram import PromptLookup
from flexdecode.generation.scheduler import Scheduler
from tests.checkpoints import tiny
from tests.generation.running import RIGHT, WRONG, Told, engine, idle_pages, longrope, model, params, run, speculating
from tests.oracles import ids

KINDS = ["llama", "mistral", "gemma3_text", "gpt_oss", "sinks"]
WAYS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 11}, {"repetition_penalty": 1.3, "logprobs": 2}]
WAYS += [{"temperature": 0.7, "seed": 5, "presence_penalty": 0.5, "min_tokens": 9, "logprobs": 0}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [4, 64])
def test_right_guesses_take_few_steps(models: Any, oracles: Any, kind: str, page: int) -> None:
    """The prompt, two steps by which the cost of one row is known, and then as many rows as the longest known step
    lets expect, twice as many at most: 2, 2, 4, 4, 8, 8, 16 and so on."""
    prompt, own = ids(37), params(80)
    e, steps = speculating(models[kind], lambda: Told(37, oracles[kind](prompt, own), RIGHT), page=page)
    request = e.add(prompt, own)
    assert run(e, request) == [oracles[kind](prompt, own)]
    assert steps.count == 13
    assert request.stats().proposed_tokens == request.stats().accepted_tokens == 80 - 13
    assert idle_pages(e) == [0] * len(e.cache.groups)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [4, 64])
def test_wrong_guesses_change_nothing(models: Any, oracles: Any, kind: str, page: int) -> None:
    prompt, own = ids(37), params(80)
    e, steps = speculating(models[kind], lambda: Told(37, oracles[kind](prompt, own), WRONG), page=page)
    request = e.add(prompt, own)
    assert run(e, request) == [oracles[kind](prompt, own)]
    assert steps.count == 80
    assert request.stats().accepted_tokens == 0
    assert sum(bool(work.proposed) for (work,) in steps.works) > 20
    assert idle_pages(e) == [0] * len(e.cache.groups)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_mixed_guesses_among_neighbours(models: Any, oracles: Any, kind: str, way: dict[str, Any]) -> None:
    """Sampled, penalized and with log-probabilities: what the lone request without guesses gives."""
    chance, coming = random.Random(0), list[tuple[int, list[int]]]()
    cases = [(ids(20 + 9 * n, seed=n), params(30 + n, **way)) for n in range(4)]
    e, steps = speculating(models[kind], lambda: Told(*coming.pop(0), lambda: chance.randrange(9)), page=4)
    requests = []
    for prompt, own in cases:
        coming.append((len(prompt), oracles[kind](prompt, own)))
        requests.append(e.add(prompt, own))
    assert run(e, *requests) == [oracles[kind](*case) for case in cases]
    assert sum(request.stats().accepted_tokens for request in requests) > 20
    for request, (prompt, own) in zip(requests, cases, strict=True):
        plain = (other := engine(models[kind])).add(prompt, own)
        run(other, plain)
        assert [x.token_id for x in request.logprobs] == [x.token_id for x in plain.logprobs]
        for ours, theirs in zip(request.logprobs, plain.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert len(ours.top) == len(theirs.top)
    assert any(len(works) > 1 and any(work.proposed for work in works) for works in steps.works)


def test_lookup_in_a_text_that_repeats_itself(tmp_path: Path) -> None:
    """A model that comes back to where it was says the same again."""
    decoder = model(tmp_path, num_hidden_layers=2, hidden_size=64, intermediate_size=64, head_dim=16)
    wanted = run(other := engine(decoder), other.add(ids(10), params(200)))[0]
    e, steps = speculating(decoder, PromptLookup)
    request = e.add(ids(10), params(200))
    assert run(e, request) == [wanted]
    assert steps.count == 200 - request.stats().accepted_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_take_nothing_from_anybody(
    models: Any, oracles: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache that is too small for all: when guesses are made nobody is admitted, preempted or left out, and they
    fit beside what was planned."""
    plan = Scheduler._speculate

    def watched(self: Scheduler) -> None:
        before = list(self._works), list(self.running), list(self.waiting), [r.preemptions for r in self.running]
        plan(self)
        assert before == (list(self._works), self.running, self.waiting, [r.preemptions for r in self.running])
        assert all(a <= b for a, b in zip(self._promised, self._cache.free_pages(), strict=True))

    monkeypatch.setattr(Scheduler, "_speculate", watched)
    coming: list[tuple[int, list[int]]] = []
    cases = [(ids(20 + n, seed=n), params(60)) for n in range(4)]
    e, steps = speculating(models[kind], lambda: Told(*coming.pop(0), RIGHT), kv_tokens=9 * 16, page=4)
    requests = []
    for prompt, own in cases:
        coming.append((len(prompt), oracles[kind](prompt, own)))
        requests.append(e.add(prompt, own))
    assert run(e, *requests) == [oracles[kind](*case) for case in cases]
    assert requests[0].preemptions == 0
    assert any(work.proposed for works in steps.works for work in works)


def test_guesses_end_with_the_answer_and_stay_within_the_budget(models: Any, oracles: Any) -> None:
    wanted = oracles["llama"](ids(30), params(50))
    for new in (1, 2, 5, 20):
        e, steps = speculating(models["llama"], lambda: Told(30, wanted, RIGHT))
        request = e.add(ids(30), params(new))
        assert run(e, request) == [wanted[:new]]
        assert max(work.start + work.count for works in steps.works for work in works) <= request.most_cached
    e, steps = speculating(models["llama"], lambda: Told(30, wanted, RIGHT), prefill_chunk=4)
    assert run(e, e.add(ids(30), params(50))) == [wanted]
    assert max(sum(work.count for work in works) for works in steps.works) == 4


def test_an_end_inside_a_guess_is_the_end(models: Any, oracles: Any) -> None:
    wanted = oracles["llama"](ids(30), params(40))
    at = next(n for n in range(25, 40) if wanted[n] not in wanted[:n])
    own = params(40, stop_token_ids=(wanted[at],))
    e, _ = speculating(models["llama"], lambda: Told(30, wanted, RIGHT))
    request = e.add(ids(30), own)
    assert run(e, request) == [wanted[: at + 1]]
    assert request.finish_reason == "stop"


def test_nothing_is_guessed_beside_prompts_and_before_the_first_token(models: Any, oracles: Any) -> None:
    wanted = oracles["llama"](ids(10), params(60))
    e, steps = speculating(models["llama"], lambda: Told(10, wanted, RIGHT), prefill_chunk=16)
    first = e.add(ids(10), params(60))
    for _ in range(8):
        e.step()
    second = e.add(ids(100, seed=3), params(1))
    assert run(e, first)[0] == wanted
    assert second.finish_reason == "length"
    for works in steps.works:
        prompts = [work for work in works if work.start < len(work.request.prompt_ids)]
        assert not prompts or not any(work.proposed for work in works)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_no_guess_crosses_a_change_of_regime(kind: str, tmp_path: Path) -> None:
    if kind == "longrope":
        decoder = longrope(tmp_path)
    else:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        decoder = model(tmp_path, num_hidden_layers=1, rope_parameters=rope, max_position_embeddings=48)
    prompt, own = ids(20), params(60)
    wanted = run(other := engine(decoder), other.add(prompt, own))[0]
    e, steps = speculating(decoder, lambda: Told(20, wanted, RIGHT))
    assert run(e, e.add(prompt, own)) == [wanted]
    ends = [(work.start + 1, work.start + work.count) for works in steps.works for work in works if work.proposed]
    assert ends
    assert decoder.rope_regime(48) != decoder.rope_regime(49)
    assert all(decoder.rope_regime(first) == decoder.rope_regime(last) for first, last in ends)
    assert any(first > 48 for first, _ in ends) == (kind == "longrope")


def test_only_tokens_of_the_answer_are_remembered(models: Any, oracles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are full of guesses for a moment, wrong ones among them; none of these may be found."""
    chance = random.Random(1)
    for kind in ("llama", "gemma3_text"):
        prompt, own = ids(18), params(70)
        wanted = oracles[kind](prompt, own)
        e, _ = speculating(models[kind], lambda w=wanted: Told(18, w, lambda: chance.randrange(9)), page=4)
        told: list[int] = []
        monkeypatch.setattr(
            e.cache, "remember", lambda s, t, told=told, do=e.cache.remember: (told.extend(t), do(s, t))
        )
        assert run(e, e.add(prompt, own)) == [wanted]
        assert told == [*prompt, *wanted][: len(told)]
        assert len(told) == (18 + 69) // 4 * 4
        monkeypatch.undo()
        again = [*prompt, *wanted, 5]
        e._proposer = None
        second = e.add(again, params(9))
        assert run(e, second) == [oracles[kind](again, params(9))]
        assert second.stats().reused_tokens > 0


def test_choices_guess_each_for_itself(models: Any, oracles: Any) -> None:
    own = [params(25, temperature=1.0, seed=7).choice(i) for i in range(4)]
    answers = [oracles["gemma3_text"](ids(40), p) for p in own]
    coming = list(answers)
    e, steps = speculating(models["gemma3_text"], lambda: Told(40, coming.pop(0), RIGHT))
    assert run(e, *e.add_choices(ids(40), own)) == answers
    assert steps.count < 25
    assert idle_pages(e) == [0, 0]


def test_a_row_that_is_no_number_ends_the_answer_where_it_would_have_ended(models: Any, oracles: Any) -> None:
    wanted = oracles["llama"](ids(20), params(40))
    for at in range(10, 18):
        e, steps = speculating(models["llama"], lambda: Told(20, wanted, RIGHT))
        compute = e._runner.run

        @torch.inference_mode()
        def broken(works: Any, compute: Any = compute, at: int = at) -> torch.Tensor:
            logits_RV: torch.Tensor = compute(works)
            for row in range(works[0].rows):
                if works[0].request.length + row - 20 == at:
                    logits_RV[row, 3] = torch.nan
            return logits_RV

        e._runner.run = broken  # type: ignore[method-assign]
        request = e.add(ids(20), params(40))
        while e.busy:
            e.step()
        assert (request.output_ids, request.finish_reason) == (wanted[:at], "abort")
        assert "NaN" in str(request.error)
        assert e.cache.lengths == {}
        assert steps.count < at


@pytest.mark.parametrize("where", ["model", "guess", "sampler"])
def test_a_step_that_breaks_off_is_run_again(
    models: Any, oracles: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)
    wanted = oracles["mistral"](ids(20), params(60))
    e, _ = speculating(models["mistral"], lambda: Told(20, wanted, lambda: chance.randrange(9)), page=4)
    request = e.add(ids(20), params(60))
    room, name = {
        "model": (e._runner, "compute"),
        "guess": (Told, "propose"),
        "sampler": (request.sampler._penalties, "apply"),
    }[where]
    do: Any = getattr(room, name)

    def failing(*args: Any, **named: Any) -> Any:
        if chance.random() < 0.25:
            raise KeyboardInterrupt
        return do(*args, **named)

    monkeypatch.setattr(room, name, failing)
    broken = 0
    while e.busy:
        try:
            e.step()
        except KeyboardInterrupt:
            broken += 1
    assert broken > 1
    assert request.output_ids == wanted
    assert e.cache.lengths == {}


def test_an_abort_ends_the_guessing(models: Any, oracles: Any) -> None:
    closed: list[Told] = []

    class Closing(Told):
        def close(self) -> None:
            closed.append(self)

    wanted = oracles["llama"](ids(20), params(60))
    e, _ = speculating(models["llama"], lambda: Closing(20, wanted, RIGHT))
    running, waiting = e.add(ids(20), params(60)), e.add(ids(20), params(60))
    for _ in range(8):
        e.step()
    for request in (running, waiting, running):
        e.abort(request)
    assert len(closed) == 2
    assert running.output_ids == wanted[: len(running.output_ids)]
    assert e.cache.lengths == {}


def test_where_tokens_see_later_ones_nothing_can_be_guessed(tmp_path: Path) -> None:
    tiny(tmp_path, num_hidden_layers=1)
    decoder = LLM(tmp_path, dtype="fp32", mask="prefix_lm(9)", replace_mask=True).engine.model
    with pytest.raises(ValueError, match=r"nothing can be speculated under causal\(\) \| sinks\(9\).*speculate off"):
        Engine(decoder, engine(decoder).config, proposer=PromptLookup)
