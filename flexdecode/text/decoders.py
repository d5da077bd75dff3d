"""The decoders of the `tokenizers` library, made incremental: tokens go in one by one, final text comes out.

Knows token strings and the JSON description of a decoder, not ids and not vocabularies. Each stage takes pieces of
text and gives back those that nothing to come can change. Once a stage has fused the pieces, what follows sees one
text in parts; before that, one piece a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class Stage(Protocol):
    """One step of a decoder."""

    def push(self, pieces: Sequence[str]) -> list[str]: ...

    def flush(self) -> list[str]: ...


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where it is visible in Latin-1, else 256, 257, ... in turn."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(hidden)})
    return alphabet


BYTE_OF_CHAR: Mapping[str, int] = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with any character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> int | None:
    """The byte of a SentencePiece byte token such as "<0xE2>", None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class ByteLevel:
    """Bytes to UTF-8, U+FFFD for each maximal invalid part; holds back at most 3 bytes, of an unfinished character."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: Sequence[str]) -> list[str]:
        return [self._utf8.decode(b"".join(map(byte_level_bytes, pieces)))]

    def flush(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class ByteFallback:
    """Runs of byte tokens to UTF-8; holds back at most the 3 bytes of an unfinished character.

    From the first byte that fits nowhere to the end of its run, each byte is one U+FFFD, as in the library. The
    library also takes back the whole characters before it in the same run, which no stream can, so here they stay.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._broken = False

    def push(self, pieces: Sequence[str]) -> list[str]:
        out: list[str] = []
        for piece in pieces:
            byte = fallback_byte(piece)
            if byte is None:
                out += [*self.flush(), piece]
            else:
                out += self._read(byte)
        return out

    def flush(self) -> list[str]:
        broken = [REPLACEMENT] * len(self._pending)
        self._pending, self._broken = b"", False
        return broken

    def _read(self, byte: int) -> list[str]:
        if self._broken:
            return [REPLACEMENT]
        self._pending += bytes([byte])
        utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            char = utf8.decode(self._pending)
        except UnicodeDecodeError:
            broken = self.flush()
            self._broken = True
            return broken
        if not char:
            return []
        self._pending = b""
        return [char]


class Each:
    """A change to every piece on its own; `first` is used for the first piece of all."""

    def __init__(self, change: Callable[[str], str], first: Callable[[str], str] | None = None) -> None:
        self._change = change
        self._next = change if first is None else first

    def push(self, pieces: Sequence[str]) -> list[str]:
        out: list[str] = []
        for piece in pieces:
            out.append(self._next(piece))
            self._next = self._change
        return out

    def flush(self) -> list[str]:
        return []


class StripStart:
    """Takes up to `count` of a character off the start of a fused text."""

    def __init__(self, char: str, count: int) -> None:
        self._char = char
        self._left = count

    def push(self, pieces: Sequence[str]) -> list[str]:
        text = "".join(pieces)
        while self._left and text:
            if text[0] != self._char:
                self._left = 0
            else:
                text, self._left = text[1:], self._left - 1
        return [text]

    def flush(self) -> list[str]:
        return []


class Pipeline:
    """Several stages in a row, and the text of a single token under them."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def push(self, token: str) -> str:
        """Takes a token; returns the text that is final now."""
        pieces: Sequence[str] = [token]
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def flush(self) -> str:
        """No more tokens: returns what was held back."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = stage.push(pieces) + stage.flush()
        return "".join(pieces)


def pipeline(spec: Mapping[str, Any] | None) -> Pipeline | None:
    """The incremental form of a decoder as tokenizer.json describes it (None: tokens joined by spaces). None when the
    description holds something that has no such form here."""
    if spec is None:
        return Pipeline([Each(lambda piece: " " + piece, first=str)])
    stages: list[Stage] = []
    fused = False
    for part in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
            continue
        stage = _stage(part, fused)
        if stage is None:
            return None
        stages.append(stage)
        fused = fused or kind == "ByteLevel"
    return Pipeline(stages)


def _stage(part: Mapping[str, Any], fused: bool) -> Stage | None:
    kind = part["type"]
    if kind == "Replace" and len(part["pattern"].get("String", "")) == 1:  # a longer one could span pieces
        pattern, content = part["pattern"]["String"], part["content"]
        return Each(lambda piece: piece.replace(pattern, content))
    if kind == "Metaspace":
        mark = part["replacement"]
        dropping = part.get("prepend_scheme", "always") != "never"
        return Each(
            lambda piece: piece.replace(mark, "" if dropping and fused else " "),
            first=(lambda piece: piece.replace(mark, "")) if dropping else None,
        )
    if kind == "Strip" and part["stop"] == 0:
        char, count = part["content"], part["start"]
        return StripStart(char, count) if fused else Each(lambda piece: _strip_start(piece, char, count))
    if kind == "ByteFallback" and not fused:
        return ByteFallback()
    if kind == "ByteLevel" and not fused:
        return ByteLevel()
    return None


def _strip_start(piece: str, char: str, count: int) -> str:
    taken = 0
    while taken < count and piece[taken : taken + 1] == char:
        taken += 1
    return piece[taken:]
