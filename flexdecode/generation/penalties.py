"""Penalties, biases and bans: what is done to a request's logits before any token is chosen.

Holds the counts of ONE request, on the logits' device, so that the cost of a step does not grow with the text. Knows
token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexdecode.generation.params import SamplingParams

BAN = -100.0  # a logit_bias of this value rules the token out altogether
_FIRST_ROOM = 256  # ids; doubled when full


class Penalties:
    """repetition_penalty counts prompt and output (Keskar et al., 2019, as transformers applies it); presence_penalty
    and frequency_penalty count the output alone (OpenAI's definition); logit_bias comes last, so that a forced or
    banned token stays so whatever was said before. `banned_ids` may not be chosen before `params.min_tokens` tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        banned_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        assert params.repetition_penalty is not None, "the parameters must be resolved first"
        self._params = params
        self._repetition = params.repetition_penalty
        self._generated = 0
        self._min_tokens = params.min_tokens if banned_ids else 0
        self._counting = bool(self._repetition != 1.0 or params.presence_penalty or params.frequency_penalty)
        # Every id seen has a place: its id, and how often it was generated (0 where only the prompt has it).
        seen = list(dict.fromkeys(prompt_ids)) if self._repetition != 1.0 else []
        self._places = {token_id: place for place, token_id in enumerate(seen)}
        room = max(_FIRST_ROOM, len(seen)) if self._counting else 0
        self._ids = torch.zeros(room, dtype=torch.long, device=device)
        self._ids[: len(seen)] = torch.tensor(seen, dtype=torch.long, device=device)
        self._counts = torch.zeros(room, dtype=torch.float32, device=device)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long, device=device)
        biases = [float("-inf") if value == BAN else value for value in params.logit_bias.values()]
        self._biases = torch.tensor(biases, dtype=torch.float32, device=device)
        self._banned_ids = torch.tensor(list(banned_ids), dtype=torch.long, device=device)
        assert all(0 <= token_id < vocab_size for token_id in (*seen, *params.logit_bias, *banned_ids))

    @property
    def idle(self) -> bool:
        """Whether `apply` would return its argument unchanged, from now on."""
        return not self._counting and not self._params.logit_bias and self._generated >= self._min_tokens

    def apply(self, logits_V: Tensor) -> Tensor:
        """fp32 [V] -> fp32 [V], a new tensor unless nothing is to be done. Banned tokens become -inf."""
        if self.idle:
            return logits_V
        out_V = logits_V.clone()
        if self._places:
            ids, counts = self._ids[: len(self._places)], self._counts[: len(self._places)]
            seen = out_V[ids]
            if self._repetition != 1.0:
                seen = torch.where(seen > 0, seen / self._repetition, seen * self._repetition)
            seen = seen - self._params.frequency_penalty * counts - self._params.presence_penalty * (counts > 0)
            out_V[ids] = seen
        if self._params.logit_bias:
            out_V[self._bias_ids] += self._biases
        if self._generated < self._min_tokens:
            out_V[self._banned_ids] = float("-inf")
        return out_V

    def record(self, token_id: int) -> None:
        """Counts a generated token."""
        self._generated += 1
        if not self._counting:
            return
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._ids.numel():
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1
