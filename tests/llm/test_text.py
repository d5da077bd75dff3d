"""Text through LLM: multibyte characters, invalid bytes, chat templates, no tokenizer at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode import SamplingParams
from tests.checkpoints import byte_tokenizer, puppet, tiny
from tests.llm.asking import GREEDY, both_ways, distinct, joined, load
from tests.oracles import ids

TEMPLATE = "{% for m in messages %}{{ '<bos>' if loop.first else '' }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("budget", [4, 5, 6, 7, 8, 20])
def test_multibyte_characters_in_a_stream(budget: int, tmp_path: Path) -> None:
    """B86: U+FFFD may appear once, at a real cut, and the same in both modes."""
    puppet(tmp_path, distinct("ab €😀z"))
    answer = both_ways(load(tmp_path), "<bos>", SamplingParams(max_tokens=budget, **GREEDY))
    assert answer.text.count("\ufffd") <= 1
    assert "ab €😀z".startswith(answer.text.rstrip("\ufffd"))


def test_invalid_utf8_never_raises(tmp_path: Path) -> None:
    """B87."""
    chain = [0xFF, 0x41, 0xC3, 0x20, 0x42, 0xE2, 0x82, 0x43]
    puppet(tmp_path, chain)
    llm = load(tmp_path)
    assert llm.tokenizer is not None
    assert both_ways(llm, "<bos>", SamplingParams(max_tokens=20, **GREEDY)).text == bytes(chain).decode(
        errors="replace"
    )


def test_chat_has_one_bos_and_equals_generate(tmp_path: Path) -> None:
    """B102."""
    puppet(tmp_path, "xyz", prompt_last=ord("d"))
    byte_tokenizer(tmp_path, TEMPLATE)
    llm = load(tmp_path)
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]
    answer = llm.chat(messages, SamplingParams(max_tokens=9, **GREEDY))
    assert (answer.text, answer.prompt_tokens) == ("xyz", 5)
    assert joined(list(llm.stream_chat(messages, SamplingParams(max_tokens=9, **GREEDY)))) == "xyz"


def test_chat_without_a_template_says_so(tmp_path: Path) -> None:
    """B103."""
    puppet(tmp_path, "xyz")
    llm = load(tmp_path)
    with pytest.raises(ValueError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert llm.generate("<bos>", SamplingParams(max_tokens=9, **GREEDY)).text == "xyz"


def test_a_checkpoint_without_a_tokenizer_takes_tokendistinct(tmp_path: Path) -> None:
    tiny(tmp_path, tokenizer=False)
    llm = load(tmp_path)
    answer = llm.generate(ids(5), SamplingParams(max_tokens=4, ignore_eos=True, **GREEDY))
    assert (answer.text, len(answer.token_ids)) == ("", 4)
    for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(ValueError, match="tokenizer"):
            call()
