"""From text to pieces: nothing dropped in silence, documents apart, the same pieces every time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdecode.quantizer import calibration as c


def encode(text: str) -> list[int]:
    return list(text.encode())


def sampled(documents: Any, **options: Any) -> c.Samples:
    values: dict[str, Any] = {"samples": 1000, "length": 8, "seed": 0, "origin": "here"} | options
    return c.sample(documents, encode, 256, **values)


@settings(max_examples=50, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 255), max_size=40), min_size=1), length=st.integers(1, 20))
def test_every_token_is_in_one_piece(documents: list[list[int]], length: int) -> None:
    """B34. Long documents are cut, short ones and tails are used, and no piece holds two documents."""
    if not any(documents):
        return
    found = sampled(documents, length=length)
    joined: list[int] = [i for piece in found.pieces for i in piece]
    assert joined == [i for document in documents for i in document]
    assert max(found.lengths) <= length
    assert len(found.pieces) == sum(-(-len(document) // length) for document in documents)
    assert found.documents == sum(bool(document) for document in documents)


def test_a_choice_among_many_is_seeded_and_told() -> None:
    documents = [[i, i, i] for i in range(50)]
    a, b, other = (sampled(documents, samples=10, seed=seed) for seed in (1, 1, 2))
    assert a == b
    assert a.fingerprint() == b.fingerprint() != other.fingerprint()
    assert a.pieces != other.pieces
    assert list(a.pieces) == sorted(a.pieces), "the order of the text"
    assert str(a) == "here: 30 tokens in 10 pieces (of 50) from 50 documents"
    assert str(sampled([[1]])) == "here: 1 tokens in 1 pieces (all) from 1 document"


def test_an_endless_source_is_read_as_far_as_needed() -> None:
    def endless() -> Any:
        number = 0
        while True:
            number += 1
            yield [number % 256] * 10

    found = sampled(endless(), samples=7, endless=True)
    assert len(found.pieces) == 7


def test_lines_of_many_kinds() -> None:
    text = '"ab"\r\n\r\n   \n{"text": "c", "id": 3}\n[1, 2]\n""\n'
    assert list(c.read_jsonl(io.StringIO(text), "f", "text")) == ["ab", "c", [1, 2], ""]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "f: line 1 is not JSON"),
        ('{"body": "a"}', "f: line 1 has no 'text', only 'body'; give --column"),
        ("3", "f: line 1 is neither a text, an object with one, nor a list of token ids"),
        ("[1, true]", "neither a text"),
        ('{"text": null}', "neither a text"),
    ],
)
def test_lines_that_are_none(line: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        list(c.read_jsonl(io.StringIO(line), "f", "text"))
    assert words in str(caught.value)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo")
    assert list(c.read_file(tmp_path / "a.txt", "text")) == ["one\n\ntwo"]
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"b\.txt: is not UTF-8 text"):
        list(c.read_file(tmp_path / "b.txt", "text"))
    with pytest.raises(ValueError, match="cannot be read"):
        list(c.read_file(tmp_path / "none.txt", "text"))


@pytest.mark.parametrize("documents", [[], [""], [" \n "], [[]]])
def test_no_text_is_an_error_that_names_the_file(documents: Any) -> None:
    with pytest.raises(ValueError, match="here: holds no text to calibrate on"):
        sampled(documents)


def test_ids_outside_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="here: token id 256 is outside the vocabulary of 256"):
        sampled([[1, 256]])


def test_text_that_needs_no_network() -> None:
    documents = list(c.python_topics())
    assert sum(map(len, documents)) > 300_000
    assert documents == list(c.python_topics())


def test_rows_of_a_dataset() -> None:
    rows = [{"text": "a", "x": 1}, {"text": "b", "x": 2}]
    assert list(c.read_rows(rows, "set", "text")) == ["a", "b"]
    with pytest.raises(ValueError, match="set: row 1 has no 'body', only 'text', 'x'"):
        list(c.read_rows(rows, "set", "body"))
