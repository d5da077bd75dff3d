"""Which token ids end a sequence, from everything a checkpoint says about it. Plain numbers; opens no file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flexdecode.text.tokenizer import Tokenizer


def eos_token_ids(
    config_eos: object, generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """The union, in this order and without repeats, of

    - `config_eos`, config.json's eos_token_id: an id, a list of ids, or None;
    - generation_config.json's eos_token_id, of the same forms;
    - the tokenizer's own: its eos_token, and in a GGUF file its end-of-turn tokens.

    A union, because each of them alone is wrong in published chat models: the end of a turn is often named in only one
    of the three. Negative ids, which some files write for "none", are left out. Raises ValueError for anything else.
    """
    ids: list[int] = []
    ids += _listed(config_eos, "config.json")
    ids += _listed(generation_config.get("eos_token_id"), "generation_config.json")
    if tokenizer is not None:
        ids += tokenizer.eos_token_ids
    return tuple(dict.fromkeys(ids))


def _listed(value: object, origin: str) -> list[int]:
    if value is None:
        return []
    values = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)) else [value]
    ids: list[int] = []
    for item in values:
        if not isinstance(item, int) or isinstance(item, bool):
            raise ValueError(f"{origin}: eos_token_id must be a token id or a list of them, not {value!r}")
        if item >= 0:
            ids.append(item)
    return ids
