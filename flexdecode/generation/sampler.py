"""From one row of logits to one token id, for one request; and from the rows of a speculation to its tokens.

Knows token ids only. Each request has its own Sampler with its own generator and its own counts, so that its tokens
do not depend on what runs beside it. Everything is computed in fp32 (the cumulated probabilities in fp64) on the
logits' device. V is the number of logits: the model's vocabulary, padding included.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexdecode.generation.params import SamplingParams
from flexdecode.generation.penalties import Penalties

# Probabilities that add up to top_p exactly (0.5 + 0.3 for 0.8) differ from it by the rounding of fp32 logits.
_ROUNDING = 1e-6
_BUCKETS_PER_NAT = 64
_LAST_BUCKET = 32 * _BUCKETS_PER_NAT  # and everything less likely than the likeliest by a factor of e^32


class NumericalError(ValueError):
    """The model produced logits from which no token can be chosen."""


@dataclass(frozen=True)
class TokenChoice:
    """The chosen id and, when asked for, natural-log probabilities under the raw logits (before any penalty or
    temperature). `top` holds the likeliest ids in order; the chosen one is in it only if it is among them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The state of one request: its parameters (resolved), its counts and its random generator.

    `eos_token_ids` are those that would stop the request; they matter here only for min_tokens, and not at all when
    the request ignores them.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        assert params.temperature is not None, "the parameters must be resolved first"
        self._params = params
        self._vocab_size = vocab_size
        where = torch.device(device)
        ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        banned = sorted(token_id for token_id in ending if token_id < vocab_size)
        self._penalties = Penalties(params, prompt_ids, vocab_size, banned, where)
        self._generator: torch.Generator | None = None
        if not params.greedy:
            self._generator = torch.Generator(device=where)
            seed = random.SystemRandom().getrandbits(63) if params.seed is None else params.seed
            self._generator.manual_seed(seed)

    def sample(self, logits_V: Tensor) -> TokenChoice:
        """Chooses a token from fp32 logits [V], which are left as they are, and counts it as generated.

        Raises NumericalError when a logit is NaN or +inf or all are -inf, and ValueError when the bans of the request
        leave no token.
        """
        assert logits_V.shape == (self._vocab_size,), f"{tuple(logits_V.shape)} logits, expected {self._vocab_size}"
        raw_V = logits_V.float()
        adjusted_V = self._penalties.apply(raw_V)
        if self._generator is None:
            token_id = first_greatest(adjusted_V)
            peak = float(adjusted_V[token_id])  # NaN is the greatest to argmax, so this finds one anywhere
        else:
            peak = float(adjusted_V.amax())
        # A ban may have written over a NaN, so the raw row is looked at too where the two differ.
        if not math.isfinite(peak) or (adjusted_V is not raw_V and not math.isfinite(float(raw_V.amax()))):
            _explain(raw_V)
        if self._generator is not None:
            token_id = self._draw(adjusted_V - peak, self._generator)
        self._penalties.record(token_id)
        if self._params.logprobs is None:
            return TokenChoice(token_id)
        logprobs_V = raw_V.log_softmax(0)
        values, ids = likeliest(logprobs_V, min(self._params.logprobs, self._vocab_size))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenChoice(token_id, float(logprobs_V[token_id]), top)

    def verify(
        self, logits_RV: Tensor, proposed: Sequence[int], stop: Callable[[TokenChoice], bool] | None = None
    ) -> list[TokenChoice]:
        """Chooses the tokens that one-at-a-time decoding would have chosen, with the same draws: the accepted ones of
        `proposed`, and one that the sampler chose itself.

        logits_RV: fp32 [R, vocab], the rows after the last known token and after each proposed one, so that
        R = len(proposed) + 1. A row's token is chosen and counted as by `sample`; the next row is looked at only when
        that token is the proposed one. For rows that are not looked at nothing is drawn and nothing counted.

        `stop(choice)` is called once for each choice, in order, right after it was counted; where it says true the
        choice is the last, and the answer may then end with an accepted token. Leaving the stop to the caller, who
        would cut the list, is right only if the request is over: the sampler has counted what was cut.

        Raises as `sample` does when the first row gives no token. A later one that gives none ends the choices before
        it: the step that begins with that row meets the error, as in one-at-a-time decoding.
        """
        assert len(logits_RV) == len(proposed) + 1, f"{len(logits_RV)} rows for {len(proposed)} proposed tokens"
        choices: list[TokenChoice] = []
        for row, logits_V in enumerate(logits_RV):
            try:
                choice = self.sample(logits_V)
            except ValueError:
                if not choices:
                    raise
                break
            choices.append(choice)
            ended = stop is not None and stop(choice)
            if ended or row == len(proposed) or choice.token_id != proposed[row]:
                break
        return choices

    def _draw(self, shifted_V: Tensor, generator: torch.Generator) -> int:
        """A token by the probabilities softmax(shifted / temperature) of the shortlist. The maximum of shifted is 0."""
        assert self._params.temperature is not None
        kept, ids = shortlist(shifted_V / self._params.temperature, self._params)
        # Inverse of the cumulated distribution. A token of probability 0 adds nothing to the sum and the search goes
        # right of equal entries, so it cannot be hit, which argmax(p / noise) does not promise.
        probabilities = kept.exp()
        cumulated = probabilities.cumsum(0, dtype=torch.float64)
        uniform = torch.rand(1, dtype=torch.float64, device=kept.device, generator=generator)
        place = torch.searchsorted(cumulated, uniform * cumulated[-1], right=True).clamp(max=kept.numel() - 1)
        if kept.device.type != "cpu":  # a parallel sum may rise by a rounding where nothing was added
            place = torch.where(probabilities[place] > 0, place, probabilities.argmax())
        return int(place if ids is None else ids[place])


def shortlist(scaled_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """What top-k, top-p and min-p leave, in this order: top-p reckons with what top-k left.

    scaled_V: fp32 [V], logits over the temperature, less their maximum. Returns the kept entries and their ids; ids
    None means every token in order.
    """
    assert params.top_k is not None
    assert params.top_p is not None
    assert params.min_p is not None
    kept, ids = scaled_V, None
    if 0 < params.top_k < scaled_V.numel():
        kept, ids = likeliest(scaled_V, params.top_k)
    if params.top_p < 1.0:
        if ids is None:
            kept, ids = _nucleus(scaled_V, params.top_p)
        else:
            inside = _inside(kept.double().softmax(0), params.top_p)
            kept, ids = kept[inside], ids[inside]
    if params.min_p > 0.0:
        likely = kept >= math.log(params.min_p) - _ROUNDING
        kept, ids = kept[likely], likely.nonzero().squeeze(1) if ids is None else ids[likely]
    return kept, ids


def first_greatest(values_V: Tensor) -> int:
    """The id of the greatest fp32 value, of equal ones the first; NaN is the greatest of all."""
    # On a CPU numpy's takes a tenth of the time of torch's, which goes value by value.
    return int(values_V.numpy().argmax() if values_V.device.type == "cpu" else values_V.argmax())


def likeliest(values_V: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest values and their ids, greatest first, equal values by id: torch.topk leaves their order open,
    and then the first of them could differ from argmax."""
    if k == 0:
        return values_V[:0], torch.empty(0, dtype=torch.long, device=values_V.device)
    least = values_V.topk(k).values[-1]
    ids = (values_V >= least).nonzero().squeeze(1)
    values, order = values_V[ids].sort(descending=True, stable=True)
    return values[:k], ids[order[:k]]


def _nucleus(scaled_V: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Top-p over all tokens without sorting them all, by id: a histogram of the probabilities over the logits tells in
    which narrow bucket the sum reaches top_p, and only that bucket is sorted."""
    bucket_V = (scaled_V * -_BUCKETS_PER_NAT).clamp(max=_LAST_BUCKET).long()
    mass = torch.bincount(bucket_V, weights=scaled_V.exp().double(), minlength=_LAST_BUCKET + 1)
    total = mass.sum()
    gathered = mass.cumsum(0) / total
    edge = int(torch.searchsorted(gathered, top_p - _ROUNDING))
    above = (bucket_V < edge).nonzero().squeeze(1)
    ids = (bucket_V == edge).nonzero().squeeze(1)
    values, order = scaled_V[ids].sort(descending=True, stable=True)
    left = top_p - (float(gathered[edge - 1]) if edge else 0.0)
    inside = _inside(values.double().exp() / total, left)
    # By id: in the order of buckets a logit's last bit could move a token, and with it what a seed draws.
    kept = torch.cat((above, ids[order[inside]])).sort().values
    return scaled_V[kept], kept


def _inside(probabilities: Tensor, top_p: float) -> Tensor:
    """Which of the falling fp64 probabilities belong to the smallest set with at least top_p (Holtzman et al., 2020):
    those before which less than top_p has gathered; the first always does."""
    before = probabilities.cumsum(0) - probabilities
    inside = before < top_p - _ROUNDING
    inside[0] = True
    return inside


def _explain(raw_V: Tensor) -> None:
    """Raises the error for a row whose greatest adjusted logit is not finite."""
    nans = int(raw_V.isnan().sum())
    if nans:
        raise NumericalError(f"the model produced NaN in {nans} of {raw_V.numel()} logits; no token can be chosen")
    infinite = int(raw_V.isposinf().sum())
    if infinite:
        raise NumericalError(f"the model produced +inf in {infinite} of {raw_V.numel()} logits; no token can be chosen")
    if bool(raw_V.isneginf().all()):
        raise NumericalError(f"all {raw_V.numel()} logits are -inf; no token can be chosen (0 of them are NaN)")
    raise ValueError("logit_bias and min_tokens together ban every token that the model gives any probability")
