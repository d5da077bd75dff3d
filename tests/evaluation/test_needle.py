"""Retrieval: likelihoods against transformers, a model that answers, and what a mask hides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexdecode import LLM
from flexdecode.evaluation.haystack import draw_needle
from flexdecode.evaluation.needle import Found, candidate_logprobs, needle, summarize
from flexdecode.evaluation.texts import built_in_text
from tests.checkpoints import puppet, tiny
from tests.oracles import expected, ids

TEXT = built_in_text()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("shared", [0, 1, 9])
def test_candidates_have_transformers_probabilities(family: str, shared: int, tmp_path: Path) -> None:
    model = tiny(tmp_path, family)
    llm = LLM(tmp_path, dtype="fp32")
    prompt, begin = ids(70), ids(shared, seed=2)
    candidates = [[*begin, 1], [*begin, 2, 3, 4], [*begin, 2, 5], [*begin, 9, 1, 1, 1]]
    got = candidate_logprobs(llm, prompt, candidates)
    for score, candidate in zip(got.tolist(), candidates, strict=True):
        table = expected(model, [*prompt, *candidate]).double().log_softmax(-1)
        wanted = sum(float(table[69 + i, candidate[i]]) for i in range(shared, len(candidate)))
        assert score == pytest.approx(wanted, abs=1e-3)
    assert llm.engine.cache.lengths == {}


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, int]:
    """A model that says the answer of one trial after `Answer:`, whatever stood before; and that trial."""
    trial = next(t for t in range(100) if len(set(draw_needle(t, TEXT).answer)) == 5)
    d = tmp_path_factory.mktemp("puppet")
    model, _ = puppet(d, draw_needle(trial, TEXT).answer, prompt_last=ord(":"))
    model.config.max_position_embeddings = 2048
    model.save_pretrained(d)
    return LLM(d, dtype="fp32"), trial


def test_one_that_answers_is_found_out(answering: tuple[LLM, int]) -> None:
    llm, trial = answering
    seen = []
    results = list(needle(llm, TEXT, [600, 900], [0, 0.5, 1], trials=[trial], progress=lambda *told: seen.append(told)))
    assert [(r.length, r.depth) for r in results] == [(n, d) for n in (600, 900) for d in (0, 0.5, 1)]
    assert all(r.found and r.said == r.answer and not r.chat for r in results)
    assert all(r.likelihood > 0.99 and r.margin > 5 for r in results)
    assert [r.at for r in results[::3]] == [0, 0]
    assert seen[-1] == ("asking", 4500, 4500)
    told = summarize(results)
    assert (told.found, told.asked, told.likelihood_error) == (6, 6, None)


def test_another_trial_is_not(answering: tuple[LLM, int]) -> None:
    llm, trial = answering
    (result,) = needle(llm, TEXT, [600], [0.5], trials=[trial + 1])
    assert not result.found
    assert result.trial == trial + 1
    assert result.likelihood < 0.99


def test_summary_has_an_error_over_trials() -> None:
    def one(trial: int, likelihood: float) -> Found:
        return Found(8, 0.0, trial, 8, 0.0, likelihood > 0.5, likelihood, -1.0, 0.0, "1", "", True)

    told = summarize([one(0, 0.2), one(0, 0.4), one(1, 0.9), one(1, 0.7)])
    assert (told.found, told.asked, told.chat) == (2, 4, True)
    assert told.likelihood == pytest.approx(0.55)
    assert told.likelihood_error == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("lengths", "depths", "trials", "words"),
    [
        ([], [0.5], [0], "0 lengths, 1 depths and 1 trials: at least 1 of each"),
        ([600], [0.5], [], "1 lengths, 1 depths and 0 trials"),
        ([600], [1.5], [0], "a depth of 1.5 lies outside"),
        (
            [600, 2020],
            [0.5],
            [0],
            r"a length of 2020 and 3\d tokens of answer make 205\d, and the context ends at 2048",
        ),
        ([1800, 60], [0.5], [0], "a length of 60 tokens is too short"),
    ],
)
def test_what_cannot_be_asked(
    lengths: list[int], depths: list[float], trials: list[int], words: str, answering: tuple[LLM, int]
) -> None:
    with pytest.raises(ValueError, match=words):
        next(needle(answering[0], TEXT, lengths, depths, trials=trials))


@pytest.mark.slow
def test_the_demo_model_finds_what_a_mask_does_not_hide() -> None:
    asked = {"lengths": [512], "depths": [0.0, 1.0], "trials": [0]}
    whole = list(needle(LLM("demo"), TEXT, **asked))  # type: ignore[arg-type]
    assert [r.found for r in whole] == [True, True]
    assert all(r.chat and 448 < r.prompt_tokens <= 512 for r in whole)
    hidden, seen = needle(LLM("demo", mask="window(96) | sinks(1)"), TEXT, **asked)  # type: ignore[arg-type]
    assert (hidden.found, seen.found) == (False, True)
    assert hidden.likelihood < 0.9 < seen.likelihood
    assert torch.tensor(whole[0].margin) > hidden.margin + 3
