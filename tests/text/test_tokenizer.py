"""Tokenizers from Hugging Face directories: what tokenizer.json says, however sparse or odd the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from flexdecode.text.tokenizer import MissingTokenizerError, Tokenizer
from tests.checkpoints import BOS, EOS, PAD, byte_tokenizer
from tests.text.samples import DECODERS, SPACE, digits_backend, load, metaspace, source, write_directory

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text", "mistral", "nobody_knows"])
@pytest.mark.parametrize(
    "config",
    [
        None,
        NAMES,
        NAMES | {"tokenizer_class": "PreTrainedTokenizerFast"},
        NAMES | {"tokenizer_class": "GPT2Tokenizer"},
        NAMES | {"tokenizer_class": "Qwen2Tokenizer"},
        NAMES | {"tokenizer_class": "NoSuchTokenizer", "auto_map": {"AutoTokenizer": ["no.Slow", "no.Fast"]}},
    ],
)
def test_tokenizer_json_is_taken_as_it_stands(tmp_path: Path, config: dict[str, Any] | None, model_type: str) -> None:
    """SmolLM2 names GPT2Tokenizer, which transformers 5 rebuilds with GPT-2's cuts: "  1" becomes other tokens. Without
    a class, a gemma3 directory is refused there; a qwen2 one is rebuilt whatever it names."""
    backend = digits_backend()
    tokenizer = load(write_directory(tmp_path, backend, config, model_type))
    for text in ("  12a", "", "a<s>b", "é 3"):
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.eos_token_ids == (() if config is None else (258,))
    assert tokenizer.bos_token_id == (None if config is None else 257)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(max_size=20))
def test_encode_is_the_tokenizers_own_call(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.encode(text) == byte_level.hf(text).input_ids
    assert byte_level.decode(byte_level.encode(text)) == text


def test_as_auto_tokenizer_reads_an_ordinary_directory(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer, hf = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("ab €<eos>") == hf("ab €<eos>").input_ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (EOS,))
    assert tokenizer.special_ids == {256, 257, 258, 259}
    assert tokenizer.vocab_size == 260


def test_a_prompt_that_already_has_its_bos(tmp_path: Path) -> None:
    """B102, completions: the tokenizer's own answer, even where that is two."""
    backend = byte_tokenizer(tmp_path).backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert tokenizer.adds_bos
    assert tokenizer.encode("a") == [BOS, 97]
    assert tokenizer.encode("<bos>a") == [BOS, BOS, 97] == tokenizer.hf("<bos>a").input_ids
    assert tokenizer.encode("<bos>a", add_special_tokens=False) == [BOS, 97]


def test_padding_and_truncation_in_the_file_do_not_reach_prompts(tmp_path: Path) -> None:
    backend = byte_tokenizer(tmp_path).backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(pad_id=PAD, pad_token="<pad>", length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode("abcdef") == list(b"abcdef")
    assert load(tmp_path).encode("a") == [97]


@pytest.mark.parametrize("text", ["\ud83d", "a\udcffb", "ok\ude00"])
def test_lone_surrogates_are_refused(byte_level: Tokenizer, text: str) -> None:
    """B95: they reach a server as JSON escapes, and no encoding has them."""
    with pytest.raises(ValueError, match="half of a surrogate pair") as caught:
        byte_level.encode(text)
    str(caught.value).encode()


@pytest.mark.parametrize("text", [None, 5, b"a", ["a"]])
def test_only_text_is_encoded(byte_level: Tokenizer, text: Any) -> None:
    with pytest.raises(ValueError, match="must be text or token ids, not"):
        byte_level.encode(text)


def test_nul_is_a_character_like_any_other(byte_level: Tokenizer) -> None:
    assert byte_level.encode("a\0b") == [97, 0, 98]


def test_ids_beyond_the_tokenizer(byte_level: Tokenizer) -> None:
    """B17: the model's vocabulary is padded."""
    for token_id in (260, 263, 2**31, 2**63, -1):
        assert byte_level.token(token_id) is None
        assert byte_level.token_bytes(token_id) == b""
        assert byte_level.decode([65, token_id, 66]) == "AB"


@pytest.mark.parametrize("name", list(DECODERS))
def test_bytes_of_tokens_join_to_the_text(name: str) -> None:
    tokenizer = metaspace(name)
    ids = [tokenizer.hf.convert_tokens_to_ids(token) for token in ("c", f"{SPACE}a", "é", "<tool>", f"{SPACE}{SPACE}")]
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
    assert joined.lstrip(" ") == tokenizer.decode(ids).lstrip(" ") or name == "suffix"


def test_bytes_of_byte_level_tokens(byte_level: Tokenizer) -> None:
    assert b"".join(map(byte_level.token_bytes, range(256))) == bytes(range(256))
    assert byte_level.token_bytes(EOS) == b"<eos>"


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(MissingTokenizerError, match=r"no tokenizer\.json") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(MissingTokenizerError, match="random"):
        Tokenizer.load(source(Path("random:llama"), "random"))


BROKEN = [("tokenizer.json", text) for text in ("", "{", "[]", '{"a": 1}')]


@pytest.mark.parametrize(("name", "text"), [*BROKEN, ("tokenizer_config.json", "{"), ("tokenizer_config.json", "[]")])
def test_a_broken_file_is_one_line(tmp_path: Path, name: str, text: str) -> None:
    write_directory(tmp_path, digits_backend(), NAMES)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="the tokenizer cannot be read") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_vocab_and_merges_without_tokenizer_json(tmp_path: Path) -> None:
    digits_backend().model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("  ab €")) == "  ab €"
