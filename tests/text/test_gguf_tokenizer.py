"""Tokenizers from GGUF metadata, against transformers' reading, the published tokenizer and a naive SentencePiece."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from flexdecode.text.chat_template import render
from flexdecode.text.decoders import BYTE_OF_CHAR
from flexdecode.text.tokenizer import MissingTokenizerError, Tokenizer
from tests.text.samples import BYTES, SPACE, source

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def load(**keys: Any) -> Tokenizer:
    """A tokenizer from tokenizer.ggml.* keys; names with a dot are taken whole."""
    metadata = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Tokenizer.load(source(Path("model.gguf"), "gguf", metadata))


def byte_level(extra: list[tuple[str, int]], merges: list[str] | None = None, **keys: Any) -> Tokenizer:
    tokens = [*((char, NORMAL) for char in sorted(BYTE_OF_CHAR)), *extra]
    lists = {"tokens": [token for token, _ in tokens], "token_type": [kind for _, kind in tokens]}
    return load(**{"model": "gpt2", "pre": "gpt-2", "merges": merges or [], **lists, **keys})


WORDS = {
    "a": -9.0,
    "b": -10.0,
    SPACE: -11.0,
    f"{SPACE}a": -2.0,
    "ab": -1.0,
    f"{SPACE}ab": -3.0,
    "ba": -2.5,
    "aba": -0.5,
}


def sentencepiece(extra: list[tuple[str, int]] | None = None, **keys: Any) -> Tokenizer:
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((token, BYTE) for token in BYTES)]
    tokens += [(token, NORMAL) for token in WORDS] + (extra or [])
    lists: dict[str, Any] = {"tokens": [token for token, _ in tokens], "token_type": [kind for _, kind in tokens]}
    lists["scores"] = [WORDS.get(token, 0.0) for token, _ in tokens]
    return load(**{"model": "llama", **lists, **keys})


def test_demo_against_the_published_tokenizer(demo: Tokenizer) -> None:
    """Ids that the published SmolLM2 tokenizer gives."""
    assert demo.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert demo.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert demo.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert demo.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert demo.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]


@pytest.mark.slow
def test_demo_against_transformers(demo: Tokenizer) -> None:
    """Equal wherever plain GPT-2 cuts do not differ from cutting every digit out, which transformers leaves away."""
    from transformers import AutoTokenizer

    path = Path(demo.name)
    hf = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    for text in ("Hello, world!", "a  b\n\n c\t", "café 😀 漢字", "I'm we'll", "<|im_start|>x<|im_end|>", ""):
        assert demo.encode(text) == hf(text).input_ids
    assert demo.encode("  12") == [256, 33, 34]
    assert hf("  12").input_ids == [216, 216, 33, 34]
    messages = [{"role": "user", "content": "hi"}]
    assert render(demo, messages) == hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_control_and_user_defined_tokens_are_found_in_text() -> None:
    tokenizer = byte_level([("<|x|>", CONTROL), ("<think>", USER_DEFINED), ("<end of>", USER_DEFINED), ("<n>", NORMAL)])
    assert tokenizer.encode("a<|x|><think><end of>b") == [*tokenizer.encode("a"), 256, 257, 258, *tokenizer.encode("b")]
    assert len(tokenizer.encode("<n>")) == 3
    assert tokenizer.special_ids == {256}
    assert tokenizer.decode([256, 257, 258]) == "<think><end of>"
    assert tokenizer.token_bytes(258) == b"<end of>"


def test_control_tokens_outside_the_byte_alphabet() -> None:
    """DeepSeek spells its control tokens with a full-width bar."""
    tokenizer = byte_level([("<｜User｜>", CONTROL)])
    assert tokenizer.encode("<｜User｜>") == [256]
    assert tokenizer.decode([256], skip_special_tokens=False) == "<｜User｜>"


@pytest.mark.parametrize(
    ("pre", "key", "expected"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_as_the_file_says_or_as_its_kind_does(pre: str, key: bool | None, expected: bool) -> None:
    keys = {} if key is None else {"add_bos_token": key}
    tokenizer = byte_level([("<s>", CONTROL), ("</s>", CONTROL)], pre=pre, bos_token_id=256, eos_token_id=257, **keys)
    assert tokenizer.adds_bos is expected
    assert tokenizer.encode("a")[:-1] == [256] * expected
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[-1:]


def test_eos_is_added_when_asked_for() -> None:
    tokenizer = byte_level([("</s>", CONTROL)], eos_token_id=256, add_eos_token=True)
    assert tokenizer.encode("a")[-1] == 256
    assert render(tokenizer, [{"role": "user", "content": "a"}], template="{{ messages[0].content }}")[-1] != 256


def test_end_of_turn_ids() -> None:
    """B81: eos_token_id alone lets a chat model run on."""
    extra = [("</s>", CONTROL), ("<turn>", CONTROL), ("<|eot_id|>", CONTROL), ("<|end|>", NORMAL)]
    assert byte_level(extra, eos_token_id=256, eot_token_id=257).eos_token_ids == (256, 257, 258)
    assert byte_level([("<|return|>", CONTROL), ("<|end|>", CONTROL)], eos_token_id=256).eos_token_ids == (256,)


def test_llama3_words_that_are_tokens_ignore_the_merges() -> None:
    assert byte_level([("abc", NORMAL)], pre="llama-bpe").encode("abc") == [256]
    assert len(byte_level([("abc", NORMAL)]).encode("abc")) == 3


def test_qwen2_composes_characters_first() -> None:
    decomposed = "e\u0301"
    assert byte_level([], pre="qwen2").encode(decomposed) == byte_level([], pre="qwen2").encode("é")
    assert byte_level([]).encode(decomposed) != byte_level([]).encode("é")


def test_merges_may_begin_with_a_space() -> None:
    assert byte_level([("ab", NORMAL)], merges=["a b"]).encode("ab") == [256]
    with pytest.raises(ValueError, match=r"model\.gguf: tokenizer\.ggml\.merges has 'ab'"):
        byte_level([], merges=["ab"])


def test_padding_ids_have_no_text() -> None:
    """B17: the converter fills the vocabulary up with [PAD...] tokens."""
    tokenizer = byte_level([("<|x|>", CONTROL), ("[PAD257]", UNUSED)])
    assert tokenizer.token(257) is None
    assert tokenizer.decode([257]) == ""
    assert 257 not in tokenizer.encode("[PAD257]")


def naive_sentencepiece(text: str) -> list[str]:
    """Joins the adjacent pair whose union scores best, again and again."""
    symbols = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        pairs = [(WORDS[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in WORDS]
        if not pairs:
            return symbols
        place = -max(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@given(text=st.text("ab ", max_size=12))
def test_sentencepiece_merges_by_score(text: str) -> None:
    tokenizer = _CACHED[0] if _CACHED else sentencepiece()
    _CACHED[:] = [tokenizer]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token(token_id) for token_id in ids] == naive_sentencepiece(text)
    assert tokenizer.decode(ids) == text


_CACHED: list[Tokenizer] = []


def test_sentencepiece_specials_and_bytes() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode("a€") == [1, tokenizer.encode("a")[1], 3 + 0xE2, 3 + 0x82, 3 + 0xAC]
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode(tokenizer.encode(" a€")) == " a€"
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    assert tokenizer.token_bytes(tokenizer.encode("a")[1]) == b" a"


def test_sentencepiece_prefix_space_after_every_special_token() -> None:
    tokenizer = sentencepiece()
    start = tokenizer.encode("a")[1]
    assert tokenizer.encode("<s>a</s>a", add_special_tokens=False) == [1, start, 2, start]


def test_sentencepiece_without_prefix_space() -> None:
    """Gemma: no dummy space, and runs of spaces are tokens spelled with real spaces."""
    tokenizer = sentencepiece([("  ", USER_DEFINED), ("\n\n", USER_DEFINED)], add_space_prefix=False)
    assert tokenizer.token(tokenizer.encode("a")[1]) == "a"
    ids = tokenizer.encode("a  b\n\na", add_special_tokens=False)
    assert [tokenizer.token(token_id) for token_id in ids] == ["a", "  ", "b", "\n\n", "a"]
    assert tokenizer.decode(ids) == "a  b\n\na"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


@given(text=st.text("ab ", max_size=12))
def test_sentencepiece_against_transformers(text: str) -> None:
    """Phi-3's builder there has the same dummy prefix."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    scores = [WORDS.get(token, 0.0) for token in tokens]
    described = {"tokenizer_type": "llama", "tokens": tokens, "scores": scores}
    backend, _ = convert_gguf_tokenizer("phi3", described)
    tokenizer = _CACHED[0] if _CACHED else sentencepiece()
    assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids


def test_phi3_control_tokens_swallow_white_space() -> None:
    """Its template writes a newline after each, which the published tokenizer does not see."""
    keys = {"general.architecture": "phi3"}
    tokenizer = sentencepiece([("<|end|>", CONTROL)], **keys)
    end = tokenizer.encode("<|end|>")[-1]
    assert tokenizer.encode("<|end|>\n", add_special_tokens=False) == [end]
    assert tokenizer.encode("<s>\n", add_special_tokens=False)[0] == 1
    assert len(tokenizer.encode("<s>\n", add_special_tokens=False)) > 1


def test_chat_templates_by_name() -> None:
    plain, tool = "p{{ messages[0].content }}", "t{{ messages[0].content }}"
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": tool}
    tokenizer = byte_level([], **{"tokenizer.chat_template": plain}, **named)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.decode(render(tokenizer, messages)) == "px"
    assert tokenizer.decode(render(tokenizer, messages, tools=[])) == "tx"
    assert tokenizer.decode(render(tokenizer, messages, template="tool_use")) == "tx"
    assert byte_level([]).hf.chat_template is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "bert", "tokens": ["a"]}, r"tokenizer\.ggml\.model is 'bert'; supported are 'gpt2'"),
        ({"model": "gpt2", "pre": "newest", "tokens": ["a"]}, r"tokenizer\.ggml\.pre is 'newest'"),
        ({"model": "gpt2"}, r"no tokens in its metadata"),
        ({"model": "gpt2", "tokens": ["a", "b"], "token_type": [1]}, r"token_type has 1 entries for 2 tokens"),
        ({"model": "llama", "tokens": ["a", "b", "c"]}, r"needs tokenizer\.ggml\.scores or tokenizer\.ggml\.merges"),
        ({"model": "gpt2", "tokens": ["a"], "bos_token_id": 7}, r"bos_token_id is 7, but there are 1 tokens"),
        ({"model": "gpt2", "tokens": ["a"], "merges": ["a z"]}, r"cannot be built: .*z"),
    ],
)
def test_bad_metadata_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^model\.gguf: .*" + message):
        load(**keys)


def test_no_tokenizer_at_all() -> None:
    with pytest.raises(MissingTokenizerError, match=r"model\.gguf: no tokenizer"):
        load(**{"general.architecture": "llama"})
