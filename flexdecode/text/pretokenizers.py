"""How a GGUF file's byte-level BPE cuts text before merging: `tokenizer.ggml.pre` -> a pre-tokenizer.

The names are llama.cpp's; each stands for the pre-tokenizer in the tokenizer.json of the models it was made for. A name
that is not here is refused: with the wrong cuts a model reads other tokens than it was trained on, and nothing fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_OR_PUNCTUATION = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_LLAMA3 = _CONTRACTIONS + "|" + _WORD_OR_PUNCTUATION.replace("{DIGITS}", "{1,3}")
_QWEN2 = _CONTRACTIONS + "|" + _WORD_OR_PUNCTUATION.replace("{DIGITS}", "")

# Words told apart by case: [lead][upper]*[lower]+ or [lead][upper]+[lower]*.
_LEAD, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}" + _PUNCTUATION + _TAIL
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    + _PUNCTUATION
    + _TAIL
)


@dataclass(frozen=True)
class Cut:
    """One kind of pre-tokenizer. `ignore_merges`: a whole word that is a token is that token, whatever the merges say.
    `add_bos`: whether a beginning-of-sequence token is added where the file does not say."""

    patterns: tuple[str, ...] = ()  # each cuts the pieces that the one before left
    gpt2: bool = False  # and GPT-2's own pattern after them
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> Any:
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Any:
        return normalizers.NFC() if self.nfc else None


_GPT2 = Cut(gpt2=True)
_DIGITS = Cut((r"\p{N}",), gpt2=True)  # each digit on its own

CUTS: dict[str, Cut] = {
    "default": Cut(
        (
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            r"[0-9][0-9][0-9]",
        )
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), Cut((_LLAMA3,), ignore_merges=True, add_bos=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Cut((_LLAMA3,))),
    "qwen2": Cut((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), Cut((_QWEN2,))),
    "tekken": Cut((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Cut((_GPT4O,))),
}


def cut_named(name: str, file: str) -> Cut:
    """The pre-tokenizer of that name. Raises ValueError naming it, the file and those that are known."""
    cut = CUTS.get(name)
    if cut is None:
        known = ", ".join(sorted(CUTS))
        raise ValueError(f"{file}: tokenizer.ggml.pre is {name!r}, which is not supported; supported are {known}")
    return cut
