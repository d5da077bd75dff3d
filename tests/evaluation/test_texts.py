"""Documents and their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdecode.evaluation.texts import bos_prefix, built_in_text, documents, encode, fingerprint
from flexdecode.text.tokenizer import Tokenizer
from tests.checkpoints import BOS, byte_tokenizer
from tests.evaluation.models import add_bos


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    d = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(d)
    return d


def tokenizer(d: Path) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast.from_pretrained(str(d)))


def test_the_built_in_text_is_long_and_always_the_same() -> None:
    text = built_in_text()
    assert len(text) > 300_000
    assert text == built_in_text()
    assert "\n\n" in text


def test_a_text_is_one_document_and_lines_are_many() -> None:
    assert documents('{"text": "a"}', "a.txt") == ['{"text": "a"}']
    assert documents('{"text": "a\\nb", "id": 1}\n\n{"text": ""}\r\n', "a.jsonl") == ["a\nb", ""]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"text": "a"}\n{"text": 3}', "a.jsonl, line 2 is no object with a string"),
        ('\n\n["a"]', "a.jsonl, line 3 is no object"),
        ('{"text": "a"', "a.jsonl, line 1 is not JSON"),
        ("", "a.jsonl holds no text"),
        ('{"text": ""}', "a.jsonl holds no text"),
    ],
)
def test_lines_that_are_no_documents(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        documents(text, "a.jsonl")
    assert "\n" not in str(caught.value)


def test_limit_is_of_all_documents_together(folder: Path) -> None:
    texts = ["abc", "", "defg", "hi"]
    ids = tokenizer(folder)
    assert encode(ids, texts) == [list(b"abc"), [], list(b"defg"), list(b"hi")]
    assert encode(ids, texts, 5) == [list(b"abc"), [], list(b"de")]
    assert encode(ids, texts, 3) == [list(b"abc")]
    assert encode(ids, texts, 99) == encode(ids, texts)
    with pytest.raises(ValueError, match="limit must be at least 1 token, got 0"):
        encode(ids, texts, 0)


def test_bos_is_the_tokenizers_affair(folder: Path, tmp_path: Path) -> None:
    assert bos_prefix(tokenizer(folder)) == ()
    byte_tokenizer(tmp_path)
    add_bos(tmp_path)
    assert bos_prefix(tokenizer(tmp_path)) == (BOS,)
    assert encode(tokenizer(tmp_path), ["abc"]) == [list(b"abc")]


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_fingerprints_tell_documents_apart(a: list[str], b: list[str]) -> None:
    assert (fingerprint(a) == fingerprint(b)) == (a == b)
