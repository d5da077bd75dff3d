"""Where a fact stands in a prompt, and how long the prompt is. A token is a byte here, so both show in the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from flexdecode.evaluation.haystack import Haystack, draw_needle, split_sentences
from flexdecode.evaluation.texts import built_in_text
from flexdecode.text.tokenizer import Tokenizer
from tests.checkpoints import byte_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
TEXT = built_in_text()
LONGEST = max(len(sentence.encode()) for sentence in split_sentences(TEXT)) + 1
FACT = draw_needle(0, TEXT)


def tokenizer(d: Path, template: str | None) -> Tokenizer:
    byte_tokenizer(d, template)
    return Tokenizer(PreTrainedTokenizerFast.from_pretrained(str(d)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("plain"), None)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("chat"), TEMPLATE)


@given(st.integers(800, 6000), st.floats(0, 1), st.booleans(), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_length_and_depth(
    plain: Tokenizer, chat: Tokenizer, length: int, depth: float, templated: bool, start: int
) -> None:
    used = chat if templated else plain
    prompt = Haystack(used, TEXT, start).prompt(FACT, length, depth)
    text = used.decode(prompt.ids, skip_special_tokens=False)
    assert length - LONGEST - 8 <= len(prompt.ids) <= length
    assert text.count(FACT.fact) == 1
    body = text[text.index("]") + 1 if templated else 0 : text.index("\n\n")]
    before, after = (len(part.strip().encode()) for part in body.split(FACT.fact))
    assert prompt.depth == pytest.approx(before / (before + after), abs=0.01)
    assert abs(prompt.depth - depth) * (before + after) <= LONGEST / 2 + 2


@pytest.mark.parametrize(("depth", "place"), [(0.0, "first"), (1.0, "last")])
def test_the_ends(depth: float, place: str, chat: Tokenizer) -> None:
    prompt = Haystack(chat, TEXT).prompt(FACT, 1000, depth)
    text = chat.decode(prompt.ids, skip_special_tokens=False)
    assert prompt.depth == depth
    if place == "first":
        assert text.startswith(f"<bos>[user]{FACT.fact} ")
    assert (f"{FACT.fact}\n\n{FACT.question}[assistant]" in text) == (place == "last")
    assert text.endswith(f"\n\n{FACT.question}[assistant]")


def test_without_a_template_the_question_is_plain(plain: Tokenizer) -> None:
    haystack = Haystack(plain, TEXT)
    text = plain.decode(haystack.prompt(FACT, 900, 0.5).ids)
    assert text.endswith(f"\n\nQuestion: {FACT.question}\nAnswer:")
    right, *wrong = (plain.decode(ids) for ids in haystack.candidates(FACT))
    assert right == f" {FACT.lead} {FACT.answer}"
    assert f"{right[1:]}." == FACT.fact
    assert wrong == [f" {FACT.lead} {number}" for number in FACT.wrong]


def test_haystacks_begin_where_they_are_told(plain: Tokenizer) -> None:
    sentences = ["One is here.", "Two is there.", "Three!"]
    for start, order in ((0, (0, 1)), (2, (2, 0)), (4, (1, 2))):
        haystack = Haystack(plain, " ".join(sentences), start)
        alone = len(haystack._render(FACT, [], 0))
        ids = haystack.prompt(FACT, alone + sum(len(sentences[i]) + 1 for i in order), 1.0).ids
        assert plain.decode(ids).startswith(" ".join(sentences[i] for i in order) + f" {FACT.fact}")


def test_needles_differ_and_are_the_same_each_time() -> None:
    drawn = [draw_needle(seed, TEXT) for seed in range(30)]
    assert drawn == [draw_needle(seed, TEXT) for seed in range(30)]
    assert len({one.answer for one in drawn}) == 30
    for one in drawn:
        assert len({one.answer, *one.wrong}) == 10
        assert all(len(number) == 5 and number not in TEXT for number in (one.answer, *one.wrong))
    assert drawn[0].answer not in {draw_needle(0, TEXT + drawn[0].answer).answer}


def test_sentences() -> None:
    words = " ".join(f"w{i}" for i in range(40))
    assert list(split_sentences(f"One.  Two\nis: 3.5! {words} 你好。再见")) == [
        "One.",
        "Two is:",
        "3.5!",
        " ".join(f"w{i}" for i in range(32)),
        " ".join(f"w{i}" for i in range(32, 40)) + " 你好。",
        "再见",
    ]
    assert list(split_sentences(" \n ")) == []


@pytest.mark.parametrize(
    ("text", "length", "words"),
    [
        (TEXT, 100, r"a length of 100 tokens is too short: question and fact alone take \d+, and the text's next"),
        ("Short text. Very short.", 1000, r"the text has 24 tokens, and \d+ are wanted; give a longer --text"),
        (" ", 1000, r"the text has 0 tokens"),
    ],
)
def test_no_room(text: str, length: int, words: str, plain: Tokenizer) -> None:
    with pytest.raises(ValueError, match=words):
        Haystack(plain, text).prompt(FACT, length, 0.5)
