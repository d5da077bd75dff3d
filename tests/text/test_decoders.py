"""The incremental decoders against the tokenizers library, which decodes whole sequences."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from flexdecode.text.decoders import BYTE_OF_CHAR, ByteFallback, byte_level_bytes, fallback_byte, pipeline
from tests.text.samples import DECODERS, SPACE, WORDS

INCREMENTAL = ["llama", "gemma", "metaspace", "metaspace-never", "fallback-metaspace"]
WINDOWED = ["wordpiece", "suffix", "long-replace"]


def run(decoder: object, tokens: list[str]) -> str:
    stream = pipeline(json.loads(decoder.__getstate__()))  # type: ignore[attr-defined]
    assert stream is not None
    return "".join([*map(stream.push, tokens), stream.flush()])


def test_byte_alphabet_is_the_librarys() -> None:
    assert set(BYTE_OF_CHAR) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert byte_level_bytes("\u0120\u00c3\u00a9") == b" \xc3\xa9"


def test_a_token_outside_the_byte_alphabet_stands_for_itself() -> None:
    for token in ("<｜end▁of▁text｜>", "two words", "é "):
        assert byte_level_bytes(token) == token.encode()
        assert run(decoders.ByteLevel(), [token]) == decoders.ByteLevel().decode([token])


@pytest.mark.parametrize("token", ["<0x0G>", "<0x1>", "<0x123>", "0xE2", "<0xE2", "<0x  >"])
def test_only_byte_tokens_are_bytes(token: str) -> None:
    assert fallback_byte(token) is None
    assert fallback_byte("<0xe2>") == fallback_byte("<0xE2>") == 0xE2


@pytest.mark.parametrize("name", INCREMENTAL)
@given(tokens=st.lists(st.sampled_from([*WORDS, "<tool>", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "<0x41>"])))
def test_streamed_text_is_the_librarys(name: str, tokens: list[str]) -> None:
    """Word by word, byte by byte. Left out is the one case that no stream can have: see the test below."""
    decoder = DECODERS[name]()
    if "fallback" in name or name in ("llama", "gemma"):
        tokens = [token for run_ in _runs(tokens) for token in run_ if _streamable(run_)]
    assert run(decoder, tokens) == decoder.decode(tokens)


def _runs(tokens: list[str]) -> list[list[str]]:
    """Byte tokens together, each other token alone; a word between any two runs of bytes."""
    runs: list[list[str]] = []
    for token in tokens:
        if fallback_byte(token) is not None and runs and fallback_byte(runs[-1][0]) is not None:
            runs[-1].append(token)
        else:
            runs.append([token])
    return [part for run_ in runs for part in (run_, ["c"])]


def _streamable(run_: list[str]) -> bool:
    """Whether the run is UTF-8 throughout, or has no whole character before its first stray byte."""
    data = bytes(byte for token in run_ if (byte := fallback_byte(token)) is not None)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start == 0
    return True


def test_a_whole_character_before_a_stray_byte_stays() -> None:
    """The library turns the whole run into U+FFFD; by then the stream has long given the character out."""
    tokens = ["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "<0x41>", "c"]
    assert decoders.ByteFallback().decode(tokens) == "\ufffd" * 5 + "c"
    assert run(decoders.ByteFallback(), tokens) == "€\ufffd\ufffdc"


def test_byte_fallback_never_holds_more_than_three_bytes() -> None:
    stage = ByteFallback()
    assert [stage.push([token]) for token in ("<0xF0>", "<0x9F>", "<0x98>", "<0x80>")] == [[], [], [], ["😀"]]
    assert stage.push(["<0xFF>"]) == ["\ufffd"]
    assert stage.push(["<0xF0>"]) == ["\ufffd"], "the rest of a broken run comes at once"
    assert stage.push(["c", "<0xE2>"]) == ["c"]
    assert stage.flush() == ["\ufffd"]


@given(data=st.lists(st.integers(0, 255)))
def test_bytes_become_the_text_that_python_makes_of_them(data: list[int]) -> None:
    char_of_byte = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    tokens = [char_of_byte[byte] for byte in data]
    assert run(decoders.ByteLevel(), tokens) == bytes(data).decode(errors="replace")
    assert run(decoders.ByteLevel(), tokens) == decoders.ByteLevel().decode(tokens)


def test_no_decoder_at_all_joins_with_spaces() -> None:
    stream = pipeline(None)
    assert stream is not None
    assert "".join(map(stream.push, ["a", "b", "c"])) == "a b c"


@pytest.mark.parametrize("name", WINDOWED)
def test_what_has_no_incremental_form_says_so(name: str) -> None:
    assert pipeline(json.loads(DECODERS[name]().__getstate__())) is None


def test_neither_has_stripping_at_the_end() -> None:
    decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)])
    assert pipeline(json.loads(decoder.__getstate__())) is None


def test_strip_before_fusing_is_per_token() -> None:
    decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0)])
    tokens = [f"{SPACE}a", f"{SPACE}{SPACE}b", "c"]
    assert run(decoder, tokens) == decoder.decode(tokens) == "a bc"


def test_metaspace_after_fusing_sees_one_piece() -> None:
    decoder = decoders.Sequence([decoders.Fuse(), decoders.Metaspace()])
    tokens = [f"{SPACE}a", f"{SPACE}b"]
    assert run(decoder, tokens) == decoder.decode(tokens)
