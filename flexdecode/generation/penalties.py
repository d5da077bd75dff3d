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
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._min_tokens = params.min_tokens if banned_ids else 0
        self._generated = 0
        self._seen_V: Tensor | None = None  # bool: in the prompt or the output
        self._counts_V: Tensor | None = None  # fp32: times generated
        if self._repetition != 1.0:
            self._seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen_V[torch.tensor(list(prompt_ids), dtype=torch.long, device=device)] = True
        if self._presence or self._frequency:
            self._counts_V = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long, device=device)
        self._bias_values = torch.tensor(
            [float("-inf") if value == BAN else value for value in params.logit_bias.values()],
            dtype=torch.float32,
            device=device,
        )
        self._banned_ids = torch.tensor(list(banned_ids), dtype=torch.long, device=device)

    @property
    def idle(self) -> bool:
        """Whether `apply` would return its argument unchanged, from now on."""
        return (
            self._seen_V is None
            and self._counts_V is None
            and self._bias_ids.numel() == 0
            and self._generated >= self._min_tokens
        )

    def apply(self, logits_V: Tensor) -> Tensor:
        """fp32 [V] -> fp32 [V], a new tensor unless nothing is to be done. Banned tokens become -inf."""
        if self.idle:
            return logits_V
        out_V = logits_V.clone()
        if self._seen_V is not None:
            punished_V = torch.where(out_V > 0, out_V / self._repetition, out_V * self._repetition)
            out_V = torch.where(self._seen_V, punished_V, out_V)
        if self._counts_V is not None:
            out_V -= self._frequency * self._counts_V + self._presence * (self._counts_V > 0)
        if self._bias_ids.numel():
            out_V[self._bias_ids] += self._bias_values
        if self._generated < self._min_tokens:
            out_V[self._banned_ids] = float("-inf")
        return out_V

    def record(self, token_id: int) -> None:
        """Counts a generated token."""
        self._generated += 1
        if self._seen_V is not None:
            self._seen_V[token_id] = True
        if self._counts_V is not None:
            self._counts_V[token_id] += 1
