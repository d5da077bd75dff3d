"""Proposals found in the text itself: what followed the last few tokens when they stood there before.

Prompt lookup decoding (Saxena, 2023). Knows token ids only and runs no model; whether a proposal is right is the
sampler's to say, and how long it should be the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence

_ID_BITS = 32  # a token id's share of a key


class PromptLookup:
    """Proposes the continuation of the latest earlier occurrence of the longest n-gram that the tokens end with, of
    `longest` tokens down to `shortest`.

    One object serves one request: the tokens of a call begin with those of the call before. A new token costs
    `longest - shortest + 1` entries, however long the text; of the older ones only the continuation is read. What is
    proposed stands in the tokens, so it never holds an id that they do not.

    Raises ValueError unless 1 <= shortest <= longest.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens: shortest must be 1 or more, longest no less")
        # By length, longest first: its mask, and where the latest n-gram of each key ends (n-grams as one number are
        # half the size of tuples, and one shift makes the keys of all lengths).
        self._tables: list[tuple[int, int, dict[int, int]]] = [
            (n, (1 << _ID_BITS * n) - 1, {}) for n in range(longest, shortest - 1, -1)
        ]
        self._read = 0
        self._key = 0  # the last `longest` of the tokens read

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """`most` ids that may follow `tokens`; where the text ends before, it is taken to repeat itself from there on.
        None where nothing matches."""
        self._index(tokens)
        if most < 1:
            return []
        for _, mask, ends in self._tables:
            end = ends.get(self._key & mask)
            if end is not None:
                found = list(tokens[end : end + most])
                return [found[i % len(found)] for i in range(most)]
        return []

    def close(self) -> None:
        """What was read is forgotten."""
        for _, _, ends in self._tables:
            ends.clear()

    def _index(self, tokens: Sequence[int]) -> None:
        """Reads the new tokens. An n-gram is entered when the token after it comes, so that what the text ends with
        is not found in itself and what is found has a continuation."""
        assert self._read <= len(tokens), f"{len(tokens)} tokens after {self._read}; one object serves one request"
        whole = self._tables[0][1]
        for token in tokens[self._read :]:
            for n, mask, ends in self._tables:
                if self._read >= n:
                    ends[self._key & mask] = self._read
            self._key = (self._key << _ID_BITS | token) & whole
            self._read += 1
