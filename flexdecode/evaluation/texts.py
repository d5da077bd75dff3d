"""Texts to evaluate on: a file's documents, or one that every Python carries. Knows tokenizers, no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pydoc_data.topics import topics

from flexdecode.text.tokenizer import Tokenizer

BUILT_IN = "pydoc_data.topics"


def built_in_text() -> str:
    """The help topics of this Python (pydoc_data.topics), in alphabetical order: about 110,000 tokens of English with
    some code. They differ a little between Python releases, so figures compare only within one."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def documents(text: str, name: str) -> list[str]:
    """The documents of a text called `name`: the "text" of each line where the name ends in .jsonl, else the whole.

    Raises ValueError naming the line that is no such object, and for a text that is empty.
    """
    found = _lines(text, name) if name.endswith(".jsonl") else [text]
    if not any(found):
        raise ValueError(f"{name} holds no text")
    return found


def _lines(text: str, name: str) -> list[str]:
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name}, line {number} is not JSON: {error}") from None
        content = value.get("text") if isinstance(value, dict) else None
        if not isinstance(content, str):
            raise ValueError(f'{name}, line {number} is no object with a string under "text"')
        found.append(content)
    return found


def fingerprint(texts: Sequence[str]) -> str:
    """SHA-256 over the documents, so that rows of results tell whether they saw the same text."""
    digest = sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def encode(tokenizer: Tokenizer, texts: Sequence[str], limit: int | None = None) -> list[list[int]]:
    """Token ids of each document without special tokens, at most `limit` of them together."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 token, got {limit}")
    found: list[list[int]] = []
    left = limit
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)[:left]
        found.append(ids)
        if left is not None:
            left -= len(ids)
            if not left:
                break
    return found


def bos_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What every window begins with: a BOS where the tokenizer puts one before a text, else nothing."""
    return (tokenizer.bos_token_id,) if tokenizer.adds_bos and tokenizer.bos_token_id is not None else ()
