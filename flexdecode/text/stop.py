"""Stop strings: which part of a growing text may be shown, and where the text ends.

Works on characters of finished text and knows neither tokens nor bytes, so a stop string may span tokens and hold any
character.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text that arrives in pieces and cuts it before the first stop string.

    The text counts as read one character at a time: the stop string completed first ends it, and where several are
    completed by the same character, the longest. Nothing that could still become part of a match is released, and
    never more than that is held back. The cost per character does not depend on the length of the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string: it would match before the first character."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._lengths = [0] * len(self._stops)  # of each stop, how much the text read so far ends in
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text; returns the text that may be released now, and whether a stop string has ended it all."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        seen = self._held + text
        for end in range(len(self._held) + 1, len(seen) + 1):
            found = self._advance(seen[end - 1])
            if found is not None:
                self.matched, self._held = found, ""
                return seen[: end - len(found)], True
        keep = max(self._lengths)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], False

    def flush(self) -> str:
        """The text has ended: releases what was held back ("" after a match)."""
        text, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return text

    def _advance(self, char: str) -> str | None:
        """Reads one character into every stop's automaton (Knuth, Morris, Pratt, 1977); the longest one completed."""
        found: str | None = None
        for index, stop in enumerate(self._stops):
            length, borders = self._lengths[index], self._borders[index]
            while length and stop[length] != char:
                length = borders[length - 1]
            length += stop[length] == char
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
            self._lengths[index] = length
        return found


def _borders(pattern: str) -> tuple[int, ...]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(pattern)
    for place in range(1, len(pattern)):
        length = lengths[place - 1]
        while length and pattern[length] != pattern[place]:
            length = lengths[length - 1]
        lengths[place] = length + (pattern[length] == pattern[place])
    return tuple(lengths)
