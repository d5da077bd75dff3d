"""Speculation: the tokens of plain decoding, and a policy that finds what pays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.generation.params import SamplingParams
from flexdecode.generation.sampler import NumericalError, Sampler, TokenChoice
from flexdecode.generation.speculative import DraftModel, Speculation, SpeculationCounts
from flexdecode.generation.step_cost import StepCost

V = 24
PROMPT = (3, 5, 3)
EOS = (1, 2)
MOST_TOKENS = 24


class ToyModel:
    """Logits that depend on the last two tokens; those after `broken` new tokens hold a NaN."""

    def __init__(self, seed: int, scale: float, broken: int | None = None) -> None:
        self.seed, self.scale, self.broken = seed, scale, broken

    def __call__(self, output: Sequence[int]) -> Tensor:
        before, last = [*PROMPT, *output][-2:]
        generator = torch.Generator().manual_seed((self.seed * V + before) * V + last)
        logits_V = torch.randn(V, generator=generator) * self.scale
        if self.broken is not None and len(output) >= self.broken:
            logits_V[7] = torch.nan
        return logits_V


class Answer:
    """What a request does with choices: it keeps them and knows when it ends."""

    def __init__(self, params: SamplingParams) -> None:
        self.params, self.ids, self.ended = params, list[int](), False

    def stop(self, choice: TokenChoice) -> bool:
        token_id = choice.token_id
        self.ids.append(token_id)
        end = token_id in self.params.stop_token_ids or (token_id in EOS and not self.params.ignore_eos)
        self.ended |= (end and len(self.ids) >= self.params.min_tokens) or len(self.ids) == MOST_TOKENS
        return self.ended


def plain(model: ToyModel, sampler: Sampler, answer: Answer) -> tuple[list[TokenChoice], str]:
    choices: list[TokenChoice] = []
    while not answer.ended:
        try:
            choices.append(sampler.sample(model(answer.ids)))
        except ValueError as problem:
            return choices, str(problem)
        answer.stop(choices[-1])
    return choices, ""


def speculated(
    model: ToyModel, sampler: Sampler, answer: Answer, guess: Callable[[int], list[int]]
) -> tuple[list[TokenChoice], str, int]:
    """`guess(n)` proposes what comes after n tokens. Returns the choices, the error and the number of steps."""
    choices: list[TokenChoice] = []
    for step in itertools.count(1):
        proposed = guess(len(answer.ids))
        rows_RV = torch.stack([model([*answer.ids, *proposed[:count]]) for count in range(len(proposed) + 1)])
        try:
            new = sampler.verify(rows_RV, proposed, answer.stop)
        except ValueError as problem:
            return choices, str(problem), step
        assert 1 <= len(new) <= len(proposed) + 1
        choices += new
        if answer.ended:
            return choices, "", step
    raise AssertionError


def onward(sampler: Sampler) -> list[TokenChoice | str]:
    """What the sampler says next of rows that are in order, in which its counts and its generator show."""
    model, said = ToyModel(99, 2.0), list[TokenChoice | str]()
    for token in range(4):
        try:
            said.append(sampler.sample(model([token])))
        except ValueError as problem:
            said.append(str(problem))
    return said


def optional(strategy: st.SearchStrategy[Any], off: Any) -> st.SearchStrategy[Any]:
    return st.just(off) | strategy


MIXES = st.fixed_dictionaries(
    {
        "temperature": optional(st.sampled_from([0.3, 1.0, 2.0]), 0.0),
        "top_k": optional(st.sampled_from([1, 3, 10]), 0),
        "top_p": optional(st.sampled_from([0.0, 0.5, 0.9]), 1.0),
        "min_p": optional(st.sampled_from([0.05, 0.5]), 0.0),
        "repetition_penalty": optional(st.sampled_from([0.8, 1.3]), 1.0),
        "presence_penalty": optional(st.sampled_from([-1.0, 1.5]), 0.0),
        "frequency_penalty": optional(st.sampled_from([-0.5, 0.7]), 0.0),
        "logit_bias": optional(st.sampled_from([{4: -100, 9: 3.5}, {1: 5}, dict.fromkeys(range(V), -100)]), {}),
        "min_tokens": optional(st.integers(1, 12), 0),
        "stop_token_ids": optional(st.just([6]), []),
        "ignore_eos": st.booleans(),
        "logprobs": optional(st.integers(0, 4), None),
        "seed": st.integers(0, 3),
    }
)


@settings(deadline=None, max_examples=200)
@given(
    mix=MIXES,
    model=st.builds(ToyModel, st.integers(0, 50), st.sampled_from([1.0, 5.0]), st.none() | st.integers(0, 20)),
    guesses=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8),
)
def test_the_tokens_of_plain_decoding(mix: dict[str, Any], model: ToyModel, guesses: list[tuple[int, int]]) -> None:
    """Any parameters, proposals that are right for any length, ends and errors anywhere: the same choices with the
    same log-probabilities, the same error, and samplers that go on alike."""
    params = SamplingParams(**mix).resolve({})
    one, other = Sampler(params, PROMPT, V, EOS), Sampler(params, PROMPT, V, EOS)
    expected, error = plain(model, one, Answer(params))
    turn = itertools.cycle(guesses)

    def guess(known: int) -> list[int]:
        right, wrong = next(turn)
        true = [choice.token_id for choice in expected[known : known + right]]
        after = expected[known + right].token_id if known + right < len(expected) else 0
        return [*true, *[(after + 1 + place) % V for place in range(wrong)]]

    choices, problem, _ = speculated(model, other, Answer(params), guess)
    assert choices == expected
    assert problem == error
    assert onward(one) == onward(other)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_proposals_save_steps(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1, ignore_eos=True).resolve({})
    model = ToyModel(0, 1.0)
    expected = [c.token_id for c in plain(model, Sampler(params, PROMPT, V, EOS), Answer(params))[0]]
    sampler = Sampler(params, PROMPT, V, EOS)
    choices, _, steps = speculated(model, sampler, Answer(params), lambda known: expected[known : known + 5])
    assert [choice.token_id for choice in choices] == expected
    assert steps == MOST_TOKENS // 6


def test_greedy_takes_the_longest_matching_beginning_and_one_of_its_own() -> None:
    rows_RV = torch.eye(V)[[4, 9, 2, 7]]
    params = SamplingParams(temperature=0).resolve({})
    for proposed, expected in (
        ([4, 9, 2], [4, 9, 2, 7]),
        ([4, 9, 3], [4, 9, 2]),
        ([5, 9, 2], [4]),
        ([4, V + 8, 2], [4, 9]),
    ):
        choices = Sampler(params, PROMPT, V, ()).verify(rows_RV, proposed)
        assert [choice.token_id for choice in choices] == expected
    assert [choice.token_id for choice in Sampler(params, PROMPT, V, ()).verify(rows_RV[:1], [])] == [4]


def test_an_answer_that_ends_inside_is_not_counted_further() -> None:
    """The rest of the proposal is neither returned nor drawn, though it would have been right."""
    rows_RV = torch.eye(V)[[4, 1, 4, 4]] * 50
    params = SamplingParams(temperature=1, seed=3, frequency_penalty=1).resolve({})
    sampler, other = Sampler(params, PROMPT, V, EOS), Sampler(params, PROMPT, V, EOS)
    asked: list[int] = []

    def stop(choice: TokenChoice) -> bool:
        asked.append(choice.token_id)
        return choice.token_id == 1

    choices = sampler.verify(rows_RV, [4, 1, 4], stop)
    assert [choice.token_id for choice in choices] == asked == [4, 1]
    for row in (0, 1):
        other.sample(rows_RV[row])
    flat = torch.zeros(V)
    assert [sampler.sample(flat) for _ in range(9)] == [other.sample(flat) for _ in range(9)]


def test_an_error_waits_for_its_turn() -> None:
    rows_RV = torch.eye(V)[[4, 9, 2]]
    rows_RV[1, 0] = torch.nan
    sampler = Sampler(SamplingParams(temperature=0).resolve({}), PROMPT, V, ())
    assert [choice.token_id for choice in sampler.verify(rows_RV, [4, 9])] == [4]
    with pytest.raises(NumericalError, match="NaN in 1 of 24"):
        sampler.verify(rows_RV[1:], [9])


def test_a_row_for_each_proposed_token_and_one() -> None:
    sampler = Sampler(SamplingParams(temperature=0).resolve({}), PROMPT, V, ())
    with pytest.raises(AssertionError, match="2 rows for 2 proposed tokens"):
        sampler.verify(torch.zeros(2, V), [1, 2])


def test_a_draft_speaks_within_the_vocabulary() -> None:
    calls: list[tuple[list[int], int]] = []

    def go_on(tokens: Sequence[int], most: int) -> Sequence[int]:
        calls.append((list(tokens), most))
        return (5, 6, V, 7, 8)

    draft = DraftModel(go_on, V)
    assert draft.propose([1, 2], 9) == [5, 6]
    assert draft.propose([1, 2], 1) == [5]
    assert draft.propose([1, 2], 0) == []
    assert calls == [([1, 2], 9), ([1, 2], 1)]
    assert DraftModel(go_on, V + 1).propose([1], 5) == [5, 6, V, 7, 8]


# The policy

Cost = Callable[[int], float]
COSTS: dict[str, Cost] = {
    "cheap": lambda rows: 1 + 0.05 * (rows - 1),
    "steady": lambda rows: 1 + 0.2 * (rows - 1),
    "flat and then steep": lambda rows: max(1.0, rows / 5),
    "a jump and then flat": lambda rows: 1.0 if rows == 1 else 1.4 + 0.02 * rows,
    "tiles of four": lambda rows: 1 + 0.4 * ((rows - 1) // 4),
}


class Run:
    """A policy in a world where each proposed token is right with a given chance after the ones before it."""

    def __init__(self, policy: Speculation, cost: Cost, measured: StepCost | None = None) -> None:
        self.policy, self.cost, self.measured = policy, cost, measured
        self.random = random.Random(0)
        self.chosen: list[int] = []

    def go(self, steps: int, acceptance: Callable[[int], float], beside: int = 0) -> float:
        """Tokens of the request over the steps' cost. `acceptance(place)` is the chance at a place, from 0."""
        tokens, spent = 0, 0.0
        for _ in range(steps):
            count = self.policy.choose(beside)
            right = 0
            while right < count and self.random.random() < acceptance(right):
                right += 1
            seconds = self.cost(beside + count + 1)
            if self.measured is not None:
                noise = self.random.lognormvariate(0, 0.1) * (4 if self.random.random() < 0.03 else 1)
                self.measured.observe(beside + count + 1, seconds * noise)
            self.policy.record(count, right)
            self.chosen.append(count)
            tokens, spent = tokens + 1 + right, spent + seconds
        return tokens / spent


def best_rate(cost: Cost, acceptance: Callable[[int], float], most: int = 16) -> float:
    tokens, reached, best = 1.0, 1.0, 1 / cost(1)
    for count in range(1, most + 1):
        reached *= acceptance(count - 1)
        tokens += reached
        best = max(best, tokens / cost(count + 1))
    return best


def always(chance: float) -> Callable[[int], float]:
    return lambda place: chance


def lookup_like(place: int) -> float:
    """Text that repeats itself: hard to enter, easy to stay in."""
    return 0.4 if place == 0 else 0.95


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
@pytest.mark.parametrize("chance", [0.1, 0.4, 0.6, 0.8, 0.95, "lookup"])
@pytest.mark.parametrize("measured", [False, True])
def test_it_finds_what_pays(cost: Cost, chance: float | str, measured: bool) -> None:
    acceptance = lookup_like if isinstance(chance, str) else always(chance)
    known = StepCost() if measured else None
    run = Run(Speculation(known or cost), cost, known)
    run.go(200, acceptance)
    assert run.go(3000, acceptance) > 0.9 * best_rate(cost, acceptance)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
@pytest.mark.parametrize("measured", [False, True])
def test_what_does_not_pay_costs_less_than_a_percent(cost: Cost, measured: bool) -> None:
    known = StepCost() if measured else None
    run = Run(Speculation(known or cost), cost, known)
    run.go(200, always(0))
    assert run.go(10_000, always(0)) > 0.99 / cost(1)
    assert sum(run.chosen[200:]) > 0, "and yet it asks now and then"


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
@pytest.mark.parametrize("measured", [False, True])
def test_it_comes_back_when_the_text_repeats_itself_again(cost: Cost, measured: bool) -> None:
    known = StepCost() if measured else None
    run = Run(Speculation(known or cost), cost, known)
    run.go(3000, always(0))
    run.go(400, always(0.9))
    assert run.go(400, always(0.9)) > 0.85 * best_rate(cost, always(0.9))
    run.go(100, always(0))
    assert run.go(400, always(0)) > 0.95 / cost(1)


def test_nothing_is_tried_where_no_acceptance_could_pay() -> None:
    run = Run(Speculation(lambda rows: rows), lambda rows: rows)
    run.go(2000, always(1))
    assert set(run.chosen) == {0}


def test_a_busy_step_of_one_row_does_not_set_the_measure() -> None:
    """Taken for slow, plain steps made every proposal pay for ever, since none was taken again."""
    known, cost = StepCost(), COSTS["steady"]
    known.observe(1, 9.0)
    known.observe(1, 9.0)
    run = Run(Speculation(known), cost, known)
    run.go(400, always(0.1))
    assert run.go(2000, always(0.1)) > 0.98


def test_the_cost_of_one_row_comes_first() -> None:
    known = StepCost()
    policy = Speculation(known)
    for _ in range(2):
        assert policy.choose() == 0
        policy.record(0, 0)
        known.observe(1, 1.0)
    assert policy.choose() > 0


def test_a_proposer_without_a_guess_changes_nothing() -> None:
    policy = Speculation(COSTS["steady"])
    first = policy.choose()
    for _ in range(100):
        assert policy.choose() == first
        policy.record(0, 0)


@pytest.mark.parametrize("beside", [1, 7, 40])
def test_neighbours_rows_count(beside: int) -> None:
    """Where the memory is the limit rows are free, beside others too; where arithmetic is, each takes time from all."""

    def free(rows: int) -> float:
        return 1.0 + rows / 1000

    def paid(rows: int) -> float:
        return max(1.0, rows / (beside + 1))

    many = Run(Speculation(free), free)
    many.go(500, always(0.7), beside)
    assert sum(many.chosen[100:]) > 400 * 8
    few = Run(Speculation(paid), paid)
    few.go(500, always(0.7), beside)
    assert set(few.chosen) == {0}


def test_the_longest_proposal() -> None:
    run = Run(Speculation(COSTS["cheap"], most=3), COSTS["cheap"])
    run.go(500, always(0.95))
    assert max(run.chosen) == 3
    with pytest.raises(ValueError, match="at most 0 proposed tokens"):
        Speculation(COSTS["cheap"], most=0)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.floats(0.5, 2.0)), max_size=80), st.booleans())
def test_the_same_observations_give_the_same_choices(steps: list[tuple[int, int, float]], measured: bool) -> None:
    """And choices are possible ones whatever was observed, and everything is counted."""

    def run() -> tuple[list[int], SpeculationCounts]:
        known = StepCost()
        policy, chosen = Speculation(known if measured else COSTS["tiles of four"], most=8), []
        for proposed, accepted, seconds in steps:
            chosen.append(policy.choose())
            known.observe(proposed + 1, seconds)
            policy.record(proposed, min(proposed, accepted))
        return chosen, policy.counts

    chosen, counts = run()
    assert (chosen, counts) == run()
    assert all(0 <= count <= 8 for count in chosen)
    proposed, accepted = sum(p for p, _, _ in steps), sum(min(p, a) for p, a, _ in steps)
    assert counts == SpeculationCounts(len(steps), proposed, accepted)
    assert counts.acceptance == (accepted / proposed if proposed else 0.0)


def test_more_accepted_than_proposed_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="3 accepted of 2 proposed"):
        Speculation(COSTS["cheap"]).record(2, 3)
