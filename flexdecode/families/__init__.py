"""A model family is data: a config reader (`readers`) and a table of weight names (`names`). No torch modules.

`resolve` turns an opened checkpoint into what the decoder needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from flexdecode.checkpoints.source import Source
from flexdecode.config import ModelConfig
from flexdecode.families import gguf, names, readers
from flexdecode.families.names import Names
from flexdecode.families.reader import ConfigReader


@dataclass(frozen=True)
class Family:
    """How one `model_type` is read."""

    read_config: Callable[[ConfigReader], ModelConfig]
    names: Names


FAMILIES: dict[str, Family] = {
    "llama": Family(readers.llama, names.LLAMA),
    "mistral": Family(readers.mistral, names.LLAMA),
    "qwen2": Family(readers.qwen2, names.LLAMA),
    "qwen3": Family(readers.qwen3, names.LLAMA),
    "gemma2": Family(readers.gemma2, names.GEMMA),
    "gemma3_text": Family(readers.gemma3, names.GEMMA),
    "phi3": Family(readers.mistral, names.PHI3),
    "smollm3": Family(readers.smollm3, names.LLAMA),
    "olmo2": Family(readers.olmo2, names.OLMO2),
    "granite": Family(readers.granite, names.LLAMA),
    "mixtral": Family(readers.mixtral, names.MIXTRAL),
    "qwen3_moe": Family(readers.qwen3_moe, names.LLAMA),
    "gpt_oss": Family(readers.gpt_oss, names.GPT_OSS),
}

# Models of several modalities whose text part is a family above: the text config stands inside, the other tensors go.
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_WRAPPERS: dict[str, tuple[str, ...]] = {"gemma3": _VISION}


def resolve(source: Source, ignore_config: Collection[str] = ()) -> tuple[ModelConfig, Names]:
    """The decoder's description and the names of its weights.

    `ignore_config` lists config keys to pass over. Raises ValueError for a family, a key or a value not understood.
    """
    if source.format == "gguf":
        raw, table = gguf.translate(source)
    else:
        raw, table = dict(source.config), None
    drop: tuple[str, ...] = ()
    if raw.get("model_type") in _WRAPPERS and isinstance(raw.get("text_config"), dict):
        drop = _WRAPPERS[str(raw["model_type"])]
        raw = {"dtype": raw.get("dtype") or raw.get("torch_dtype"), **raw["text_config"]}
    model_type = raw.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise ValueError(
            f"{source.path}: model_type {model_type!r} is not supported (known: {', '.join(sorted(FAMILIES))})"
        )
    reader = ConfigReader(raw, str(source.path), ignore_config)
    config = family.read_config(reader)
    reader.finish()
    found = _prefixed(table or family.names, source)
    return config, replace(found, drop=found.drop + drop)


def _prefixed(table: Names, source: Source) -> Names:
    """The table under the prefix that the file uses: none for a base model saved without its head, the language
    model's inside a wrapper."""
    present = source.names()
    if not table.embed.startswith("model.") or f"{table.embed}.weight" in present:
        return table
    for prefix in ("", "language_model.model.", "model.language_model."):
        embed = prefix + table.embed.removeprefix("model.")
        if f"{embed}.weight" in present:
            norm, layer = (prefix + name.removeprefix("model.") for name in (table.norm, table.layer))
            head = "language_model.lm_head" if prefix == "language_model.model." else table.head
            return replace(table, embed=embed, norm=norm, layer=layer, head=head)
    return table
