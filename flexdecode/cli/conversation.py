"""A conversation with a model as data: its messages, its system text, and the settings of the next answer.

Knows no terminal and no model; everything here can be said in JSON. Errors are ValueErrors with one clear line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexdecode.cli.text import decode

if TYPE_CHECKING:
    from flexdecode.generation.params import SamplingParams

ROLES = ("user", "assistant")


def _flag(text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError(text)


def _quoted(text: str) -> tuple[str, ...]:
    """A stop string as typed, or as a JSON string where it holds a newline or a space at its edge."""
    value = json.loads(text) if text.startswith('"') else text
    if not isinstance(value, str):
        raise ValueError(text)
    return (value,)


# What /set can change: field of SamplingParams -> what its value must be, and how it is read.
SETTINGS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "max_tokens": ("a whole number", int),
    "temperature": ("a number", float),
    "top_k": ("a whole number", int),
    "top_p": ("a number", float),
    "min_p": ("a number", float),
    "repetition_penalty": ("a number", float),
    "presence_penalty": ("a number", float),
    "frequency_penalty": ("a number", float),
    "seed": ("a whole number", int),
    "stop": ('a text, "in JSON quotes" where it holds a newline', _quoted),
    "ignore_eos": ("true or false", _flag),
}
ALIASES = {"temp": "temperature", "n": "max_tokens"}


@dataclass
class Conversation:
    """`messages` alternate user and assistant; the last one is the user's while its answer is awaited."""

    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def request(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return head + [dict(message) for message in self.messages]

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forgets a question that got no answer."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def retry(self) -> None:
        """Forgets the last answer, so that its question waits again."""
        if not self.messages:
            raise ValueError("there is no answer to retry yet")
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()

    def set(self, key: str, text: str) -> None:
        """One setting from what was typed; `default` undoes it. SamplingParams judges the value."""
        name = key.lstrip("-").replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in SETTINGS:
            raise ValueError(f"there is no setting {key!r}; the settings are {', '.join(SETTINGS)}")
        wanted, read = SETTINGS[name]
        if text == "default":
            value: Any = next(entry.default for entry in dataclasses.fields(self.params) if entry.name == name)
        else:
            try:
                value = read(text)
            except ValueError:
                raise ValueError(f"{name} is {wanted} or default, not {text!r}") from None
        self.params = dataclasses.replace(self.params, **{name: value})

    def show(self) -> list[str]:
        """The state in lines. Settings that were never made, or were undone, are left out."""
        lines = [f"system: {self.system if self.system is not None else '(none)'}", f"messages: {len(self.messages)}"]
        for entry in dataclasses.fields(self.params):
            value = getattr(self.params, entry.name)
            if entry.name in SETTINGS and value != entry.default:
                lines.append(f"{entry.name}: {json.dumps(value[0]) if isinstance(value, tuple) else value}")
        return lines

    def save(self, path: Path) -> None:
        """Writes system text and messages as JSON. A file that is not a saved conversation is never overwritten."""
        if path.exists():
            try:
                _read(path)
            except ValueError as error:
                raise ValueError(f"not written, since something else is there: {error}") from None
        data = {"system": self.system, "messages": self.messages}
        try:
            path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror or error}") from None

    def load(self, path: Path) -> None:
        """Takes up a saved conversation in place of this one; the settings stay."""
        self.system, self.messages = _read(path)


def _read(path: Path) -> tuple[str | None, list[dict[str, str]]]:
    try:
        data = json.loads(decode(path.read_bytes(), str(path)))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a saved conversation: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        raise ValueError(f"{path} is not a saved conversation: it has no list of messages")
    system = data.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"{path} is not a saved conversation: its system entry is no text")
    messages = []
    for index, message in enumerate(data["messages"]):
        wanted = ROLES[index % 2]
        good = isinstance(message, dict) and message.get("role") == wanted and isinstance(message.get("content"), str)
        if not good:
            raise ValueError(f"{path} is not a saved conversation: message {index} is not from {wanted} with a text")
        messages.append({"role": wanted, "content": message["content"]})
    return system, messages
