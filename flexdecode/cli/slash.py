"""The commands of a chat, which begin with a slash: what each is called, how it is explained, what it does.

Knows the conversation and lines of text, no terminal and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from flexdecode.cli.conversation import SETTINGS, Conversation


class After(Enum):
    """What the chat does when a command is done."""

    WAIT = "wait"  # for the next line
    ANSWER = "answer"  # the conversation's last question
    LEAVE = "leave"


Say = Callable[[str], None]


@dataclass(frozen=True)
class Command:
    usage: str
    help: str
    run: Callable[[Conversation, str, Say], After]


def run(line: str, conversation: Conversation, say: Say) -> After:
    """Does what `line` ("/name argument") asks. Raises ValueError for an unknown name or a wrong argument."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise ValueError(f"there is no command /{name}; /help lists them, and // begins a message with a slash")
    return command.run(conversation, argument.strip(), say)


def _help(conversation: Conversation, argument: str, say: Say) -> After:
    width = max(len(command.usage) for command in COMMANDS.values())
    for command in COMMANDS.values():
        say(f"{command.usage:<{width}}  {command.help}")
    say(f'settings: {", ".join(SETTINGS)}; the value "default" gives one back to the model')
    say('""" begins a message of several lines and """ ends it; Alt-Enter starts a new line')
    say("Ctrl-C stops an answer; Ctrl-C at an empty prompt, or Ctrl-D, leaves")
    return After.WAIT


def _clear(conversation: Conversation, argument: str, say: Say) -> After:
    conversation.messages.clear()
    say("the conversation is empty; system text and settings stay")
    return After.WAIT


def _system(conversation: Conversation, argument: str, say: Say) -> After:
    conversation.system = argument or None
    say("system text set" if argument else "system text removed")
    return After.WAIT


def _set(conversation: Conversation, argument: str, say: Say) -> After:
    key, _, value = argument.partition(" ")
    if not key or not value.strip():
        raise ValueError(
            f"/set needs a setting and a value, such as /set temperature 0; settings: {', '.join(SETTINGS)}"
        )
    conversation.set(key, value.strip())
    return After.WAIT


def _show(conversation: Conversation, argument: str, say: Say) -> After:
    for line in conversation.show():
        say(line)
    return After.WAIT


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise ValueError(f"{command} needs a file name")
    return Path(argument).expanduser()


def _save(conversation: Conversation, argument: str, say: Say) -> After:
    path = _path(argument, "/save")
    conversation.save(path)
    say(f"{len(conversation.messages)} messages written to {path}")
    return After.WAIT


def _load(conversation: Conversation, argument: str, say: Say) -> After:
    path = _path(argument, "/load")
    conversation.load(path)
    say(f"{len(conversation.messages)} messages read from {path}")
    # A conversation saved while a question waited goes on with its answer.
    waiting = bool(conversation.messages) and conversation.messages[-1]["role"] == "user"
    return After.ANSWER if waiting else After.WAIT


def _retry(conversation: Conversation, argument: str, say: Say) -> After:
    conversation.retry()
    return After.ANSWER


def _bye(conversation: Conversation, argument: str, say: Say) -> After:
    return After.LEAVE


COMMANDS: Mapping[str, Command] = {
    "help": Command("/help", "this list", _help),
    "clear": Command("/clear", "forget the messages", _clear),
    "system": Command("/system TEXT", "set the system text; without TEXT, remove it", _system),
    "set": Command("/set KEY VALUE", "change a setting of the answers", _set),
    "show": Command("/show", "show system text and settings", _show),
    "save": Command("/save FILE", "write the conversation to a file", _save),
    "load": Command("/load FILE", "take up a saved conversation", _load),
    "retry": Command("/retry", "answer the last question anew", _retry),
    "bye": Command("/bye", "leave", _bye),
}
