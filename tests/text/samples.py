"""Small tokenizers of every kind that text/ treats differently, built in memory or in a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from flexdecode.text.tokenizer import Tokenizer

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = [f"{SPACE}a", f"{SPACE}b", "c", SPACE, "é", f"{SPACE}{SPACE}", "a", "b"]

LLAMA = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
GEMMA = LLAMA[:3]

# name -> decoder; all down to "none" have an incremental form, the others go through the window
DECODERS: dict[str, Any] = {
    "llama": lambda: decoders.Sequence(LLAMA),
    "gemma": lambda: decoders.Sequence(GEMMA),
    "metaspace": lambda: decoders.Metaspace(),
    "metaspace-never": lambda: decoders.Metaspace(prepend_scheme="never"),
    "fallback-metaspace": lambda: decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "none": lambda: None,
    "wordpiece": lambda: decoders.WordPiece(cleanup=False),
    "suffix": lambda: decoders.BPEDecoder(suffix="b"),
    "long-replace": lambda: decoders.Sequence([decoders.Replace(SPACE * 2, "  "), *LLAMA]),
}


def metaspace_backend(decoder: str = "llama") -> Backend:
    """SentencePiece-like: `<unk> <s> </s>`, 256 byte tokens, WORDS, and an added token that is not special."""
    tokens = [*SPECIAL, *BYTES, *WORDS]
    vocab = {token: place for place, token in enumerate(tokens)}
    merges = [(SPACE, "a"), (SPACE, "b"), (SPACE, SPACE)]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    made = DECODERS[decoder]()
    if made is not None:
        backend.decoder = made
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return backend


def wrapped(backend: Backend, **names: Any) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **names))


def metaspace(decoder: str = "llama") -> Tokenizer:
    return wrapped(metaspace_backend(decoder), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def digits_backend() -> Backend:
    """Byte-level with SmolLM's cuts (each digit alone) and one merge that shows them: two spaces before a digit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: place for place, char in enumerate(alphabet)} | {"\u0120\u0120": 256}
    backend = Backend(models.BPE(vocab=vocab, merges=[("\u0120", "\u0120")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    return backend


def write_directory(
    path: Path,
    backend: Backend,
    config: Mapping[str, Any] | None = None,
    model_type: str = "llama",
    files: Mapping[str, str] | None = None,
) -> Path:
    """A model directory as a hub repository has it, without weights. `config` None: no tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 300}))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (path / name).write_text(text)
    return path


def source(path: Path, format: str = "hf", config: Mapping[str, Any] | None = None) -> Any:
    """As much of a checkpoint source as a tokenizer needs."""
    return SimpleNamespace(format=format, path=path, config=config or {}, generation_config={})


def load(path: Path) -> Tokenizer:
    return Tokenizer.load(source(path))
