"""lm-eval on an LLM: the same figures as its own class for transformers. Runs where lm-eval is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerFast

from flexdecode import LLM
from flexdecode.evaluation.harness import HarnessLM
from tests.checkpoints import puppet, tiny
from tests.evaluation.models import TEXT, add_bos

LIMIT = 96  # tokens of context, so that texts have to be cut


def ask(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=own, idx=i) for i, own in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["no bos", "bos"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HarnessLM, Any]:
    d = tmp_path_factory.mktemp("model")
    model = tiny(d, gain=2.0)
    if request.param == "bos":
        add_bos(d)
    theirs = HFLM(model, tokenizer=PreTrainedTokenizerFast.from_pretrained(str(d)), max_length=LIMIT, device="cpu")
    return HarnessLM(LLM(d, dtype="fp32", max_context=LIMIT)), theirs


def test_likelihoods(pair: tuple[HarnessLM, Any]) -> None:
    ours, theirs = pair
    first = ours.tokenizer.decode([int(theirs.model(theirs.tok_batch_encode(["Once"])[0]).logits[0, -1].argmax())])
    requests = ask(
        "loglikelihood",
        ("Once", first),
        ("The sky is", " blue"),
        ("The sky is", " green and wide"),
        ("The sky is ", "red"),
        ("", "Nothing before"),
        (TEXT[:150], " x"),
        (TEXT[:150], " a longer end"),
        ("<bos>A", "B"),
        ("x", "y" * LIMIT),
    )
    got, wanted = ours.loglikelihood(requests), theirs.loglikelihood(requests)
    assert [score for score, _ in got] == pytest.approx([score for score, _ in wanted], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]
    assert got[0][1]


def test_rolling(pair: tuple[HarnessLM, Any]) -> None:
    ours, theirs = pair
    requests = ask("loglikelihood_rolling", (TEXT,), ("short",), (TEXT[: LIMIT + 1],))
    assert ours.loglikelihood_rolling(requests) == pytest.approx(theirs.loglikelihood_rolling(requests), abs=1e-2)


def test_answers(tmp_path: Path) -> None:
    """A model that says `hello wrd` (letters once each) and ends, stopped early or not."""
    puppet(tmp_path, "helo wrd", prompt_last=ord(":"))
    ours = HarnessLM(LLM(tmp_path, dtype="fp32"))
    got = ours.generate_until(
        ask(
            "generate_until",
            ("Say:", {"until": ["\n"]}),
            ("Say:", {"until": [" w"], "max_gen_toks": 20}),
            ("Say:", {"until": "", "max_gen_toks": 3, "do_sample": False, "temperature": 0.7}),
            ("x" * 2000 + ":", {"until": ["r", "lo"], "max_new_tokens": 9, "do_sample": True, "temperature": 0.01}),
        )
    )
    assert got == ["helo wrd", "helo", "hel", "he"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"until": [], "num_beams": 4}, "generation option 'num_beams' is not known"),
        ({"until": [], "max_gen_toks": 96}, "max_gen_toks=96 leaves no room for a prompt: the context ends at 96"),
    ],
)
def test_what_is_not_understood(options: dict[str, Any], words: str, pair: tuple[HarnessLM, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        pair[0].generate_until(ask("generate_until", ("a", options)))


def test_a_continuation_that_cannot_be(pair: tuple[HarnessLM, Any]) -> None:
    with pytest.raises(ValueError, match=f"{LIMIT + 1} of continuation; each needs at least 1"):
        pair[0].loglikelihood(ask("loglikelihood", ("x", "y" * (LIMIT + 1))))


@pytest.mark.slow
def test_a_whole_task(pair: tuple[HarnessLM, Any], tmp_path: Path) -> None:
    """lm-eval's own way, from questions in a file to an accuracy."""
    rows = [{"q": f"Question {i}: which?", "choices": [" one", " two", " three"], "gold": i % 3} for i in range(9)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    got, wanted = (
        simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)["results"]["questions"] for model in pair
    )
    assert got["acc,none"] == wanted["acc,none"]
    assert got["acc_norm,none"] == wanted["acc_norm,none"]
