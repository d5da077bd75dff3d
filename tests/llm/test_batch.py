"""Faults of batches, through LLM: each row is its own request, whatever stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flexdecode import SamplingParams
from tests.checkpoints import EOS, byte_tokenizer, dist, edit_tensors, puppet, tiny
from tests.llm.asking import GREEDY, load
from tests.oracles import ids


def sampling(new: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new, ignore_eos=True, **({"temperature": 0.0} | options))


@pytest.mark.parametrize("side", ["right", "left", None])
def test_ragged_prompts_whatever_the_padding_side(side: str | None, tmp_path: Path) -> None:
    """B66: positions were taken from the padded index. Here there is no padding, and no padding token is needed."""
    tiny(tmp_path)
    tokenizer = byte_tokenizer(tmp_path)
    if side is None:
        tokenizer.pad_token = None
    else:
        tokenizer.padding_side = side
    tokenizer.save_pretrained(tmp_path)
    llm, prompts = load(tmp_path), [bytes(97 + n % 26 for n in range(k)).decode() for k in (1, 5, 9, 40)]
    alone = [llm.generate(p, sampling(16)).text for p in prompts]
    assert [c.text for c in llm.generate_batch(prompts, sampling(16))] == alone


def test_every_mix_of_temperatures(tmp_path: Path) -> None:
    """B68: the temperature was one tensor, and the greedy rows divided by 0."""
    tiny(tmp_path)
    llm = load(tmp_path)
    ways = [
        sampling(),
        sampling(temperature=1.0, seed=1),
        sampling(temperature=1e-7),
        sampling(temperature=2.0, seed=3),
    ]
    ways.append(sampling())
    alone = [llm.generate(ids(20), way).token_ids for way in ways]
    together = [c.token_ids for c in llm.generate_batch([ids(20)] * 5, ways)]
    assert together == alone
    assert together[0] == together[2] == together[4]


@pytest.mark.parametrize(
    "option",
    [{"frequency_penalty": 1.05}, {"repetition_penalty": 1.5}, {"logit_bias": {97: 100}}, {"top_k": 1}],
    ids=str,
)
def test_a_row_with_penalties_leaves_its_neighbour_alone(option: dict[str, Any], tmp_path: Path) -> None:
    """B69."""
    dist(tmp_path, {97: 0.4, 98: 0.35, 99: 0.25})
    llm = load(tmp_path)
    plain = sampling(20, temperature=1.0, seed=5)
    wanted = llm.generate("aa", plain).text
    odd = llm.generate("aaaabb", sampling(20, **option)).text
    for order in (1, -1):
        rows = [("aa", plain), ("aaaabb", sampling(20, **option))][::order]
        texts = [c.text for c in llm.generate_batch([p for p, _ in rows], [w for _, w in rows])]
        assert texts[::order] == [wanted, odd]


def test_batches_of_any_size_one_after_the_other(tmp_path: Path) -> None:
    """B70: a cache was cut to the first batch."""
    tiny(tmp_path)
    llm = load(tmp_path)
    prompts = [ids(3 + 5 * n, seed=n) for n in range(8)]
    alone = [llm.generate(p, sampling()).token_ids for p in prompts]
    for size in (4, 1, 3, 8):
        assert [c.token_ids for c in llm.generate_batch(prompts[:size], sampling())] == alone[:size]


def test_stop_strings_and_budgets_beside_each_other(tmp_path: Path) -> None:
    """B82, B84, B85: ends are each row's own."""
    puppet(tmp_path, "ABCDEFGHIJ")
    llm = load(tmp_path)
    ways: list[tuple[dict[str, Any], str, str]] = [
        ({"stop": "DEFG"}, "ABC", "stop"),
        ({"max_tokens": 4}, "ABCD", "length"),
        ({"stop": ["DEX", "EFG"]}, "ABCD", "stop"),
        ({}, "ABCDEFGHIJ", "stop"),
        ({"stop_token_ids": [67]}, "AB", "stop"),
        ({"max_tokens": 0}, "", "length"),
        ({"stop": "HIJK"}, "ABCDEFGHIJ", "stop"),
        ({"ignore_eos": True, "max_tokens": 13}, "ABCDEFGHIJ", "length"),
    ]
    answers = llm.generate_batch(
        ["<bos>"] * len(ways), [SamplingParams(**({"max_tokens": 50} | own), **GREEDY) for own, _, _ in ways]
    )
    assert [(c.text, c.finish_reason) for c in answers] == [(text, reason) for _, text, reason in ways]
    assert answers[7].token_ids[-3:] == (EOS,) * 3


def test_choices_and_seeds_beside_each_other(tmp_path: Path) -> None:
    """B78, and choices are what requests with their seeds would be."""
    tiny(tmp_path)
    llm = load(tmp_path)
    many = sampling(10, temperature=1.0, seed=7, n=3)
    answers = llm.generate_batch([ids(30), ids(5)], [many, sampling(10, n=2)])
    assert [c.token_ids for c in answers[:3]] == [llm.generate(ids(30), many.choice(i)).token_ids for i in range(3)]
    assert answers[3].token_ids == answers[4].token_ids
    assert len({c.token_ids for c in answers[:3]}) == 3


def test_what_fails_is_told_when_the_others_have_ended(tmp_path: Path) -> None:
    """B65: the sick row ends alone, and the rest of the batch is not lost to it."""
    tiny(tmp_path)

    def poison(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.embed_tokens.weight"][7] = float("nan")
        return tensors

    edit_tensors(tmp_path, poison)
    llm = load(tmp_path)
    healthy = sampling(5, logit_bias={7: -100})
    wanted = llm.generate([3, 4, 5], healthy).token_ids
    ended = []
    finish = llm.engine.step

    def step() -> Any:
        advanced = finish()
        ended.extend(r for r in advanced if r.finish_reason == "length")
        return advanced

    llm.engine.step = step  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="NaN"):
        llm.generate_batch([[3, 4, 5], [3, 7, 5], [3, 4, 5]], healthy)
    assert [tuple(r.output_ids) for r in ended] == [wanted] * 2
    assert not llm.engine.busy
