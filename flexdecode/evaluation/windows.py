"""How a document is cut into windows that a model reads, each of its tokens scored in one of them. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DEFAULT_CONTEXT = 1024


@dataclass(frozen=True)
class Window:
    """Tokens [first, stop) of a document are read, behind `prefix` (a BOS, or nothing); tokens [scored, stop + 1) are
    predicted."""

    prefix: tuple[int, ...]
    first: int
    stop: int
    scored: int

    def inputs(self, ids: Sequence[int]) -> list[int]:
        return [*self.prefix, *ids[self.first : self.stop]]

    def targets(self, ids: Sequence[int]) -> list[int]:
        return list(ids[self.scored : self.stop + 1])

    @property
    def count(self) -> int:
        """How many targets there are."""
        return self.stop + 1 - self.scored

    @property
    def row(self) -> int:
        """The input at which the first target is predicted; the last is predicted at the last input."""
        return len(self.prefix) + self.scored - 1 - self.first


def windows(count: int, context: int, stride: int, prefix: Sequence[int] = ()) -> Iterator[Window]:
    """The windows over a document of `count` tokens: at most `context` inputs each, `stride` tokens further each time.

    Every token is a target once, but for the first of a document without a prefix, which nothing predicts. From the
    second window on a target has at least context - stride + 1 inputs before it. With stride = context the windows have
    no input in common.
    """
    if context < max(1, len(prefix)):
        raise ValueError(f"context must be at least 1, got {context}")
    if not 1 <= stride <= context:
        raise ValueError(f"stride is {stride}: it must be between 1 and the context of {context}")
    room = context - len(prefix)
    first, scored = 0, 0 if prefix else 1
    while scored < count:
        end = min(count, first + room + 1)
        yield Window(tuple(prefix), first, end - 1, scored)
        first, scored = first + stride, end


def cut(
    documents: Sequence[Sequence[int]], context: int, stride: int, prefix: Sequence[int]
) -> list[tuple[int, Window]]:
    """The windows over all documents in order, each with its document's number. Raises ValueError for no window."""
    found = [
        (number, window)
        for number, ids in enumerate(documents)
        for window in windows(len(ids), context, stride, prefix)
    ]
    if not found:
        raise ValueError(
            f"the text has {sum(map(len, documents))} tokens in {len(documents)} documents, and none of them follows "
            "another; at least 2 are needed"
        )
    return found


def choose_context(context: int | None, limit: int) -> int:
    """`context`, else the default, at most what the model takes. Raises ValueError where more was asked for."""
    if context is None:
        return min(DEFAULT_CONTEXT, limit)
    if context > limit:
        raise ValueError(f"context={context} is more than the model's {limit}; ask for less or raise max_context")
    return context
