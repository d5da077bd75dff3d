"""From calibration text to token ids: documents cut into pieces, of which none is dropped but by a seeded choice.

A piece is a sequence of its own, so documents do not see each other. A long document becomes several pieces and a short
one a short piece; every token is in exactly one. Knows no model beyond its vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TextIO

Document = str | list[int]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Samples:
    """Pieces of token ids, in the order of the text. `documents` and `available` are how many were found, in documents
    and in pieces; `origin` is what they came from, for messages and reports."""

    pieces: tuple[tuple[int, ...], ...]
    documents: int
    available: int
    origin: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def lengths(self) -> list[int]:
        return [len(piece) for piece in self.pieces]

    def fingerprint(self) -> str:
        """Changes with the ids."""
        return hashlib.sha256(json.dumps(self.pieces).encode()).hexdigest()

    def __str__(self) -> str:
        chosen = "all" if len(self.pieces) == self.available else f"of {self.available:,}"
        return (
            f"{self.origin}: {self.tokens:,} tokens in {len(self.pieces):,} pieces ({chosen}) from {self.documents:,} "
            f"document{'s' if self.documents != 1 else ''}"
        )


def sample(
    documents: Iterable[Document],
    encode: Encode,
    vocab: int,
    *,
    samples: int,
    length: int,
    seed: int,
    origin: str,
    endless: bool = False,
) -> Samples:
    """At most `samples` pieces of at most `length` tokens, chosen from all, or of `endless` documents the first.

    Raises ValueError naming `origin` where there is no text, or an id is outside the vocabulary.
    """
    pieces: list[tuple[int, ...]] = []
    count = 0
    for document in documents:
        ids = document if isinstance(document, list) else encode(document) if document.strip() else []
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise ValueError(f"{origin}: token id {wrong} is outside the vocabulary of {vocab}")
        count += bool(ids)
        pieces += [tuple(ids[at : at + length]) for at in range(0, len(ids), length)]
        if endless and len(pieces) >= samples:
            break
    if not pieces:
        raise ValueError(f"{origin}: holds no text to calibrate on; give a file with some")
    chosen = sorted(random.Random(seed).sample(range(len(pieces)), min(samples, len(pieces))))
    return Samples(tuple(pieces[i] for i in chosen), count, len(pieces), origin)


def python_topics() -> Iterator[Document]:
    """The help topics that Python brings along: text that is there without a network."""
    for name in sorted(topics):
        yield topics[name]


def read_text(stream: TextIO) -> Iterator[Document]:
    """One document: all of it."""
    yield stream.read().replace("\r\n", "\n")


def read_jsonl(stream: TextIO, origin: str, column: str) -> Iterator[Document]:
    """A document a line: a string, an object with the string under `column`, or a list of token ids. Empty lines are
    passed over. Raises ValueError naming the line for anything else."""
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{origin}: line {number} is not JSON ({error}); name a plain text .txt") from None
        yield _document(value, f"{origin}: line {number}", column)


def read_file(path: Path, column: str) -> Iterator[Document]:
    """A .jsonl file a document a line, any other file as one document. Raises ValueError where it cannot be read."""
    try:
        with path.open(encoding="utf-8") as stream:
            yield from read_jsonl(stream, str(path), column) if path.suffix == ".jsonl" else read_text(stream)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start}); convert it") from None


def _document(value: Any, where: str, column: str) -> Document:
    if isinstance(value, dict):
        if column not in value:
            raise ValueError(f"{where} has no {column!r}, only {', '.join(map(repr, value))}; give --column")
        value = value[column]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    raise ValueError(f"{where} is neither a text, an object with one, nor a list of token ids")


def read_rows(rows: Iterable[Any], origin: str, column: str) -> Iterator[Document]:
    """A document a row of a dataset. Raises ValueError for a column that is absent."""
    for number, row in enumerate(rows, start=1):
        yield _document(row, f"{origin}: row {number}", column)


def random_ids(vocab: int, samples: int, length: int, seed: int) -> Iterator[Document]:
    """Token ids without meaning, for weights without meaning."""
    generator = random.Random(seed)
    for _ in range(samples):
        yield [generator.randrange(vocab) for _ in range(length)]
