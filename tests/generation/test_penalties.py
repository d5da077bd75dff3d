"""Penalties, biases and bans, each as a shift of known logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from flexdecode.generation.params import SamplingParams
from flexdecode.generation.penalties import Penalties

V = 264
A, B, C = 97, 98, 99
PROMPT = [A, A, A, A]


def penalties(banned: tuple[int, ...] = (), **values: object) -> Penalties:
    params = SamplingParams(**values).resolve({})  # type: ignore[arg-type]
    return Penalties(params, PROMPT, V, banned, torch.device("cpu"))


def logits() -> Tensor:
    row = torch.full((V,), -40.0)
    row[[A, B, C]] = torch.tensor([0.4, 0.35, 0.25]).log()
    return row


def test_presence_and_frequency_count_the_output_alone() -> None:
    """B79: prompt tokens were punished, and presence was passed as frequency."""
    presence, frequency = penalties(presence_penalty=2), penalties(frequency_penalty=2)
    for count in range(5):
        shift = presence.apply(logits()) - logits()
        assert shift[A] == (-2 if count else 0)
        assert shift[B] == 0
        shift = frequency.apply(logits()) - logits()
        assert shift[A] == pytest.approx(-2 * count)
        assert shift[B] == 0
        presence.record(A)
        frequency.record(A)


def test_presence_does_not_count_what_repetition_does() -> None:
    """Both kept in one table: the prompt's ids have a place there, but were never generated."""
    both = penalties(repetition_penalty=2, presence_penalty=1, frequency_penalty=1)
    row = torch.ones(V)
    assert both.apply(row)[[A, B]].tolist() == [0.5, 1.0]
    both.record(A)
    assert both.apply(row)[[A, B]].tolist() == [-1.5, 1.0]


def test_negative_penalties_are_rewards() -> None:
    both = penalties(presence_penalty=-1, frequency_penalty=-0.5)
    both.record(A)
    both.record(A)
    assert (both.apply(logits()) - logits())[A] == pytest.approx(2.0)


def test_repetition_counts_the_prompt_from_the_first_step() -> None:
    """B79: and it multiplies negative logits, divides positive ones."""
    row = torch.zeros(V)
    row[[A, B]] = torch.tensor([3.0, -3.0])
    repeated = penalties(repetition_penalty=2)
    assert repeated.apply(row)[[A, B]].tolist() == [1.5, -3.0]
    repeated.record(B)
    assert repeated.apply(row)[[A, B]].tolist() == [1.5, -6.0]


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_as_transformers_has_it(penalty: float) -> None:
    row = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 5
    ids = [*PROMPT, B, 5, 5]
    repeated = penalties(repetition_penalty=penalty)
    for token_id in ids[len(PROMPT) :]:
        repeated.record(token_id)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), row[None].clone())[0]
    torch.testing.assert_close(repeated.apply(row), expected)


def test_bias_is_added_and_its_ends_ban_and_force() -> None:
    """B80, and OpenAI's meaning of -100 and 100."""
    biased = penalties(logit_bias={A: -100, B: 5, 263: 100})
    row = biased.apply(logits())
    assert row[A] == -torch.inf
    assert row[B] == pytest.approx(float(logits()[B]) + 5)
    assert row.argmax() == 263


def test_a_ban_outlives_every_other_step() -> None:
    banned = penalties(logit_bias={A: -100}, frequency_penalty=-2, presence_penalty=-2, repetition_penalty=0.1)
    for _ in range(50):
        banned.record(A)
    assert banned.apply(logits() + 30)[A] == -torch.inf


def test_min_tokens_bans_the_end_for_so_long() -> None:
    """B85."""
    early = penalties(banned=(257, 258), min_tokens=2)
    for count in range(4):
        row = early.apply(torch.zeros(V))
        assert bool(row[[257, 258]].isinf().all()) is (count < 2)
        assert row.isinf().sum() == (2 if count < 2 else 0)
        early.record(A)
    assert early.idle


@pytest.mark.parametrize("values", [{}, {"min_tokens": 3}, {"logit_bias": {}}, {"presence_penalty": 0.0}])
def test_nothing_to_do_costs_nothing(values: dict[str, object]) -> None:
    row = logits()
    assert penalties(**values).apply(row) is row


def test_the_row_is_not_written_to() -> None:
    row = logits()
    before = row.clone()
    full = penalties((257,), repetition_penalty=2, presence_penalty=1, logit_bias={A: 5, B: -100}, min_tokens=5)
    full.record(B)
    full.apply(row)
    assert torch.equal(row, before)


def test_two_requests_do_not_see_each_other() -> None:
    """B69: one request's penalty changed a neighbour that had none."""
    one, other = penalties(frequency_penalty=1.05), penalties(frequency_penalty=1.05)
    one.record(A)
    assert torch.equal(other.apply(logits()), logits())


def test_a_long_text_of_many_ids() -> None:
    """Past the room that was made at first, and every id counted as often as it came."""
    full = penalties(frequency_penalty=0.5, repetition_penalty=2.0)
    for token_id in [*range(V), *range(0, V, 2)]:
        full.record(token_id)
    expected = -2.0 - 0.5 * (1 + (torch.arange(V) % 2 == 0).float())
    torch.testing.assert_close(full.apply(torch.full((V,), -1.0)), expected)


def test_without_a_prompt() -> None:
    params = SamplingParams(repetition_penalty=2).resolve({})
    empty = Penalties(params, [], V, [], torch.device("cpu"))
    assert torch.equal(empty.apply(logits()), logits())
