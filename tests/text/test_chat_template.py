"""Chat prompts: one BOS, a clear word when there is no template or it refuses, text parts joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from flexdecode.text.chat_template import render
from flexdecode.text.tokenizer import Tokenizer
from tests.checkpoints import BOS, byte_tokenizer
from tests.text.samples import load

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
HELLO = [{"role": "user", "content": "x"}]


def tokenizer_with(path: Path, template: Any = None, adds_bos: bool = False) -> Tokenizer:
    hf = byte_tokenizer(path, template)
    if adds_bos:
        hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", BOS + 1)]
        )
        hf.backend_tokenizer.save(str(path / "tokenizer.json"))
    return load(path)


def text_of(tokenizer: Tokenizer, messages: Any, **kwargs: Any) -> str:
    return tokenizer.decode(render(tokenizer, messages, **kwargs), skip_special_tokens=False)


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_exactly_one_bos(tmp_path: Path, written: bool, added: bool) -> None:
    """B102: the template wrote one and the tokenizer added another; or, not to have two, there was none."""
    tokenizer = tokenizer_with(tmp_path, ("{{ bos_token }}" if written else "") + PLAIN, added)
    ids = render(tokenizer, HELLO)
    expected = list(b"[user]x[a]")
    assert ids == ([BOS] if written or added else []) + expected, "and no <eos> of the tokenizer's at the end"


def test_as_transformers_renders_it(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "{{ bos_token }}" + PLAIN)
    messages = [{"role": "system", "content": "s<eos>"}, {"role": "user", "content": "€ 😀"}]
    for prompt in (True, False):
        expected = tokenizer.hf.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert render(tokenizer, messages, add_generation_prompt=prompt) == expected


def test_no_template(tmp_path: Path) -> None:
    """B103: the model starts, plain text works, and a chat is told what is missing."""
    tokenizer = tokenizer_with(tmp_path)
    assert tokenizer.encode("x") == [120]
    with pytest.raises(ValueError, match="has no chat template") as caught:
        render(tokenizer, HELLO)
    assert str(tmp_path) in str(caught.value)
    assert text_of(tokenizer, HELLO, template=PLAIN) == "[user]x[a]"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "list", "named files"])
def test_template_wherever_it_lives(tmp_path: Path, place: str) -> None:
    """B103: only tokenizer_config.json was read."""
    byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    tool = PLAIN.replace("[a]", "[t]")
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(PLAIN)
    elif place == "named files":
        (tmp_path / "chat_template.jinja").write_text(PLAIN)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(tool)
    elif place == "list":
        config["chat_template"] = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": tool}]
    else:
        config["chat_template"] = PLAIN
    path.write_text(json.dumps(config))
    tokenizer = load(tmp_path)
    assert text_of(tokenizer, HELLO) == "[user]x[a]"
    if place in ("list", "named files"):
        assert text_of(tokenizer, HELLO, tools=[]) == "[user]x[t]"
        assert text_of(tokenizer, HELLO, template="tool_use") == "[user]x[t]"
    assert text_of(tokenizer, HELLO, template="{{ messages[0].content }}") == "x"


def test_the_jinja_file_comes_before_the_config(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, "from the config")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert text_of(load(tmp_path), HELLO) == "from the file"


def test_named_templates_without_a_default(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": [{"name": "rag", "template": PLAIN}]}))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="rag"):
        render(load(tmp_path), HELLO)
    assert text_of(load(tmp_path), HELLO, template="rag") == "[user]x[a]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("a\n{% if %}", "is broken at line 2"),
        ("{% for m in messages %}", "is broken at line 1"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages"),
        ("{{ messages[9].content.x }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "cannot render these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_a_template_that_fails_is_the_users_to_hear(tmp_path: Path, template: str, message: str) -> None:
    """B103: loading never compiles the template, and its own words come back."""
    tokenizer = tokenizer_with(tmp_path, template)
    with pytest.raises(ValueError, match=message):
        render(tokenizer, HELLO)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("x", "x"),
        ([{"type": "text", "text": "x"}], "x"),
        ([{"type": "text", "text": "x"}, {"type": "text", "text": " y"}], "x y"),
        (["x", "y"], "xy"),
        ([], ""),
        ("", ""),
    ],
)
def test_text_parts_are_joined(tmp_path: Path, content: Any, expected: str) -> None:
    """B101: the same prompt as the string."""
    assert text_of(tokenizer_with(tmp_path, PLAIN), [{"role": "user", "content": content}]) == f"[user]{expected}[a]"


def test_null_content_beside_tool_calls_and_other_keys(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}{{ m.name }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    tokenizer = tokenizer_with(tmp_path, template)
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "d", "name": "n"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [1]},
        {"role": "tool", "content": "t"},
    ]
    assert text_of(tokenizer, messages) == "[developern]d[assistant][assistant][1][tool]t"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are no messages"),
        ("hello", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (None, "must be a list"),
        (["hello"], "message 0 must be an object"),
        ([{"content": "x"}], "message 0 needs a role"),
        ([*HELLO, {"role": "", "content": "x"}], "message 1 needs a role"),
        ([{"role": "user"}], "message 0 .* has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 5}], "content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], "type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a string under 'text'"),
        ([{"role": "user", "content": [5]}], "type 'int'"),
        ([{"role": "user", "content": "\ud83d"}], "surrogate"),
    ],
)
def test_bad_messages_are_named(tmp_path: Path, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(tokenizer_with(tmp_path, PLAIN), messages)


def test_variables_reach_the_template_and_options_do_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "{{ 'on' if enable_thinking else 'off' }}")
    assert text_of(tokenizer, HELLO, enable_thinking=True) == "on"
    for name in ("tokenize", "truncation", "chat_template", "return_dict"):
        with pytest.raises(ValueError, match=f"'{name}' is not a variable"):
            render(tokenizer, HELLO, **{name: True})


def test_the_last_message_can_be_continued(tmp_path: Path) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "so"}]
    tokenizer = tokenizer_with(tmp_path, PLAIN + "END")
    text = text_of(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "[user]x[assistant]so"
    with pytest.raises(ValueError, match="not compatible"):
        render(tokenizer, messages, continue_final_message=True)


def test_messages_are_left_as_they_were(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    render(tokenizer_with(tmp_path, PLAIN), messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
