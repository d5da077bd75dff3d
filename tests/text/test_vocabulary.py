"""Two vocabularies are the same, or the difference is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexdecode.checkpoints.open import open_source
from flexdecode.text.tokenizer import Tokenizer
from flexdecode.text.vocabulary import check_same_vocabulary
from tests.checkpoints import tiny


def tokenizer(d: Path, change: Any = None) -> Tokenizer:
    """The tests' tokenizer, with a change to its file."""
    d.mkdir()
    tiny(d, num_hidden_layers=1)
    if change is not None:
        data = json.loads((d / "tokenizer.json").read_text())
        change(data)
        (d / "tokenizer.json").write_text(json.dumps(data))
    return Tokenizer.load(open_source(str(d)))


def test_the_same_and_others(tmp_path: Path) -> None:
    def swapped(data: Any) -> None:
        vocab = data["model"]["vocab"]
        a, b = (token for token, token_id in vocab.items() if token_id in (70, 71))
        vocab[a], vocab[b] = vocab[b], vocab[a]

    def longer(data: Any) -> None:
        data["model"]["vocab"]["more"] = 260

    def renamed(data: Any) -> None:
        data["added_tokens"][2]["content"] = "<end>"

    one = tokenizer(tmp_path / "one")
    check_same_vocabulary(one, tokenizer(tmp_path / "same"))
    with pytest.raises(ValueError, match=r"other has 261 tokens and .*one has 260: a draft needs the same vocabulary"):
        check_same_vocabulary(one, tokenizer(tmp_path / "other", longer))
    with pytest.raises(ValueError, match=r"token 70 is .* in .*swapped and .* in .*one: a draft needs the same"):
        check_same_vocabulary(one, tokenizer(tmp_path / "swapped", swapped))
    with pytest.raises(ValueError, match=r"token 258 is '<end>' in .*renamed and '<eot>' in .*one"):
        check_same_vocabulary(one, tokenizer(tmp_path / "renamed", renamed))
