"""What one request asks of the sampler: every knob, checked where it is set.

Knows neither text nor model: a stop string is only checked here, and a token id against a vocabulary's size. A value
out of range is a ValueError that names the field; nothing is clamped and nothing is dropped.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

# Below this a division by the temperature could overflow, and the draw would be the argmax anyway.
GREEDY_TEMPERATURE = 1e-4
MAX_LOGPROBS = 20

_DEFAULTS: Mapping[str, float | int] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_CHOOSING = ("temperature", "top_k", "top_p", "min_p")  # setting one of these asks for sampling
_SEED_SPAN = 2**64


class FrozenBias(dict[int, float]):
    """A logit_bias that cannot change after the check: hashable, picklable and an ordinary dict to json."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenBias], tuple[dict[int, float]]]:
        return FrozenBias, (dict(self),)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("logit_bias cannot be changed; use dataclasses.replace")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. None means: the model's generation_config.json, then the default in
    brackets.

    Order of the steps: penalties, `logit_bias`, the `min_tokens` ban, temperature, top-k, top-p, min-p, draw. Every
    value is checked when the object is made; token ids are checked by `validate`, which needs the vocabulary's size.
    """

    max_tokens: int | None = None  # [None: until the context is full]; 0 generates nothing, finish_reason "length"
    min_tokens: int = 0  # no end of sequence and no stop_token_ids before that many tokens
    temperature: float | None = None  # [1.0]; 0 (and anything below 1e-4) is greedy
    top_k: int | None = None  # [0: off]; the k likeliest tokens stay; -1 is off too
    top_p: float | None = None  # [1.0: off]; the smallest set with that much probability; 0 keeps only the likeliest
    min_p: float | None = None  # [0.0: off]; tokens at least min_p times as likely as the likeliest; 1 keeps only it
    repetition_penalty: float | None = None  # [1.0: off]; of prompt and output ids: logit / r, or logit * r below 0
    presence_penalty: float = 0.0  # -2..2, subtracted once from every id generated so far
    frequency_penalty: float = 0.0  # -2..2, subtracted once for each time an id was generated
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=FrozenBias)  # -100..100 added; -100 bans
    seed: int | None = None  # None: from the system's entropy; 0 is a seed like any other
    n: int = 1
    stop: tuple[str, ...] = ()  # a str or a sequence of str is accepted
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # 0..20 likeliest alternatives beside the chosen token

    def __post_init__(self) -> None:
        _optional_integer(self, "max_tokens", 0)
        _integer(self, "min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        _optional_number(self, "temperature", 0.0)
        _optional_integer(self, "top_k", -1)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _optional_number(self, "top_p", 0.0, 1.0)
        _optional_number(self, "min_p", 0.0, 1.0)
        _optional_number(self, "repetition_penalty", 0.0)
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty must be greater than 0; 1 switches it off")
        _number(self, "presence_penalty", -2.0, 2.0)
        _number(self, "frequency_penalty", -2.0, 2.0)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        _optional_integer(self, "seed", -(_SEED_SPAN // 2), _SEED_SPAN - 1)
        _integer(self, "n", 1)
        object.__setattr__(self, "stop", _checked_stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        _optional_integer(self, "logprobs", 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always the answer, so that no random number is needed."""
        cold = self.temperature is not None and self.temperature < GREEDY_TEMPERATURE
        return cold or self.top_k == 1 or self.top_p == 0.0

    def resolve(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """The same request with every None that has a default filled in.

        The model's generation_config.json comes first: temperature, top_k, top_p, min_p, repetition_penalty, and
        max_new_tokens as the default of max_tokens. Its other keys are ignored, max_length among them: that one counts
        the prompt and is nearly always a left-over. Where generation_config does not say do_sample: true and the user
        set none of temperature, top_k, top_p and min_p, decoding is greedy.

        Raises ValueError naming generation_config.json when a value in it is out of range.
        """
        filled: dict[str, Any] = {}
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                wanted = generation_config.get(name)
                filled[name] = default if wanted is None else wanted
        if generation_config.get("do_sample") is not True and all(getattr(self, name) is None for name in _CHOOSING):
            filled["temperature"] = 0.0
        budget = generation_config.get("max_new_tokens")
        if self.max_tokens is None and budget is not None:
            # The user's min_tokens wins over a default that nobody chose for this request.
            filled["max_tokens"] = max(budget, self.min_tokens) if isinstance(budget, int) and budget >= 0 else budget
        try:
            return dataclasses.replace(self, **filled)
        except ValueError as error:
            raise ValueError(f"generation_config.json: {error}") from None

    def validate(self, vocab_size: int) -> None:
        """Raises ValueError when logit_bias or stop_token_ids name an id that the model does not have."""
        for field, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(f"{field} has token id {token_id}, but the vocabulary ends at {vocab_size - 1}")

    def choice(self, index: int) -> SamplingParams:
        """The request of the index-th of `n` answers: n is 1, and each has a seed of its own; the first keeps it."""
        if self.seed is None or index == 0:
            return dataclasses.replace(self, n=1)
        spread = 0x9E3779B97F4A7C15  # an odd constant (2^64 / golden ratio): no two indices share a seed
        return dataclasses.replace(self, n=1, seed=(self.seed + index * spread) % _SEED_SPAN)


def _integer(params: SamplingParams, name: str, low: int, high: int | None = None) -> None:
    value = getattr(params, name)
    bounds = f"at least {low}" if high is None else f"between {low} and {high}"
    whole = _whole(value)
    if whole is None:
        raise ValueError(f"{name} must be a whole number {bounds}, not {value!r}")
    if whole < low or (high is not None and whole > high):
        raise ValueError(f"{name} must be {bounds}, not {value}")
    object.__setattr__(params, name, whole)


def _number(params: SamplingParams, name: str, low: float, high: float | None = None) -> None:
    value = getattr(params, name)
    bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
    real = _real(value)
    if real is None:
        raise ValueError(f"{name} must be a number {bounds}, not {value!r}")
    if not low <= real <= (sys.float_info.max if high is None else high):  # nor is NaN
        raise ValueError(f"{name} must be {bounds}, not {value}")
    object.__setattr__(params, name, real)


def _optional_integer(params: SamplingParams, name: str, low: int, high: int | None = None) -> None:
    if getattr(params, name) is not None:
        _integer(params, name, low, high)


def _optional_number(params: SamplingParams, name: str, low: float, high: float | None = None) -> None:
    if getattr(params, name) is not None:
        _number(params, name, low, high)


def _whole(value: Any) -> int | None:
    """An integer of any kind (numpy's too), but neither a bool nor a float that happens to be whole."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _real(value: Any) -> float | None:
    """A number of any kind, but no bool and no text that spells one."""
    if isinstance(value, (bool, str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return float("inf")


def _checked_bias(bias: object) -> FrozenBias:
    if bias is None:
        return FrozenBias()
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, not {bias!r}")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token_id, amount = _whole(key), _real(value)
        if token_id is None or token_id < 0:
            raise ValueError(f"logit_bias has {key!r} where a token id (0 or more) belongs")
        if amount is None or not -100.0 <= amount <= 100.0:
            raise ValueError(f"logit_bias of token {token_id} must be between -100 and 100, not {value!r}")
        checked[token_id] = amount
    return FrozenBias(checked)


def _checked_stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Iterable) or isinstance(stops, (bytes, Mapping)):
        raise ValueError(f"stop must be a string or a list of strings, not {stop!r}")
    checked = tuple(stops)
    for text in checked:
        if not isinstance(text, str):
            raise ValueError(f"stop must be a string or a list of strings, but holds {text!r}")
        if not text:
            raise ValueError("stop holds an empty string, which would stop before the first token; leave it out")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError(f"stop holds {text!a}, which is half of a surrogate pair and can never be generated")
    return checked


def _checked_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, (str, bytes, Mapping)):
        raise ValueError(f"stop_token_ids must be a list of token ids, not {ids!r}")
    checked: list[int] = []
    for item in ids:
        token_id = _whole(item)
        if token_id is None or token_id < 0:
            raise ValueError(f"stop_token_ids holds {item!r} where a token id (0 or more) belongs")
        checked.append(token_id)
    return tuple(checked)
