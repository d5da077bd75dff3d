"""A tokenizer from the metadata of a GGUF file (the keys `tokenizer.*`).

Knows the metadata only, not the file: a mapping from keys to Python values. Two models are built: "gpt2", byte-level
BPE, and "llama", SentencePiece BPE with scores and byte fallback. Source of the keys: the GGUF specification; of what
they mean where it is silent: llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from flexdecode.text.pretokenizers import Cut, cut_named

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# Tokens that end a turn or a document wherever they exist as control tokens: older files have no eot_token_id.
_END_NAMES = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the specification
    "mask_token": "mask_token_id",
}
_PADDING = re.compile(r"\[PAD\d+\]")


def build(metadata: Mapping[str, Any], file: str) -> tuple[PreTrainedTokenizerFast, tuple[int, ...]]:
    """The tokenizer, and the ids that end a sequence. `file` is for messages.

    Raises ValueError naming the file and the key for a tokenizer model or pre-tokenizer that is not supported, and for
    metadata that contradicts itself.
    """
    vocab = _Vocabulary(metadata, file)
    cut: Cut | None = None
    try:
        if vocab.model == "gpt2":
            cut = cut_named(str(vocab.get("pre", "default")), file)
            backend = _byte_level(vocab, cut)
        elif vocab.model == "llama":
            backend = _sentencepiece(vocab)
        else:
            raise ValueError(
                f"{file}: tokenizer.ggml.model is {vocab.model!r}; "
                "supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
            )
        backend.add_tokens(vocab.added_tokens())
    except ValueError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(f"{file}: the tokenizer in its metadata cannot be built: {error}") from error
    adds_bos = vocab.get("add_bos_token", vocab.model == "llama" if cut is None else cut.add_bos)
    named = {name: vocab.named(key) for name, key in _SPECIAL_KEYS.items()}
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=bool(adds_bos) and named["bos_token"] is not None,
        add_eos_token=bool(vocab.get("add_eos_token", False)) and named["eos_token"] is not None,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token is not None},
    )
    hf.chat_template = _chat_template(metadata)
    return hf, vocab.end_ids()


class _Vocabulary:
    """The metadata's token lists, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self._metadata = metadata
        self._file = file
        self.model = metadata.get("tokenizer.ggml.model")
        self.architecture = metadata.get("general.architecture")
        self.tokens: list[str] = list(self.get("tokens", ()))
        if not self.tokens:
            raise ValueError(f"{file}: no tokens in its metadata (tokenizer.ggml.tokens)")
        self.types = self._aligned("token_type", int) or [_NORMAL] * len(self.tokens)
        self.scores = self._aligned("scores", float)
        # Ids that only fill the embedding up to a round number have no text.
        unused = {i for i, kind in enumerate(self.types) if kind == _UNUSED and _PADDING.fullmatch(self.tokens[i])}
        self.ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if token and token_id not in unused:
                self.ids.setdefault(token, token_id)

    def get(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return default if value is None else value

    def _aligned(self, key: str, kind: Any) -> list[Any]:
        values = [kind(value) for value in self.get(key, ())]
        if values and len(values) != len(self.tokens):
            raise ValueError(
                f"{self._file}: tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens"
            )
        return values

    def special_id(self, key: str) -> int | None:
        """The id under tokenizer.ggml.KEY; SentencePiece's usual ones where a "llama" file names none."""
        usual = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if self.model == "llama" else {}
        token_id = self.get(key, usual.get(key))
        if token_id is None:
            return None
        if not 0 <= int(token_id) < len(self.tokens):
            raise ValueError(
                f"{self._file}: tokenizer.ggml.{key} is {token_id}, but there are {len(self.tokens)} tokens"
            )
        return int(token_id)

    def named(self, key: str) -> str | None:
        token_id = self.special_id(key)
        return None if token_id is None else self.tokens[token_id]

    def merges(self) -> list[tuple[str, str]]:
        """The stored merges. The left part has at least one character, so a merge may begin with a space."""
        pairs = []
        for merge in self.get("merges", ()):
            place = merge.find(" ", 1)
            if place < 0:
                raise ValueError(f"{self._file}: tokenizer.ggml.merges has {merge!r}, which is not two tokens")
            pairs.append((merge[:place], merge[place + 1 :]))
        return pairs

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are found whole in any text: control tokens, and those that the model's makers defined."""
        special = {_CONTROL, _UNKNOWN}
        # Phi-3's control tokens swallow the white space after them, except those that open or close a document.
        swallow = self.architecture == "phi3" and self.model == "llama"
        keep = {"<unk>", "<s>", "<|endoftext|>"}
        return [
            AddedToken(
                token,
                special=self.types[token_id] in special,
                normalized=False,
                rstrip=swallow and self.types[token_id] in special and token not in keep,
            )
            for token, token_id in self.ids.items()
            if self.types[token_id] in (special | {_USER_DEFINED})
        ]

    def end_ids(self) -> tuple[int, ...]:
        ids = [token_id for key in _END_KEYS if (token_id := self.special_id(key)) is not None]
        # In the harmony format <|end|> only closes one message of a turn; <|return|> ends it.
        harmony = "<|return|>" in self.ids
        for name in _END_NAMES:
            token_id = self.ids.get(name)
            if token_id is not None and self.types[token_id] == _CONTROL and not (harmony and name == "<|end|>"):
                ids.append(token_id)
        return tuple(dict.fromkeys(ids))


def _byte_level(vocab: _Vocabulary, cut: Cut) -> Backend:
    backend = Backend(models.BPE(vocab=vocab.ids, merges=vocab.merges(), ignore_merges=cut.ignore_merges))
    if cut.nfc:
        backend.normalizer = cut.normalizer()
    backend.pre_tokenizer = cut.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocab: _Vocabulary) -> Backend:
    merges = vocab.merges() or _merges_by_score(vocab)
    unknown = vocab.named("unknown_token_id")
    backend = Backend(models.BPE(vocab=vocab.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "\u2581")
    decoding: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocab.get("add_space_prefix", True):
        # Before every stretch of text between special tokens, as SentencePiece's dummy prefix.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges_by_score(vocab: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the adjacent pair whose union has the best score. As ranked merges: every way to cut a token
    in two tokens, the tokens in falling order of their scores (equal scores in the order of their ids)."""
    if not vocab.scores:
        raise ValueError(f"{vocab._file}: a 'llama' tokenizer needs tokenizer.ggml.scores or tokenizer.ggml.merges")
    joinable = {token: i for token, i in vocab.ids.items() if vocab.types[i] in (_NORMAL, _UNUSED)}
    merges: list[tuple[str, str]] = []
    for token in sorted(joinable, key=lambda token: (-vocab.scores[joinable[token]], joinable[token])):
        cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in joinable and right in joinable]
        merges += sorted(pairs, key=lambda pair: (joinable[pair[0]], joinable[pair[1]]))
    return merges


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The file's template, or its templates by name where it has several ("default" is the unnamed one)."""
    default = metadata.get("tokenizer.chat_template")
    names: Sequence[str] = metadata.get("tokenizer.chat_templates") or ()
    named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in names}
    if not named:
        return default
    return named if default is None else {"default": default, **named}
