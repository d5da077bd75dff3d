"""What a request that speculates carries with it, and which masks allow it. Knows neither models nor the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flexdecode.attention.masks import Mask
from flexdecode.generation.speculative import Proposer, Speculation, SpeculationCounts


class Speculator:
    """One request's proposer, and the policy that says how much it is asked for."""

    def __init__(self, proposer: Proposer, policy: Speculation) -> None:
        self._proposer, self._policy = proposer, policy
        self._asked = False

    @property
    def counts(self) -> SpeculationCounts:
        return self._policy.counts

    @property
    def most(self) -> int:
        """It is never asked for more."""
        return self._policy.most

    def propose(self, tokens: Callable[[], Sequence[int]], most: int, beside: int) -> tuple[int, ...]:
        """For a step that computes `beside` rows of other requests and has room for `most` more of this one. `tokens`
        are asked for only where something is proposed."""
        self._asked = True
        count = min(self._policy.choose(beside), most)
        return tuple(self._proposer.propose(tokens(), count)) if count > 0 else ()

    def record(self, proposed: int, accepted: int) -> None:
        """What became of it; of a step for which nothing could be proposed there is nothing to learn."""
        if self._asked:
            self._asked = False
            self._policy.record(proposed, accepted)

    def close(self) -> None:
        """The request has ended."""
        self._proposer.close()


def refuse_looking_ahead(masks: Iterable[Mask]) -> None:
    """Raises ValueError where tokens see later ones: a proposed token would be seen by those before it, which plain
    decoding computes without it."""
    for mask in masks:
        if not mask.looks_back:
            raise ValueError(
                f"nothing can be speculated under {mask}: a token would see those that are only proposed after it; use "
                "speculate=off (--speculate off)"
            )
