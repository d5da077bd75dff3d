"""Conversations, through LLM: a turn computes what is new in it, and one that is too long loses its oldest turns."""

from __future__ import annotations

import warnings
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from flexdecode import LLM, SamplingParams
from flexdecode.config import FlexdecodeWarning
from flexdecode.text.chat_template import render
from tests.checkpoints import tiny
from tests.llm.asking import joined, load

PAGE = 64
PLAIN = (
    "<bos>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As templates of reasoning models do: of earlier answers only what follows the thoughts is rendered.
STRIPS_THOUGHTS = PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")
STRIPS_SPACES = PLAIN.replace("m['content']", "m['content'] | trim")
SYSTEM = {"role": "system", "content": "You answer in riddles."}


def params(new: int = 40) -> SamplingParams:
    # A random model says any byte; text that is no UTF-8 would not be the same tokens when it is read again.
    banned = {i: -100.0 for i in range(264) if not 97 <= i <= 122}
    return SamplingParams(max_tokens=new, temperature=0.0, logit_bias=banned)


def ask(number: int, length: int = 30) -> dict[str, str]:
    return {"role": "user", "content": f"question {number:04} ".ljust(length, "?")}


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def computed(llm: LLM, talk: list[dict[str, str]], **options: Any) -> tuple[str, int, int]:
    """The answer, and how many of its prompt's tokens were computed and were found."""
    before = llm.engine.computed_tokens
    answer = llm.chat(talk, params(), **options)
    new = llm.engine.computed_tokens - before - (len(answer.token_ids) - 1)
    assert new + answer.stats.reused_tokens == answer.stats.prompt_tokens
    return answer.text, new, answer.stats.reused_tokens


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_turn_computes_what_is_new_in_it(family: str, tmp_path: Path) -> None:
    tiny(tmp_path, family, chat_template=PLAIN, max_position_embeddings=2048)
    llm, fresh = load(tmp_path), load(tmp_path, prefix_reuse=False)
    talk, known = [SYSTEM], 0
    for number in range(6):
        talk.append(ask(number))
        text, new, reused = computed(llm, talk)
        assert reused == known // PAGE * PAGE, "all that was known, in whole pages"
        assert new < PAGE + 40 + len("[user]<eot>[assistant]"), "whatever was said before"
        assert text == fresh.chat(talk, params()).text
        # The last token of an answer is never computed.
        known = len(render(llm.tokenizer, talk)) + 40 - 1  # type: ignore[arg-type]
        talk.append({"role": "assistant", "content": text})


@pytest.mark.parametrize("template", [STRIPS_THOUGHTS, STRIPS_SPACES])
def test_where_a_template_writes_earlier_turns_anew_their_beginning_is_found(template: str, tmp_path: Path) -> None:
    """Tokens are compared: from where the new text differs nothing old is used, and the answer is the one of a model
    that has seen nothing before."""
    tiny(tmp_path, chat_template=template, max_position_embeddings=2048)
    llm, fresh = load(tmp_path), load(tmp_path, prefix_reuse=False)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    talk: list[dict[str, str]] = [SYSTEM, ask(0, 200)]
    computed(llm, talk)
    seen = render(tokenizer, talk)
    # An answer as the model could have given it, put into the cache as its prompt goes on.
    answer = " \n<think>a long thought, much longer than a page of tokens is, and then some more</think>Twelve. "
    seen += tokenizer.encode(answer)
    llm.generate(seen, SamplingParams(max_tokens=1, temperature=0.0))
    talk += [{"role": "assistant", "content": answer}, ask(1)]
    again = render(tokenizer, talk)
    found = common(seen, again)
    assert PAGE < found < len(seen) - PAGE, "the answer is not what it was"
    text, _, reused = computed(llm, talk)
    assert reused == found // PAGE * PAGE
    assert text == fresh.chat(talk, params()).text


def test_a_conversation_that_is_too_long_is_an_error_by_default(tmp_path: Path) -> None:
    tiny(tmp_path, chat_template=PLAIN)
    llm = load(tmp_path, max_context=160)
    talk = [SYSTEM, ask(0), {"role": "assistant", "content": "x" * 30}, ask(1)]
    tokens = len(render(llm.tokenizer, talk))  # type: ignore[arg-type]
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(ValueError, match=rf"has {tokens} tokens.*=40, .* ends at 160; .*overflow='sinks'"):
            call(talk, params())
    with pytest.raises(ValueError, match="ends at 160; ask for at most"):
        llm.chat([ask(0, 100)], params(100))  # one turn: there is nothing to leave out
    with pytest.raises(ValueError, match="overflow 'drop' is not known"):
        llm.chat(talk, params(), overflow="drop")


def test_a_conversation_goes_on_past_the_context(tmp_path: Path) -> None:
    """Its answers are those to the shortened text; system text is in every prompt; between two cuts a turn computes
    only what is new; every cut is told of once."""
    tiny(tmp_path, chat_template=PLAIN, max_position_embeddings=512)
    llm, fresh = load(tmp_path), load(tmp_path, prefix_reuse=False)
    talk, total, whole, told = [SYSTEM], 0, 0, set()
    for number in range(30):
        talk.append(ask(number))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            text, new, _ = computed(llm, talk, overflow="sinks")
        told |= {str(w.message) for w in caught if w.category is FlexdecodeWarning}
        total += new
        tokens = len(render(llm.tokenizer, talk))  # type: ignore[arg-type]
        whole += min(tokens, 512)
        dropped = next(n for n in range(0, len(talk), 2) if shortened(fresh, talk, n) == text)
        assert (dropped > 0) == (tokens + 40 > 512)
        talk.append({"role": "assistant", "content": text})
    assert tokens > 4 * 512
    assert total < whole / 2, "most turns find what was said before"
    assert 4 < len(told) < 20
    assert all("longer than the context of 512 tokens: its oldest" in text for text in told)


def shortened(fresh: LLM, talk: list[dict[str, str]], dropped: int) -> str | None:
    """What a model says that never saw the `dropped` oldest messages; None where the rest is too long."""
    rest = [talk[0], *talk[1 + dropped :]]
    if len(render(fresh.tokenizer, rest)) + 40 > 512:  # type: ignore[arg-type]
        return None
    return fresh.chat(rest, params()).text


def test_a_stream_is_shortened_alike(tmp_path: Path) -> None:
    tiny(tmp_path, chat_template=PLAIN)
    llm = load(tmp_path)
    talk = [SYSTEM]
    for number in range(8):
        talk += [ask(number), {"role": "assistant", "content": "x" * 30}]
    talk.append(ask(9))
    with pytest.warns(FlexdecodeWarning, match=r"context of 256 tokens: its oldest \d+ messages"):
        text = llm.chat(talk, params(), overflow="sinks").text
    with pytest.warns(FlexdecodeWarning, match="no longer read"):
        assert joined(list(llm.stream_chat(talk, params(), overflow="sinks"))) == text
