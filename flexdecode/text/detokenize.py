"""Token ids to text while they arrive: each piece of text is given out once, as soon as nothing can change it.

Knows no model and no stop strings. The cost of a token does not depend on how many came before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from flexdecode.text.decoders import REPLACEMENT

if TYPE_CHECKING:
    from flexdecode.text.tokenizer import Tokenizer

_CONTEXT = 3  # releases decoded again, so that the first new token is not taken for the first of the text
_HELD = 4  # tokens that one unfinished character can span


class Detokenizer:
    """Streams the text of one sequence: the pushes and the flush joined equal `tokenizer.decode` of all the ids.

    Held back are only the bytes of an unfinished UTF-8 character (at most 3). Bytes that can never become one turn
    into U+FFFD at once, so that a run of them neither stalls the stream nor makes it slow. Ids that the tokenizer does
    not know have no text.

    `context_ids` stand before the sequence (its prompt) and are not given out. With them the first piece keeps the
    leading space that a SentencePiece tokenizer takes off the start of a text: prompt and output then join correctly.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._pipeline = tokenizer.new_pipeline()
        self._window = None if self._pipeline is not None else _Window(tokenizer.decode_window)
        for token_id in context_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Takes the next id; returns the text that is final now, often "" and sometimes more than one character."""
        token = None if token_id in self._skipped else self._tokenizer.token(token_id)
        if token is None:
            return ""
        if self._window is not None:
            return self._window.push(token_id)
        assert self._pipeline is not None
        return self._pipeline.push(token)

    def flush(self) -> str:
        """The sequence has ended: returns what was held back, U+FFFD for an unfinished character."""
        if self._window is not None:
            return self._window.flush()
        assert self._pipeline is not None
        return self._pipeline.flush()


class _Window:
    """The same for any decoder, by decoding the last few tokens with and without the new ones.

    Exact where a token's text depends on no token further than a few places away, as in WordPiece and BPE with an
    end-of-word suffix.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # The ids released together stay together: a context that began inside a character would spoil what follows.
        self._context: deque[list[int]] = deque(maxlen=_CONTEXT)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        before, after = self._texts()
        unfinished = after.endswith(REPLACEMENT) or not after.startswith(before)
        if unfinished and len(self._pending) < _HELD:
            return ""
        return self._release(before, after)

    def flush(self) -> str:
        return self._release(*self._texts()) if self._pending else ""

    def _texts(self) -> tuple[str, str]:
        context = [token_id for released in self._context for token_id in released]
        return self._decode(context) if context else "", self._decode(context + self._pending)

    def _release(self, before: str, after: str) -> str:
        self._context.append(self._pending)
        self._pending = []
        return after[len(before) :]
