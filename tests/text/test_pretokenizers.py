"""Each name of tokenizer.ggml.pre against the pre-tokenizer it stands for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from flexdecode.text.pretokenizers import CUTS, cut_named

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
TEXTS = [
    "Hello world! 123 4567",
    "  12",
    "I'm we'LL they'Re",
    "a\n\n b\r\n\tc  ",
    "naïve café — 漢字かな русский HTMLParser iOS",
    "x²+½=٣٤ $5.00 <|a|> https://e.org/?q=1",
    "",
]
SAMPLE = st.text(st.sampled_from("aB é漢1٣½ \t\n\r'sS.,$/_-😀"), max_size=20)


def pieces(pre_tokenizer: Any, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(CUTS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
@given(text=SAMPLE | st.sampled_from(TEXTS))
def test_as_transformers_cuts(name: str, text: str) -> None:
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    assert pieces(CUTS[name].pre_tokenizer(), text) == pieces(pre_tokenizers.Sequence([split, BYTE_LEVEL]), text)


@pytest.mark.parametrize(
    ("name", "expected"), [("gpt-2", GPT2), ("phi-2", GPT2), ("smollm", DIGITS), ("exaone", DIGITS)]
)
@given(text=SAMPLE | st.sampled_from(TEXTS))
def test_as_the_published_tokenizer_cuts(name: str, expected: Any, text: str) -> None:
    assert pieces(CUTS[name].pre_tokenizer(), text) == pieces(expected, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b", ["a", ",", "b"]),
        ("it's", ["it", "'", "s"]),  # punctuation is cut out before contractions are looked for
        ("12345", ["123", "45"]),
        (" 12 a", ["\u0120", "12", "\u0120a"]),
    ],
)
def test_default(text: str, expected: list[str]) -> None:
    assert pieces(CUTS["default"].pre_tokenizer(), text) == expected


@given(text=SAMPLE)
def test_every_cut_keeps_the_text(text: str) -> None:
    for cut in CUTS.values():
        assert sum(len(piece) for piece in pieces(cut.pre_tokenizer(), text)) == len(text.encode())


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.gguf: tokenizer\.ggml\.pre is 'newest', .* qwen2"):
        cut_named("newest", "model.gguf")
