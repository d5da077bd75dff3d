"""Speculative decoding without loss: who proposes tokens, and how many are worth proposing.

The engine computes the proposed tokens in one step with the last known one, and `Sampler.verify` keeps what plain
decoding would have produced; so nothing here can change a token, only the time it takes. Knows token ids and the cost
of steps, neither models nor the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

_MEMORY = 0.95  # weight of the older trials at each new one: the last twenty count
_PRIOR = 0.6  # acceptance of the first token where nothing is known
_ONWARD = 0.8  # the least acceptance of a later one where nothing is known: what is right so far tends to stay so
_MARGIN = 0.05  # of a step: a gain or a loss that is less is within the noise of timed steps
_SHARE = 0.005  # of the time, for probes
_MOST_SAVED = 4.0  # plain steps; a probe that may well cost more is not made


class Proposer(Protocol):
    """Guesses how a request goes on. One object serves one request."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` ids of the vocabulary that may follow `tokens` (prompt and output, which begin with those of
        the call before); none where it has no guess."""
        ...

    def close(self) -> None:
        """The request has ended: what is held for it goes."""
        ...


class DraftModel:
    """A smaller model's greedy continuation (Leviathan et al., 2023, at temperature 0).

    `continue_(tokens, most)` gives at most that many ids; what it keeps of the tokens from call to call is its own
    matter, and `forget` lets it go. The draft's vocabulary may be padded further than the target's: at an id from
    `vocab_size` on the proposal ends.
    """

    def __init__(
        self,
        continue_: Callable[[Sequence[int], int], Sequence[int]],
        vocab_size: int,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._continue, self._vocab_size, self._forget = continue_, vocab_size, forget

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        if most < 1:
            return []
        proposed = list(self._continue(tokens, most))[:most]
        foreign = (place for place, token_id in enumerate(proposed) if token_id >= self._vocab_size)
        return proposed[: next(foreign, most)]

    def close(self) -> None:
        self._forget()


@dataclass(frozen=True)
class SpeculationCounts:
    """What came of it: each step gives one token and the accepted ones. Steps without a proposal are counted too."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0


class Speculation:
    """How many tokens one request should propose next: as many as promise the most tokens per second.

    `cost(rows)` is what a step of so many rows costs, in any unit, or None where that is not known yet (a `StepCost`,
    shared by the requests of an engine, or a function). Proposing belongs to the cost. `most` is the greatest
    proposal; ValueError below 1.

    Acceptance is measured place by place, each on condition that the places before were right, because text that
    repeats itself is hard to enter and easy to stay in. Old trials fade exponentially, and a place with few of them
    is taken to be as good as the one before it, or good at all, so that it is tried.

    Where no proposal pays, none is made, except for probes: they have half a percent of the time and what probes win.
    A probe waits until there is as much as it is expected to lose; one after another is made while they win. The same
    observations give the same choices.

    Each step calls `choose` and then, when its tokens are known, `record`.
    """

    def __init__(self, cost: Callable[[int], float | None], most: int = 16) -> None:
        if most < 1:
            raise ValueError(f"at most {most} proposed tokens a step are none; ask for 1 or more, or do not speculate")
        self._cost = cost
        self._trials = [0.0] * most
        self._right = [0.0] * most
        self._saved = 0.0  # for probes, in plain steps
        self._stake: float | None = None  # what the probe under way loses, in plain steps, if nothing is accepted
        self._beside = 0
        self._counts = SpeculationCounts()

    @property
    def counts(self) -> SpeculationCounts:
        return self._counts

    @property
    def most(self) -> int:
        return len(self._trials)

    def choose(self, beside: int = 0) -> int:
        """How many tokens to propose in this step (0: none) when it computes `beside` rows of other requests, each
        worth a token."""
        self._beside, self._stake = beside, None
        count, tokens, price = self._best()
        plain = beside + 1.0
        if count == 0 or tokens > (plain + _MARGIN) * price:
            return count
        if plain + count <= plain * price:
            return 0  # it would lose even if all were right
        if self._saved < max(price - tokens / plain, _MARGIN):
            return 0
        self._stake = max(price - 1.0, _MARGIN)
        return count

    def record(self, proposed: int, accepted: int) -> None:
        """The step that was chosen last verified `proposed` tokens (none is a plain step), and `accepted` of them
        became the request's."""
        assert 0 <= accepted <= proposed <= len(self._trials), f"{accepted} accepted of {proposed} proposed"
        counts = self._counts
        self._counts = SpeculationCounts(counts.steps + 1, counts.proposed + proposed, counts.accepted + accepted)
        if proposed == 0:
            self._save(_SHARE / (self._beside + 1))  # each of the requests beside may save as much
            return
        if self._stake is not None:
            self._save(accepted / (self._beside + 1) - self._stake)
        for place in range(len(self._trials)):
            self._trials[place] *= _MEMORY
            self._right[place] *= _MEMORY
        for place in range(min(accepted + 1, proposed)):
            self._trials[place] += 1.0
            self._right[place] += place < accepted

    def _save(self, steps: float) -> None:
        self._saved = min(self._saved + steps, _MOST_SAVED)

    def _acceptance(self) -> list[float]:
        """For each place, the chance that its token is right if those before it are: the faded trials, and one more
        that goes as is to be expected."""
        chances, expected = [], _PRIOR
        for right, trials in zip(self._right, self._trials, strict=True):
            chances.append((right + expected) / (trials + 1.0))
            expected = max(chances[-1], _ONWARD)
        return chances

    def _best(self) -> tuple[int, float, float]:
        """The number of tokens to propose, if any must be, that gives the most tokens per second; the tokens of its
        step, which are one and, for each place, the chance that all up to it are right, and those beside; and what
        the step costs in plain steps. The number is 0 where costs are not known yet."""
        plain = self._cost(self._beside + 1)
        tokens, reached = self._beside + 1.0, 1.0
        best = 0, tokens, 1.0
        if plain is None:
            return best
        for count, chance in enumerate(self._acceptance(), start=1):
            cost = self._cost(self._beside + 1 + count)
            if cost is None:
                break
            price = cost / plain
            reached *= chance
            tokens += reached
            if best[0] == 0 or tokens * best[2] > best[1] * price:
                best = count, tokens, price
        return best
