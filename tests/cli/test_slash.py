"""The commands of a chat, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode.cli.conversation import Conversation
from flexdecode.cli.slash import COMMANDS, After, run
from flexdecode.generation.params import SamplingParams


@pytest.fixture
def talk() -> Conversation:
    made = Conversation(SamplingParams())
    made.ask("question")
    made.answered("answer")
    return made


def test_help_names_every_command(talk: Conversation) -> None:
    said: list[str] = []
    assert run("/help", talk, said.append) is After.WAIT
    assert all(any(line.startswith(command.usage) for line in said) for command in COMMANDS.values())


def test_clear_forgets_messages_only(talk: Conversation) -> None:
    talk.system = "s"
    assert run("/clear", talk, print) is After.WAIT
    assert (talk.messages, talk.system) == ([], "s")


def test_system_sets_and_removes(talk: Conversation) -> None:
    run("/system  two words ", talk, print)
    assert talk.system == "two words"
    run("/system", talk, print)
    assert talk.system is None


def test_retry_and_bye_say_what_comes_next(talk: Conversation) -> None:
    assert run("/retry", talk, print) is After.ANSWER
    assert [message["content"] for message in talk.messages] == ["question"]
    assert run("/bye", talk, print) is After.LEAVE


def test_load_answers_a_question_that_waits(talk: Conversation, tmp_path: Path) -> None:
    talk.ask("again")
    run(f"/save {tmp_path / 'a b.json'}", talk, print)
    other = Conversation(SamplingParams())
    assert run(f"/load {tmp_path / 'a b.json'}", other, print) is After.ANSWER
    assert len(other.messages) == 3


def test_show_tells_settings(talk: Conversation) -> None:
    said: list[str] = []
    run("/set top-k 5", talk, said.append)
    run("/show", talk, said.append)
    assert "top_k: 5" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/Help", "no command /Help"),
        ("/", "no command /"),
        ("/set temperature", "/set needs"),
        ("/save", "/save needs"),
    ],
)
def test_mistakes_name_the_command(line: str, words: str, talk: Conversation) -> None:
    with pytest.raises(ValueError, match=words):
        run(line, talk, print)
