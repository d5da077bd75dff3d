"""Streaming detokenization: what comes out joined is what decoding everything gives, and it keeps coming."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from flexdecode.text.detokenize import Detokenizer
from flexdecode.text.tokenizer import Tokenizer
from tests.checkpoints import BOS, EOS, VOCAB
from tests.text.samples import BYTES, DECODERS, SPACE, SPECIAL, WORDS, metaspace

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def stream(tokenizer: Tokenizer, ids: Iterable[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@SHARED
@given(ids=st.lists(st.integers(0, VOCAB - 1)), skip=st.booleans())
def test_byte_level_equals_decoding_everything(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    joined = "".join(stream(byte_level, ids, skip))
    assert joined == byte_level.decode(ids, skip) == byte_level.hf.decode(ids, skip_special_tokens=skip)


@SHARED
@given(ids=st.lists(st.integers(0, 49200)), skip=st.booleans())
def test_a_real_vocabulary_equals_decoding_everything(demo: Tokenizer, ids: list[int], skip: bool) -> None:
    joined = "".join(stream(demo, ids, skip))
    assert joined == demo.decode(ids, skip) == demo.hf.decode(ids, skip_special_tokens=skip)


WORD_IDS = st.integers(len(SPECIAL) + len(BYTES), len(SPECIAL) + len(BYTES) + len(WORDS) + 3) | st.integers(0, 2)


@pytest.mark.parametrize("name", list(DECODERS))
@SHARED
@given(data=st.data(), skip=st.booleans())
def test_every_decoder_equals_decoding_everything(name: str, data: st.DataObject, skip: bool) -> None:
    """B90 and its kind: SentencePiece words, whole characters in byte tokens, added tokens, unknown ids."""
    tokenizer = _metaspace(name)
    char = st.text(max_size=2).map(lambda text: [len(SPECIAL) + byte for byte in text.encode(errors="ignore")])
    ids = [
        token_id for part in data.draw(st.lists(WORD_IDS.map(lambda token_id: [token_id]) | char)) for token_id in part
    ]
    joined = "".join(stream(tokenizer, ids, skip))
    assert joined == tokenizer.decode(ids, skip) == tokenizer.hf.decode(ids, skip_special_tokens=skip)


_CACHE: dict[str, Tokenizer] = {}


def _metaspace(name: str) -> Tokenizer:
    if name not in _CACHE:
        _CACHE[name] = metaspace(name)
    return _CACHE[name]


def test_emoji_and_cjk_never_show_half(byte_level: Tokenizer) -> None:
    """B86: a token decoded alone turned every character of several tokens into U+FFFD."""
    text = "ab €😀z 漢字"
    pieces = stream(byte_level, text.encode())
    assert "".join(pieces) == text
    assert all(text.startswith("".join(pieces[:end])) for end in range(len(pieces)))


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_cut_inside_a_character_shows_one_replacement_at_most(byte_level: Tokenizer, cut: int) -> None:
    """B86: max_tokens ends the sequence in the middle of an emoji; streamed and whole must agree."""
    ids = list("ab €😀z".encode())[:cut]
    joined = "".join(stream(byte_level, ids))
    assert joined == bytes(ids).decode(errors="replace")
    assert joined.count("\ufffd") <= 1


def test_invalid_bytes_raise_nothing(byte_level: Tokenizer) -> None:
    """B87: a strict decode at a token boundary died in mid-stream."""
    ids = [0xFF, 0x41, 0xC3, 0x20, 0x42, 0xE2, 0x82, 0x43]
    assert "".join(stream(byte_level, ids)) == bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("name", ["bytes", "llama", "long-replace"])
def test_a_run_of_invalid_bytes_keeps_coming(name: str, byte_level: Tokenizer) -> None:
    """B88: text that ends in U+FFFD was taken for an unfinished character: the client got nothing, and each token
    cost as much as all before it."""
    tokenizer = byte_level if name == "bytes" else _metaspace(name)
    bad = 0xFF if name == "bytes" else len(SPECIAL) + 0xFF
    detokenizer = Detokenizer(tokenizer)
    shown = 0
    for pushed in range(1, 401):
        shown += len(detokenizer.push(bad))
        assert pushed - shown <= 4
    assert shown + len(detokenizer.flush()) == 400


@pytest.mark.parametrize("name", list(DECODERS))
def test_cost_of_a_token_does_not_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B88, counted and not timed: no decode is asked for more than a handful of ids."""
    tokenizer = metaspace(name)
    longest = 0
    window = Tokenizer.decode_window

    def counted(self: Tokenizer, ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return window(self, ids)

    monkeypatch.setattr(Tokenizer, "decode_window", counted)
    stream(tokenizer, [len(SPECIAL) + len(BYTES), len(SPECIAL) + 0xFF] * 100)
    assert longest <= 16


def test_words_do_not_run_together() -> None:
    """B90: the leading space belongs to the piece, and only the first piece of the text loses it."""
    tokenizer = _metaspace("metaspace")
    ids = [tokenizer.hf.convert_tokens_to_ids(token) for token in (f"{SPACE}a", "c", f"{SPACE}b", f"{SPACE}b")]
    assert stream(tokenizer, ids) == ["a", "c", " b", " b", ""]
    assert tokenizer.decode(ids) == "ac b b"


@pytest.mark.parametrize("name", ["llama", "metaspace", "wordpiece"])
def test_output_joins_the_prompt(name: str) -> None:
    """B90, echo: after a prompt the first generated piece is not the first of the text."""
    tokenizer = _metaspace(name)
    ids = [tokenizer.hf.convert_tokens_to_ids(token) for token in (f"{SPACE}a", "c", f"{SPACE}b", f"{SPACE}b")]
    for cut in range(1, len(ids)):
        after = Detokenizer(tokenizer, context_ids=ids[:cut])
        output = "".join([*map(after.push, ids[cut:]), after.flush()])
        assert tokenizer.decode(ids[:cut]) + output == tokenizer.decode(ids)


def test_ids_beyond_the_tokenizer_have_no_text(byte_level: Tokenizer) -> None:
    """B17: the model has more rows than the tokenizer has ids, and one of them is sampled."""
    assert stream(byte_level, [65, 262, 66]) == ["A", "", "B", ""]
    assert byte_level.decode([262, 2**40, -1]) == ""
    assert stream(byte_level, [0xE2, 262, 0x82, 0xAC]) == ["", "", "", "€", ""], "nor do they break a character"


def test_a_tokenizer_written_in_python() -> None:
    """It has no decoder to take apart; its own decode is asked for a few tokens at a time."""
    tokenizer = Tokenizer(ByT5Tokenizer())
    text = "ab €😀😀 z"
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == text
    assert [tokenizer.token_bytes(token_id) for token_id in ids[:3]] == [b"a", b"b", b" "]
    assert tokenizer.eos_token_ids == (1,)


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    assert "".join(stream(byte_level, [BOS, 65, EOS])) == "A"
    assert "".join(stream(byte_level, [BOS, 65, EOS], skip=False)) == "<bos>A<eos>"
