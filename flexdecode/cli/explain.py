"""What a verb says about a loaded model under --verbose: the form of its prompts, the settings, the choices made.

Knows LLM and SamplingParams from the outside; writes to stderr.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from flexdecode.cli.text import note

if TYPE_CHECKING:
    from flexdecode.generation.params import SamplingParams
    from flexdecode.llm import LLM


def has_chat_template(llm: LLM) -> bool:
    return llm.tokenizer is not None and bool(llm.tokenizer.hf.chat_template)


def settings(params: SamplingParams) -> str:
    """The fields of `params` that are set to something."""
    values = ((field.name, getattr(params, field.name)) for field in fields(params))
    # Not a plain comparison with False, which 0 equals: a temperature of 0 is a setting.
    return ", ".join(
        f"{name} {value}"
        for name, value in values
        if value is not None and value is not False and value not in ((), {})
    )


def explain(llm: LLM, params: SamplingParams, chat: bool) -> None:
    """On stderr: the form of the prompt, the settings in force, and the choices that LLM made."""
    note("prompt: " + ("in the model's chat template" if chat else "as it is, no chat template"))
    note(f"sampling: {settings(params.resolve(llm.generation_config))}")
    for key, value in llm.describe().items():
        note(f"{key}: {value}")
