"""A conversation's messages, settings and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexdecode.cli.conversation import SETTINGS, Conversation
from flexdecode.generation.params import SamplingParams


@pytest.fixture
def talk() -> Conversation:
    return Conversation(SamplingParams(), "be brief")


def test_request_begins_with_the_system_text(talk: Conversation) -> None:
    talk.ask("a")
    assert talk.request() == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    talk.system = None
    assert talk.request() == [{"role": "user", "content": "a"}]


def test_take_back_forgets_only_an_unanswered_question(talk: Conversation) -> None:
    talk.ask("a")
    talk.answered("b")
    talk.take_back()
    assert len(talk.messages) == 2
    talk.ask("c")
    talk.take_back()
    assert [message["content"] for message in talk.messages] == ["a", "b"]


def test_retry_needs_something_to_retry(talk: Conversation) -> None:
    with pytest.raises(ValueError, match="no answer"):
        talk.retry()


@pytest.mark.parametrize(
    ("key", "text", "field", "value"),
    [
        ("temperature", "0.5", "temperature", 0.5),
        ("temp", "0", "temperature", 0.0),
        ("--top-k", "3", "top_k", 3),
        ("n", "12", "max_tokens", 12),
        ("seed", "0", "seed", 0),
        ("ignore-eos", "on", "ignore_eos", True),
        ("stop", "END", "stop", ("END",)),
        ("stop", '"\\n\\n"', "stop", ("\n\n",)),
        ("presence_penalty", "-1", "presence_penalty", -1.0),
    ],
)
def test_set(key: str, text: str, field: str, value: object, talk: Conversation) -> None:
    talk.set(key, text)
    assert getattr(talk.params, field) == value
    assert any(line.startswith(f"{field}: ") for line in talk.show())
    talk.set(key, "default")
    assert talk.params == SamplingParams()
    assert talk.show() == ["system: be brief", "messages: 0"]


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("warmth", "1", "no setting 'warmth'.*temperature"),
        ("temperature", "hot", "temperature is a number or default, not 'hot'"),
        ("seed", "1.5", "seed is a whole number"),
        ("top_p", "7", "top_p"),
        ("temperature", "nan", "temperature"),
        ("ignore_eos", "maybe", "true or false"),
        ("stop", '"open', "stop is a text"),
        ("stop", '["a"]', None),
    ],
)
def test_a_wrong_setting_changes_nothing(key: str, text: str, words: str | None, talk: Conversation) -> None:
    if words is None:
        talk.set(key, text)  # not a JSON string, so it is the text itself
        assert talk.params.stop == (text,)
        return
    with pytest.raises(ValueError, match=words):
        talk.set(key, text)
    assert talk.params == SamplingParams()


def test_every_setting_is_a_field_of_the_parameters() -> None:
    fields = set(SamplingParams.__dataclass_fields__)
    assert set(SETTINGS) <= fields


def test_save_and_load_give_back_the_same_conversation(talk: Conversation, tmp_path: Path) -> None:
    talk.ask("naïve \ufffd 🙂")
    talk.answered("b\nc")
    talk.save(tmp_path / "talk.json")
    talk.save(tmp_path / "talk.json")  # over its own kind
    other = Conversation(SamplingParams())
    other.load(tmp_path / "talk.json")
    assert (other.system, other.messages) == (talk.system, talk.messages)


@pytest.mark.parametrize("data", [b"precious notes", b"{}", b'{"messages": 3}', b"\xff\xfe"])
def test_save_never_overwrites_something_else(data: bytes, talk: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="notes"):
        talk.save(path)
    assert path.read_bytes() == data


def test_save_into_a_missing_folder_names_it(talk: Conversation, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent"):
        talk.save(tmp_path / "absent" / "talk.json")


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"system": 3, "messages": []},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": ["a"]},
    ],
)
def test_load_refuses_what_is_no_conversation_and_keeps_the_old_one(
    data: object, talk: Conversation, tmp_path: Path
) -> None:
    talk.ask("kept")
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"talk\.json is not a saved conversation"):
        talk.load(path)
    assert talk.messages == [{"role": "user", "content": "kept"}]
