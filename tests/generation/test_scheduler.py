"""Who is served when, who is refused, who gives up pages, and who computes a prompt for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexdecode.generation.engine import Engine
from flexdecode.generation.request import Request
from tests.generation.running import engine, idle_pages, model, params, run
from tests.oracles import ids


def started(e: Engine, requests: list[Request]) -> list[int]:
    """The order in which requests got their first tokens."""
    seen: list[int] = []
    while e.busy:
        seen += [requests.index(r) for r in e.step() if requests.index(r) not in seen]
    return seen


def test_requests_are_served_by_priority_and_then_as_they_came(models: Any) -> None:
    e = engine(models["llama"], prefill_chunk=20)
    requests = [e.add(ids(20, seed=n), params(3), priority=p) for n, p in enumerate([0, 1, 0, -1, 1, -1])]
    assert started(e, requests) == [3, 5, 0, 2, 1, 4]


def test_an_urgent_request_goes_before_a_long_prompt_under_way(models: Any, oracles: Any) -> None:
    e = engine(models["llama"], prefill_chunk=10)
    slow = e.add(ids(200), params(2), priority=1)
    e.step()
    fast = e.add(ids(10, seed=2), params(2))
    e.step()
    assert (len(fast.output_ids), slow.cached) == (1, 10)
    assert run(e, slow, fast) == [
        oracles["llama"](ids(200), params(2)),
        oracles["llama"](ids(10, seed=2), params(2)),
    ]


def test_decoding_goes_into_every_step_and_prompts_always_go_on(models: Any) -> None:
    """Six that decode in a budget of four: each gets its token, and the long prompt one a step."""
    e = engine(models["llama"], prefill_chunk=4)
    decoding = [e.add(ids(2, seed=n), params(100)) for n in range(6)]
    while not all(r.output_ids for r in decoding):
        e.step()
    slow = e.add(ids(40), params(2))
    for count in range(1, 9):
        before = [len(r.output_ids) for r in decoding]
        assert len(e.step()) == 6
        assert [len(r.output_ids) for r in decoding] == [n + 1 for n in before]
        assert slow.cached == count


def test_the_latest_of_the_lowest_priority_gives_up_its_pages(models: Any) -> None:
    """Ten pages; each request wants up to five. The one that yields waits in its place, before those behind it."""
    e = engine(models["llama"], kv_tokens=160, prefix_reuse=False, max_running=3)
    requests = [e.add(ids(20), params(50), priority=1)]
    e.step()
    requests += [e.add(ids(20, seed=n), params(50), priority=p) for n, p in ((2, 0), (3, 0), (4, 1), (5, 0))]
    e.step()
    assert [r.cached > 0 for r in requests] == [True, True, True, False, False]
    run(e, *requests)
    assert [r.preemptions > 0 for r in requests[:3]] == [True, False, False]
    assert max(requests[0].last_token, requests[4].first_token) < requests[3].first_token


def test_the_first_request_is_never_preempted_and_all_end(models: Any, oracles: Any) -> None:
    """No livelock: as soon as the first is done the next one is the first."""
    e = engine(models["llama"], kv_tokens=7 * 16)
    cases = [(ids(17 + n, seed=n), params(70)) for n in range(5)]
    requests = [e.add(*case) for case in cases]
    while e.busy:
        first = min((r for r in requests if r.finish_reason is None), key=lambda r: r.number)
        had = first.cached
        e.step()
        assert first.cached > had or first.finish_reason is not None
    assert [r.output_ids for r in requests] == [oracles["llama"](*case) for case in cases]


@pytest.mark.parametrize(("prompt", "new", "fits"), [(50, 31, True), (50, 32, False), (80, 1, True), (81, 1, False)])
def test_what_can_never_fit_is_refused_with_both_numbers(models: Any, prompt: int, new: int, fits: bool) -> None:
    """Five pages of 16 tokens; the last token generated needs no slot."""
    e = engine(models["llama"], kv_tokens=80)
    if fits:
        assert len(run(e, e.add(ids(prompt), params(new)))[0]) == new
        return
    with pytest.raises(ValueError, match=rf"{prompt} prompt tokens and max_tokens={new} take 6 pages of 16 .* has 5"):
        e.add(ids(prompt), params(new))
    with pytest.raises(ValueError, match="take 6 pages"):
        e.add_choices(ids(prompt), [params(1), params(new)])
    assert not e.busy or prompt <= 80


def test_under_a_window_the_need_does_not_grow(models: Any, oracles: Any) -> None:
    """A window of 16 tokens in pages of 16: two pages are enough, whatever the length. Prompts come in chunks as small
    as there is room for."""
    prompt = ids(150)
    e = engine(models["mistral"], kv_tokens=2 * 16)
    assert run(e, e.add(prompt, params(60))) == [oracles["mistral"](prompt, params(60))]
    with pytest.raises(ValueError, match="take 2 pages of 16 tokens, and the cache has 1"):
        engine(models["mistral"], kv_tokens=16).add(prompt, params(60))
    with pytest.raises(ValueError, match="take 14 pages of 16 tokens, and the cache has 2"):
        engine(models["gemma3_text"], kv_tokens=2 * 16).add(prompt, params(60))


@pytest.mark.parametrize("reuse", [True, False])
def test_choices_compute_their_prompt_once(models: Any, oracles: Any, reuse: bool) -> None:
    """On the same pages, the partly filled last one copied when the first of them writes."""
    e = engine(models["gemma3_text"], prefix_reuse=reuse)
    own = [params(10, temperature=1.0, seed=7).choice(i) for i in range(5)]
    requests = e.add_choices(ids(40), own)
    assert run(e, *requests) == [oracles["gemma3_text"](ids(40), p) for p in own]
    assert e.computed_tokens == 40 + 5 * 9
    assert [r.stats().reused_tokens for r in requests] == [0, 40, 40, 40, 40]
    assert len({tuple(r.output_ids) for r in requests}) > 1
    assert idle_pages(e) == [0, 0]


def test_choices_of_any_length_and_more_than_can_run(models: Any, oracles: Any) -> None:
    """Those for which there is no place compute the prompt again, or find it."""
    e = engine(models["llama"], max_running=2)
    own = [params(new, temperature=1.0, seed=new) for new in (1, 0, 5, 9, 2, 7)]
    requests = e.add_choices(ids(40), own)
    assert run(e, *requests) == [oracles["llama"](ids(40), p) for p in own]
    assert requests[1].finish_reason == "length"
    # Three wait, and compute what is left of 40 tokens after two pages.
    assert [r.stats().reused_tokens for r in requests] == [0, 0, 40, 32, 32, 32]
    assert e.computed_tokens == 40 + 3 * 8 + sum(max(0, (p.max_tokens or 0) - 1) for p in own)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("gone", [[0], [1], [0, 1], [0, 2], [0, 1, 2]])
def test_a_choice_that_is_aborted_leaves_the_prompt_to_the_others(
    models: Any, oracles: Any, steps: int, gone: list[int]
) -> None:
    """Before, in the midst of, and after the prompt; what was computed of it is kept."""
    e = engine(models["gemma3_text"], prefill_chunk=16)
    own = [params(8, temperature=1.0, seed=7).choice(i) for i in range(3)]
    requests = e.add_choices(ids(40), own)
    for _ in range(steps):
        e.step()
    for i in gone:
        e.abort(requests[i])
    run(e, *requests)
    for i, request in enumerate(requests):
        wanted = oracles["gemma3_text"](ids(40), own[i])
        assert request.output_ids == (wanted[: len(request.output_ids)] if i in gone else wanted)
    assert e.computed_tokens <= 40 + 3 * 7
    assert idle_pages(e) == [0, 0]


def test_a_step_that_breaks_off_is_run_again(models: Any, oracles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the midst of a step, or a user's function that raises: nothing is half-computed."""
    e, broken = engine(models["gemma3_text"], prefill_chunk=16), [3, 4, 9]
    count, forward = 0, type(e.model).forward

    def sometimes(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count in broken:
            raise KeyboardInterrupt
        return forward(*arguments)

    monkeypatch.setattr(type(e.model), "forward", sometimes)
    own = [params(8, temperature=1.0, seed=7).choice(i) for i in range(2)]
    requests = [*e.add_choices(ids(40), own), e.add(ids(30, seed=2), params(9))]
    interrupts = 0
    while e.busy:
        try:
            e.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3
    monkeypatch.undo()
    assert [r.output_ids for r in requests[:2]] == [oracles["gemma3_text"](ids(40), p) for p in own]
    assert requests[2].output_ids == oracles["gemma3_text"](ids(30, seed=2), params(9))
    assert idle_pages(e) == [0, 0]


def test_a_request_whose_regime_changes_starts_anew(tmp_path: Path) -> None:
    """Keys of the wrong angle are dropped; that is no preemption."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "head_dim": 16, "max_position_embeddings": 24}
    decoder = model(tmp_path, rope_parameters=rope, **sizes)
    e = engine(decoder, max_context=64)
    request = e.add(ids(20), params(8))
    run(e, request)
    assert request.preemptions == 0
    assert e.computed_tokens == 20 + 4 + 25 + 26 + 27
