"""A conversation that is longer than the context: which of its messages the model still reads.

As in StreamingLLM (Xiao et al., 2023) a beginning and the latest part stay, and positions count what stays. Unlike
there, what goes are whole turns, the beginning is all system text, and keys are computed anew for what stays: a key
that was made beside turns that are gone would still speak of them. Knows messages and a function that renders them; no
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], list[int]]

OVERFLOWS = ("error", "sinks")
_STAY = ("system", "developer")  # roles whose messages always stay
_ANSWER_SHARE = 4  # of the context, for an answer whose length nobody has bounded
_STEPS = 3  # of the room for the prompt: the cut moves by one of them at a time


@dataclass(frozen=True)
class Shortened:
    """The prompt's token ids, and how many of the oldest messages are not in it."""

    token_ids: list[int]
    dropped: int


def check_overflow(overflow: str) -> None:
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow {overflow!r} is not known (--overflow; known: {', '.join(OVERFLOWS)})")


def turns(messages: Sequence[Message]) -> list[int]:
    """Where the turns begin that could be the first: at the user's messages."""
    return [index for index, message in enumerate(messages) if message.get("role") == "user"]


def fit(
    messages: Sequence[Message], render: Render, limit: int, max_tokens: int | None, overflow: str = "error"
) -> Shortened:
    """The prompt for the next turn of a conversation in a context of `limit` tokens.

    Under "error" a conversation of several turns that leaves no room for `max_tokens` (one token, for None) raises
    ValueError. Under "sinks" its oldest turns are left out until there is room for `max_tokens` (a quarter of the
    context, for None). The cut depends on what was said before it and moves in steps, so that most turns only add to
    the prompt of the one before. System text stays, and so does the last question: where these alone leave no room, the
    ValueError says so.
    """
    check_overflow(overflow)
    whole = render(messages)
    begins = turns(messages)
    if len(begins) < 2:
        return Shortened(whole, 0)
    if overflow == "error":
        if len(whole) + (1 if max_tokens is None else max_tokens) > limit:
            asked = "" if max_tokens is None else f" beside max_tokens={max_tokens}"
            raise ValueError(
                f"the conversation has {len(whole)} tokens{asked}, and the context ends at {limit}; clear it, raise "
                "max_context (--max-context), or let its oldest turns go (overflow='sinks', --overflow sinks)"
            )
        return Shortened(whole, 0)
    room = max(1, limit - (limit // _ANSWER_SHARE if max_tokens is None else max_tokens))
    if len(whole) <= room:
        return Shortened(whole, 0)
    return _shortened(messages, render, limit, room, len(whole), begins)


def _shortened(
    messages: Sequence[Message], render: Render, limit: int, room: int, whole: int, begins: list[int]
) -> Shortened:
    step = max(1, room // _STEPS)
    goal = whole - -(-(whole - room) // step) * step  # tokens that may stay
    low, high = 1, len(begins) - 1
    while low < high:  # the fewest turns that must go
        middle = (low + high) // 2
        if len(render(_from(messages, begins[middle]))) <= goal:
            high = middle
        else:
            low = middle + 1
    ids = render(_from(messages, begins[low]))
    while len(ids) > room and low < len(begins) - 1:  # a template may say more where there are fewer messages
        low += 1
        ids = render(_from(messages, begins[low]))
    if len(ids) >= limit:
        raise ValueError(
            f"system text and the last question alone have {len(ids)} tokens, and the context ends at {limit}; shorten "
            "them or raise max_context (--max-context)"
        )
    first = begins[low]
    return Shortened(ids, sum(message.get("role") not in _STAY for message in messages[:first]))


def _from(messages: Sequence[Message], first: int) -> list[Message]:
    """The messages from `first` on, behind those that always stay."""
    return [message for message in messages[:first] if message.get("role") in _STAY] + list(messages[first:])
