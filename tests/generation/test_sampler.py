"""The sampler on rows of logits whose distribution is known."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from flexdecode.generation.params import SamplingParams
from flexdecode.generation.sampler import NumericalError, Sampler, likeliest, shortlist

V = 264
FOUR = {65: 0.5, 66: 0.3, 67: 0.1, 68: 0.1}


def dist(probabilities: dict[int, float], dtype: torch.dtype = torch.float32, floor: float = -40.0) -> Tensor:
    row = torch.full((V,), floor)
    for token_id, p in probabilities.items():
        row[token_id] = math.log(p)
    return row.to(dtype).float()


def sampler(eos: tuple[int, ...] = (), prompt: tuple[int, ...] = (), vocab: int = V, **values: Any) -> Sampler:
    return Sampler(SamplingParams(**values).resolve({}), prompt, vocab, eos)


def draws(row: Tensor, count: int, **values: Any) -> list[int]:
    one = sampler(vocab=row.numel(), **values)
    return [one.sample(row).token_id for _ in range(count)]


def random_row(seed: int, size: int = V, scale: float = 3.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-10, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiny_temperatures_are_greedy(temperature: float, dtype: torch.dtype) -> None:
    """B71: 12 / 1e-5 is inf in fp16, and inf - inf is NaN."""
    row = (random_row(0) * 4).to(dtype)
    row[7] = row.max() + 1
    assert set(draws(row, 20, temperature=temperature)) == {7}


def test_a_small_temperature_still_draws() -> None:
    """B71: 0.01 divides; a gap of 0.01 is then worth a factor of e."""
    row = torch.full((V,), -500.0)
    row[[3, 4]] = torch.tensor([500.0, 499.99])
    counts = Counter(draws(row, 4000, temperature=0.01, seed=1))
    assert counts[4] / counts[3] == pytest.approx(math.exp(-1), rel=0.15)
    assert set(counts) == {3, 4}


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_p": 0}, 1),
        ({"top_k": 1}, 1),
        ({"top_k": 0}, V),
        ({"min_p": 0}, V),
        ({"min_p": 1}, V),
        ({"top_k": 7}, 7),
        ({"top_p": 1}, V),
    ],
)
def test_every_zero_means_itself_on_a_flat_model(values: dict[str, Any], kept: int) -> None:
    """B72: top_p=0 behaved as 1.0. 0 is "only the likeliest" for top_p, "off" for top_k and min_p."""
    seen = set(draws(torch.zeros(V), 4000, temperature=1, seed=3, **values))
    assert len(seen) == kept
    if kept == 1:
        assert seen == {0}, "the same as greedy"


def test_seed_zero_is_a_seed() -> None:
    """B72, B78."""
    flat = torch.zeros(V)
    assert draws(flat, 20, temperature=1, seed=0) == draws(flat, 20, temperature=1, seed=0)
    assert draws(flat, 20, temperature=1, seed=0) != draws(flat, 20, temperature=1, seed=1)
    assert draws(flat, 20, temperature=1) != draws(flat, 20, temperature=1), "without one, no two are equal"
    assert draws(random_row(1), 5, temperature=0, seed=7) == [int(random_row(1).argmax())] * 5


@pytest.mark.parametrize(("top_p", "count"), [(0.5, 1), (0.8, 2), (0.9, 3), (0.9999999, 4), (0.6, 2), (1e-12, 1)])
def test_nucleus_is_neither_too_big_nor_too_small(top_p: float, count: int) -> None:
    """B74: 0.5 + 0.3 reaches 0.8 exactly, whatever fp32 makes of the logarithms."""
    seen = set(draws(dist(FOUR), 2000, temperature=1, top_p=top_p, seed=5))
    assert seen == set(list(FOUR)[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_top_p_near_one_stays_in_the_vocabulary(dtype: torch.dtype) -> None:
    """B74: where the sum of the fp32 probabilities stays below top_p, the search ran past the end."""
    for row in (dist(FOUR, dtype), torch.zeros(V), random_row(2).to(dtype)):
        seen = draws(row, 2000, temperature=1, top_p=0.9999999, seed=5)
        assert all(0 <= token_id < V for token_id in seen)
    assert set(FOUR) <= set(draws(dist(FOUR, dtype), 2000, temperature=1, top_p=0.9999999, seed=5))


@pytest.mark.parametrize(("min_p", "count"), [(0.0, V), (0.2, 4), (0.21, 2), (0.6, 2), (0.7, 1), (1.0, 1)])
def test_min_p(min_p: float, count: int) -> None:
    """B75: 1 leaves the maximum alone; a probability of exactly min_p times the maximum stays."""
    kept, ids = shortlist(dist(FOUR) - math.log(0.5), SamplingParams(temperature=1, min_p=min_p).resolve({}))
    assert kept.numel() == count
    assert ids is None or sorted(ids.tolist()) == list(FOUR)[:count]
    assert set(draws(dist(FOUR), 500, temperature=0, min_p=min_p)) == {65}


@settings(deadline=None, derandomize=True)  # a fresh edge of the nucleus may fall to either side by a rounding
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 2, 5, 50, V, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_shortlist_as_transformers(
    seed: int, scale: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = random_row(seed, scale=scale)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).resolve({})
    expected = TemperatureLogitsWarper(temperature)(None, row[None])  # type: ignore[arg-type]
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)  # type: ignore[arg-type]
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)  # type: ignore[arg-type]
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)  # type: ignore[arg-type]
    kept, ids = shortlist((row - row.max()) / temperature, params)
    ids = torch.arange(V) if ids is None else ids
    actual = torch.zeros(V).index_copy(0, ids, kept.softmax(0))
    torch.testing.assert_close(actual, expected[0].softmax(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 511, 512, 513, 5000])
@pytest.mark.parametrize("top_p", [0.3, 0.999, 0.9999999])
def test_nucleus_of_any_vocabulary(size: int, top_p: float) -> None:
    """Found by a histogram, the nucleus is the one that sorting everything gives."""
    for row in (random_row(size, size), torch.zeros(size), random_row(size, size).round()):
        scaled = row - row.max()
        kept, ids = shortlist(scaled, SamplingParams(temperature=1, top_p=top_p).resolve({}))
        values, order = scaled.sort(descending=True, stable=True)
        p = values.double().softmax(0)
        count = max(1, int(((p.cumsum(0) - p) < top_p - 1e-6).sum()))
        assert ids is not None
        assert abs(ids.numel() - count) <= 1
        assert set(ids.tolist()) == set(order[: ids.numel()].tolist())
        assert torch.equal(kept, scaled[ids])


def test_draws_follow_the_distribution() -> None:
    count = 20000
    for values, expected in (
        ({}, FOUR),
        ({"temperature": 2.0}, {i: p**0.5 / sum(q**0.5 for q in FOUR.values()) for i, p in FOUR.items()}),
        ({"top_k": 2}, {65: 0.625, 66: 0.375}),
        ({"top_p": 0.85}, {65: 5 / 9, 66: 3 / 9, 67: 1 / 9}),
        ({"top_k": 3, "top_p": 0.7}, {65: 0.625, 66: 0.375}),
        ({"min_p": 0.5}, {65: 0.625, 66: 0.375}),
    ):
        counts = Counter(draws(dist(FOUR), count, **{"temperature": 1.0, "seed": 11, **values}))
        assert set(counts) == set(expected)
        for token_id, p in expected.items():
            assert counts[token_id] / count == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_masked_token_is_never_drawn(top_k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """B76: argmax(p / noise) with p = 0 and noise = 0 is NaN, and argmax picks NaN. Here even extreme random numbers
    (exactly 0, and the greatest below 1) stay inside, and noise that is 0 is not asked for."""

    def zeros(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.zero_()

    monkeypatch.setattr(Tensor, "exponential_", zeros)
    row = random_row(4).to(dtype)
    allowed = set(likeliest(row.float(), top_k)[1].tolist())
    assert set(draws(row, 5000, temperature=1, top_k=top_k, seed=2)) <= allowed
    for extreme in (0.0, math.nextafter(1.0, 0.0)):
        monkeypatch.setattr(torch, "rand", lambda *a, value=extreme, **k: torch.tensor([value], dtype=torch.float64))
        masked = torch.full((V,), -torch.inf)
        masked[[17, 30]] = torch.tensor([1.0, 0.5])
        for values in ({}, {"top_k": 50}, {"top_p": 0.999}, {"min_p": 1e-9}):
            assert set(draws(masked, 3, temperature=1, **values)) <= {17, 30}


@pytest.mark.slow
def test_a_masked_token_is_never_drawn_in_many_draws() -> None:
    masked = torch.full((V,), -torch.inf)
    masked[[0, 17, 263]] = torch.tensor([1.0, 0.5, -80.0])
    assert set(draws(masked, 200_000, temperature=1, seed=0)) <= {0, 17, 263}


def test_equal_logits_go_by_id() -> None:
    """torch.topk leaves the order of equal values open; greedy, top_k=1 and the listed alternatives must agree."""
    row = torch.zeros(5000)
    row[[70, 900, 4000]] = 1.0
    values, ids = likeliest(row, 5)
    assert ids.tolist() == [70, 900, 4000, 0, 1]
    assert values.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    for chosen in ({"temperature": 0}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 0}):
        choice = sampler(vocab=5000, logprobs=2, **chosen).sample(row)
        assert choice.token_id == choice.top[0][0] == 70


EFFECTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"min_p": 1},
    {"top_p": 0.1},
    {"repetition_penalty": 100.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": {5: 100}},
    {"logit_bias": {0: -100}},
    {"temperature": 0.01},
    {"min_tokens": 100},
    {"min_tokens": 100, "stop_token_ids": [1]},
]


@pytest.mark.parametrize("values", EFFECTS)
def test_every_parameter_has_its_effect(values: dict[str, Any]) -> None:
    """B77: accepted, and nothing happened. A row where token 0 leads and 1, the end, follows."""
    row = torch.tensor([1.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    eos = () if "stop_token_ids" in values else (1,)

    def run(**chosen: Any) -> Counter[int]:
        one = sampler(eos, (2, 3), vocab=8, **{"temperature": 1.0, "seed": 4, **chosen})
        return Counter(one.sample(row).token_id for _ in range(400))

    assert run(**values) != run()


def test_min_tokens_holds_the_end_off_and_then_lets_it_come() -> None:
    """B85."""
    row = torch.zeros(V)
    row[[257, 258, 42, 65]] = torch.tensor([30.0, 29.0, 28.0, 20.0])
    one = sampler((257, 258), temperature=0, min_tokens=3, stop_token_ids=[42])
    assert [one.sample(row).token_id for _ in range(5)] == [65, 65, 65, 257, 257]
    ignoring = sampler((257, 258), temperature=0, min_tokens=3, ignore_eos=True)
    assert ignoring.sample(row).token_id == 257, "an end that does not end is a token like any other"


def test_end_ids_beyond_the_logits_do_no_harm() -> None:
    assert sampler((9999,), temperature=0, min_tokens=3).sample(random_row(0)).token_id == int(random_row(0).argmax())


def test_penalties_reach_the_choice() -> None:
    """B79, B80 through the sampler: prompt 'aaaa', p(a) = .4, p(b) = .35, p(c) = .25."""
    row = dist({97: 0.4, 98: 0.35, 99: 0.25})
    prompt = (97, 97, 97, 97)

    def first(count: int, **values: Any) -> list[int]:
        one = sampler(prompt=prompt, temperature=0, **values)
        return [one.sample(row).token_id for _ in range(count)]

    assert first(3) == [97, 97, 97]
    assert first(3, presence_penalty=2) == [97, 98, 99], "the prompt does not count"
    assert first(6, frequency_penalty=2) == [97, 98, 99, 97, 98, 99]
    assert first(1, repetition_penalty=2) == [98], "the prompt does"
    assert first(1, logit_bias={99: 100}) == [99]
    assert first(1, logit_bias={97: -100}) == [98]


def test_logprobs_are_of_the_raw_logits() -> None:
    """B98, B99: before temperature, penalties, bias and any cut; -inf only where the model says so."""
    row = dist(FOUR)
    expected = row.log_softmax(0)
    one = sampler(temperature=1.7, top_k=2, logit_bias={65: -100}, frequency_penalty=1, logprobs=3, seed=1)
    choice = one.sample(row)
    assert choice.token_id == 66, "top-k of 2 over what the ban has left"
    assert choice.logprob == pytest.approx(float(expected[choice.token_id]))
    assert [token_id for token_id, _ in choice.top] == [65, 66, 67]
    assert [value for _, value in choice.top] == pytest.approx(expected[[65, 66, 67]].tolist())
    assert all(math.isfinite(value) for _, value in choice.top)


@pytest.mark.parametrize(("logprobs", "count"), [(None, 0), (0, 0), (1, 1), (20, 8)])
def test_as_many_alternatives_as_asked_for(logprobs: int | None, count: int) -> None:
    choice = sampler(vocab=8, temperature=0, logprobs=logprobs).sample(random_row(0, 8))
    assert len(choice.top) == count
    assert (choice.logprob is None) is (logprobs is None)


def test_the_chosen_token_is_not_forced_among_the_alternatives() -> None:
    choice = sampler(temperature=0, logit_bias={200: 100}, logprobs=2).sample(dist(FOUR))
    assert choice.token_id == 200
    assert [token_id for token_id, _ in choice.top] == [65, 66]


BROKEN = [
    ({7: math.nan}, "NaN in 1 of 264 logits"),
    (dict.fromkeys(range(V), math.nan), "NaN in 264 of 264"),
    ({0: math.inf}, r"\+inf in 1 of 264"),
    (dict.fromkeys(range(V), -math.inf), "all 264 logits are -inf"),
]


@pytest.mark.parametrize(("written", "message"), BROKEN)
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "top_k": 5},
        {"temperature": 1, "top_p": 0.9},
        {"temperature": 0, "frequency_penalty": 1},
        {"temperature": 1, "min_tokens": 5},
        {"temperature": 0, "logit_bias": {7: -100, 0: -100}},
    ],
)
def test_broken_logits_are_an_error(written: dict[int, float], message: str, values: dict[str, Any]) -> None:
    """B65: token 0 for ever, or a server loop that dies of "probability tensor contains inf, nan"."""
    row = random_row(0)
    row[list(written)] = torch.tensor(list(written.values()))
    with pytest.raises(NumericalError, match=message):
        sampler((7, 0), **values).sample(row)


def test_minus_infinity_here_and_there_is_the_models_right() -> None:
    row = dist(FOUR, floor=-math.inf)
    for values in (
        {"temperature": 0},
        {"temperature": 1, "top_k": 100},
        {"temperature": 1, "top_p": 0.99, "logprobs": 5},
    ):
        assert sampler(**values).sample(row).token_id in FOUR


def test_banning_everything_is_the_users_error() -> None:
    row = dist(FOUR, floor=-math.inf)
    with pytest.raises(ValueError, match="ban every token") as caught:
        sampler(temperature=0, logit_bias=dict.fromkeys(FOUR, -100)).sample(row)
    assert not isinstance(caught.value, NumericalError)


@pytest.mark.parametrize("values", [{"temperature": 0}, {"temperature": 1, "seed": 1, "top_p": 0.9, "logprobs": 3}])
def test_logits_are_left_as_they_are(values: dict[str, Any]) -> None:
    row = random_row(0)
    before = row.clone()
    one = sampler((257,), (5,), repetition_penalty=1.5, frequency_penalty=1, min_tokens=2, **values)
    for _ in range(3):
        one.sample(row)
    assert torch.equal(row, before)


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    """B68: greedy and sampled rows beside each other, in any order, give their single runs."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 1},
        {"temperature": 1e-7},
        {"temperature": 2, "seed": 3, "frequency_penalty": 1.05},
        {"temperature": 0},
    ]
    rows = [random_row(step) for step in range(20)]
    alone = []
    for values in kinds:
        one = sampler(**values)
        alone.append([one.sample(row).token_id for row in rows])
    together = [sampler(**values) for values in kinds]
    steps = [[one.sample(row).token_id for one in reversed(together)] for row in rows]
    assert [list(column) for column in zip(*steps, strict=True)][::-1] == alone
    assert alone[0] == alone[2] == alone[4] == [int(row.argmax()) for row in rows]
    torch.rand(5)
    repeated = sampler(**kinds[1])
    assert [repeated.sample(row).token_id for row in rows] == alone[1], "nor on torch's own generator"


def test_n_answers() -> None:
    """B78: equal when greedy, different under one seed, and the same again with that seed."""
    rows = [torch.zeros(V) for _ in range(10)]

    def answers(**values: Any) -> list[list[int]]:
        params = SamplingParams(n=3, **values).resolve({})
        made = [Sampler(params.choice(index), [], V, []) for index in range(3)]
        return [[one.sample(row).token_id for row in rows] for one in made]

    assert answers(temperature=0) == [[0] * 10] * 3
    seeded = answers(temperature=1, seed=7)
    assert len(set(map(tuple, seeded))) == 3
    assert answers(temperature=1, seed=7) == seeded
