"""Which parts of a mask decide whether keys are seen: through `&`, `|` and `~`, down to what is no combination.

A run of keys (a block, or a single key) is settled by what the mask promises (`Mask.sees`) or else by its bits, which
is the order in which a plan asks; so no part is asked about a key that a plan would not ask it about. Knows no plan.
Shape letters: N runs of keys, A those that are asked, K keys of the asked ones, Q queries, F parts.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from flexdecode.attention.masks import And, Bools, Ints, Mask, Not, Or, Queries


class State(IntEnum):
    """Of a run of keys for some queries: none sees any, or some see some, or all see all."""

    SKIPPED = 0
    PARTIAL = 1
    FULL = 2


States = NDArray[np.int8]


@dataclass(frozen=True)
class Runs:
    """Runs of keys [first, stop) for the queries `q_idx_Q` of one head; those in `asked_N` are settled by bits."""

    q_idx_Q: Ints
    first_N: Ints
    stop_N: Ints
    asked_N: Bools
    head: int = 0
    batch: int = 0

    @functools.cached_property
    def queries(self) -> Queries:
        return Queries(int(self.q_idx_Q.min()), int(self.q_idx_Q.max()) + 1)

    @functools.cached_property
    def starts_A(self) -> Ints:
        """Where the keys of each asked run begin in `keys_K`."""
        counts_A = (self.stop_N - self.first_N)[self.asked_N]
        starts: Ints = np.cumsum(counts_A) - counts_A
        return starts

    @functools.cached_property
    def keys_K(self) -> Ints:
        """Positions of the keys of the asked runs."""
        first_A, counts_A = self.first_N[self.asked_N], (self.stop_N - self.first_N)[self.asked_N]
        keys: Ints = np.repeat(first_A - self.starts_A, counts_A) + np.arange(int(counts_A.sum()))
        return keys


@dataclass(frozen=True)
class Told:
    """What a mask shows of each run, which of its parts decided that, and its bits where it was asked."""

    states_N: States
    why_FN: Bools
    shown_QK: Bools


def normal(mask: Mask) -> Mask:
    """The same mask with `~` on nothing but its parts: ~(a & b) is ~a | ~b."""
    return _normal(mask, False)


def _normal(mask: Mask, negated: bool) -> Mask:
    if isinstance(mask, Not):
        return _normal(mask.mask, not negated)
    if isinstance(mask, (And, Or)):
        join = operator.and_ if isinstance(mask, And) != negated else operator.or_
        joined: Mask = functools.reduce(join, [_normal(part, negated) for part in mask.parts])
        return joined
    return ~mask if negated else mask


def parts_of(form: Mask) -> tuple[Mask, ...]:
    """The masks that a normal form is made of, without repeats."""
    if not isinstance(form, (And, Or)):
        return (form,)
    return tuple(dict.fromkeys(part for inner in form.parts for part in parts_of(inner)))


def told(form: Mask, parts: tuple[Mask, ...], runs: Runs) -> Told:
    """What `form` shows of the runs; row f of `why_FN` tells where `parts[f]` decided.

    For a run that is skipped: the operands of `&` that hide it, all operands of `|`. For one seen whole: all operands
    of `&`, those of `|` that show it. Where none does alone, and for one seen in part: those that show it in part.
    """
    if not isinstance(form, (And, Or)):
        return _told_by_part(form, parts, runs)
    inner = [told(part, parts, runs) for part in form.parts]
    both = isinstance(form, And)
    join, bound = (np.logical_and, np.minimum) if both else (np.logical_or, np.maximum)
    shown_QK = join.reduce([x.shown_QK for x in inner])
    states_N = bound.reduce([x.states_N for x in inner])
    states_N[runs.asked_N] = _states(shown_QK, runs)
    alike_N = np.logical_or.reduce([x.states_N == states_N for x in inner])
    wanted_N = np.where(alike_N, states_N, State.PARTIAL)
    why_FN = np.logical_or.reduce([x.why_FN & (x.states_N == wanted_N) for x in inner])
    return Told(states_N, why_FN, shown_QK)


def _told_by_part(part: Mask, parts: tuple[Mask, ...], runs: Runs) -> Told:
    seen = part.sees(runs.queries, runs.first_N, runs.stop_N)
    states_N = np.where(seen.every, State.FULL, np.where(seen.some, State.PARTIAL, State.SKIPPED)).astype(np.int8)
    q_idx, keys = torch.from_numpy(runs.q_idx_Q)[:, None], torch.from_numpy(runs.keys_K)
    shown_QK = np.zeros((len(runs.q_idx_Q), len(runs.keys_K)), np.bool_)
    if len(runs.keys_K):
        shown_QK[:] = part(torch.tensor(runs.batch), torch.tensor(runs.head), q_idx, keys).numpy()
    states_N[runs.asked_N] = _states(shown_QK, runs)
    why_FN = np.zeros((len(parts), len(states_N)), np.bool_)
    why_FN[parts.index(part)] = True
    return Told(states_N, why_FN, shown_QK)


def _states(shown_QK: Bools, runs: Runs) -> States:
    """Of the asked runs, by their bits."""
    if not len(runs.starts_A):
        return np.empty(0, np.int8)
    some_A = np.logical_or.reduceat(shown_QK.any(0), runs.starts_A)
    every_A = np.logical_and.reduceat(shown_QK.all(0), runs.starts_A)
    return some_A.astype(np.int8) + every_A
