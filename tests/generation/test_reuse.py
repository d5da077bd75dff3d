"""Prompts that begin alike: how many tokens are computed, and that the answers stay what they were.

Pages are of 16 tokens. At least one token of a prompt is computed, since its logits are wanted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexdecode import LLM, SamplingParams
from flexdecode.generation.engine import Engine
from tests.checkpoints import tiny
from tests.generation.running import Oracle, engine, idle_pages, longrope, params, run
from tests.oracles import ids

KINDS = ["llama", "mistral", "gemma3_text", "gpt_oss", "sinks"]


def computed(e: Engine, prompt: list[int], new: int = 1, **options: Any) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were computed."""
    before = e.computed_tokens
    request = e.add(prompt, params(new, **options))
    (tokens,) = run(e, request)
    count = e.computed_tokens - before - (len(tokens) - 1)
    assert request.stats().reused_tokens == len(prompt) - count
    return tokens, count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64])
def test_the_same_prompt_again(models: Any, oracles: Any, kind: str, length: int) -> None:
    """B41: no token is left to compute where all of a prompt is in whole pages."""
    e = engine(models[kind])
    wanted = oracles[kind](ids(length), params(8))
    assert computed(e, ids(length), 8) == (wanted, length)
    for _ in range(2):
        assert computed(e, ids(length), 8) == (wanted, length - (length - 1) // 16 * 16)
    assert idle_pages(e) == [0] * len(e.cache.groups)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_part_of_another_or_goes_on(models: Any, oracles: Any, kind: str) -> None:
    """Whole pages of the common beginning are found, whatever follows them."""
    e = engine(models[kind])
    base = ids(70)
    run(e, e.add(base, params(1)))
    for common, rest, found in ((70, 30, 64), (64, 1, 64), (40, 0, 32), (33, 9, 32), (32, 0, 16), (15, 40, 0)):
        prompt = [*base[:common], *ids(rest, seed=common)]
        tokens, count = computed(e, prompt, 6)
        assert tokens == oracles[kind](prompt, params(6))
        # Under a window a page is found at any length as long as nothing has taken it.
        assert len(prompt) - count == found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("common", [10, 25, 39, 40])
def test_the_second_turn_of_a_chat(models: Any, oracles: Any, kind: str, common: int) -> None:
    """B50: the second turn begins as the first, then differs; a window's keys were cut by the wrong count."""
    e = engine(models[kind])
    first = ids(40)
    answer, _ = computed(e, first, 30)
    assert answer == oracles[kind](first, params(30))
    second = [*first[:common], *ids(30, seed=7)]
    assert computed(e, second, 20) == (oracles[kind](second, params(20)), len(second) - common // 16 * 16)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_found_by_the_turn_that_quotes_it(models: Any, oracles: Any, kind: str) -> None:
    """The first turn's last token was never read back: 20 + 49 tokens are held, 64 in whole pages."""
    e = engine(models[kind])
    first = ids(20)
    answer, _ = computed(e, first, 50)
    second = [*first, *answer, *ids(9, seed=2)]
    assert computed(e, second, 8) == (oracles[kind](second, params(8)), 79 - 64)
    sampled = {"temperature": 1.0, "seed": 4}
    assert computed(e, second, 8, **sampled)[0] == oracles[kind](second, params(8, **sampled))


@pytest.mark.parametrize("kind", KINDS)
def test_hits_and_misses_in_one_batch(models: Any, oracles: Any, kind: str) -> None:
    """B52: the rows that found nothing read the pages of those that did."""
    e = engine(models[kind])
    base = ids(48)
    run(e, e.add(base, params(1)))
    prompts = [base, [*base[:20], *ids(30, seed=2)], ids(48, seed=3), [9], [*base, 5]]
    requests = [e.add(p, params(10)) for p in prompts]
    assert run(e, *requests) == [oracles[kind](p, params(10)) for p in prompts]
    assert [r.stats().reused_tokens for r in requests] == [32, 16, 0, 0, 48]


def test_what_was_computed_a_step_ago_is_found_by_those_that_wait(models: Any) -> None:
    """Five requests at once with a long beginning in common: it is computed once, the rest in steps after it."""
    e = engine(models["llama"], prefill_chunk=64)
    requests = [e.add([*ids(128), n], params(1)) for n in range(5)]
    run(e, *requests)
    assert [r.stats().reused_tokens for r in requests] == [0, 128, 128, 128, 128]
    assert e.computed_tokens == 129 + 4


@pytest.mark.parametrize("kind", KINDS)
def test_switched_off_nothing_is_found(models: Any, kind: str) -> None:
    e = engine(models[kind], prefix_reuse=False)
    assert [computed(e, ids(60), 5)[1] for _ in range(3)] == [60] * 3
    assert all(group.pool.idle == 0 for group in e.cache.groups)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_found_longest_ago_makes_room(models: Any, oracles: Any, kind: str) -> None:
    """Twelve pages: three prompts of three pages and what they generate. The fourth takes from the first, end first."""
    e = engine(models[kind], kv_tokens=12 * 16)
    prompts = [ids(48, seed=n) for n in range(5)]
    for prompt in prompts:
        tokens, count = computed(e, prompt, 17)
        assert (tokens, count) == (oracles[kind](prompt, params(17)), 48)
    assert computed(e, prompts[4], 17) == (oracles[kind](prompts[4], params(17)), 16)
    assert computed(e, prompts[0], 17) == (oracles[kind](prompts[0], params(17)), 48)


def test_a_beginning_outlives_its_end(models: Any) -> None:
    """Pages are forgotten from the end of a sequence: without its beginning the end is worth nothing."""
    e = engine(models["llama"], kv_tokens=8 * 16)
    run(e, e.add(ids(80), params(1)))  # five pages
    run(e, e.add(ids(70, seed=2), params(1)))  # takes three free ones, and the last two of the first
    assert computed(e, ids(80))[1] == 80 - 48


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_under_pressure_with_a_beginning_in_common(models: Any, oracles: Any, kind: str) -> None:
    """B42: twelve requests in a cache for three, whose lengths cross a page at different steps."""
    e = engine(models[kind], kv_tokens=3 * 6 * 16, prefill_chunk=48)
    prompts = [[*ids(20), *ids(11 + n, seed=n)] for n in range(12)]
    cases = [(p, params(30 + 3 * n)) for n, p in enumerate(prompts)]
    requests = [e.add(*case) for case in cases]
    assert run(e, *requests) == [oracles[kind](*case) for case in cases]
    assert sum(r.preemptions for r in requests) > 0
    assert idle_pages(e) == [0] * len(e.cache.groups)


def test_a_rope_regime_finds_only_its_own_keys(tmp_path: Path) -> None:
    """Keys of the same tokens differ where the length of the text decides how they turn."""
    decoder = longrope(tmp_path)
    e, oracle = engine(decoder, max_context=192), Oracle(decoder)
    short, long = ids(40), [*ids(40), *ids(30, seed=2)]
    assert computed(e, short, 4) == (oracle(short, params(4)), 40)
    assert computed(e, long, 4) == (oracle(long, params(4)), 70)
    assert computed(e, long, 4) == (oracle(long, params(4)), 70 - 64)
    # Across the border in the middle of an answer: under the new regime the first pages are known.
    assert run(e, e.add(short, params(30))) == [oracle(short, params(30))]


def test_masks_that_look_ahead_find_nothing(tmp_path: Path) -> None:
    tiny(tmp_path, num_hidden_layers=2)
    llm = LLM(tmp_path, dtype="fp32", mask="prefix_lm(40)", replace_mask=True)
    e = engine(llm.engine.model)
    assert [computed(e, ids(60), 3)[1] for _ in range(2)] == [60, 60]


def test_masks_that_look_ahead_are_computed_anew_as_they_were(tmp_path: Path) -> None:
    """Preempted, a prompt comes whole again and what followed one by one: a token sees just what it saw."""
    tiny(tmp_path, num_hidden_layers=2, hidden_size=64, head_dim=16)
    llm = LLM(tmp_path, dtype="fp32", mask="prefix_lm(60)", replace_mask=True)
    oracle, cases = Oracle(llm.engine.model), [(ids(30 + n, seed=n), params(50)) for n in range(4)]
    e = engine(llm.engine.model, kv_tokens=9 * 16)
    requests = [e.add(*case) for case in cases]
    assert run(e, *requests) == [oracle(*case) for case in cases]
    assert sum(r.preemptions for r in requests) > 0


def test_through_llm(tmp_path: Path) -> None:
    """A second call finds what the first computed, and says so; the answer is the same without."""
    tiny(tmp_path)
    llm, plain = LLM(tmp_path, dtype="fp32"), LLM(tmp_path, dtype="fp32", prefix_reuse=False)
    own = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    first = llm.generate(ids(150), own)
    second = llm.generate([*ids(150), *first.token_ids, 3], own)
    assert second.stats.reused_tokens == 128  # pages of 64
    assert second.token_ids == plain.generate([*ids(150), *first.token_ids, 3], own).token_ids
    assert plain.generate(ids(150), own).stats.reused_tokens == 0
