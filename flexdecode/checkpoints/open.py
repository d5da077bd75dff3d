"""open_source: the one door to every kind of checkpoint.

Knows how a model is named, and which source reads what; nothing of what it holds.
"""

from __future__ import annotations

from pathlib import Path

import torch

from flexdecode.checkpoints.demo import demo_path
from flexdecode.checkpoints.gguf import GgufSource
from flexdecode.checkpoints.hub import fetch, is_hub_id
from flexdecode.checkpoints.quantized import with_quantization
from flexdecode.checkpoints.random import RandomSource
from flexdecode.checkpoints.safetensors import SafetensorsSource
from flexdecode.checkpoints.source import Source

_FORMS = "a directory, a .gguf file, a hub id (owner/name), demo, or random:SHAPE[@int4|int8]"


def open_source(
    model: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    dense_dtype: torch.dtype = torch.bfloat16,
) -> Source:
    """The source that reads `model`: a directory, a .gguf file, a hub id, `demo`, or `random:SHAPE[@int4|int8]`.

    A path that exists comes before a hub id of the same spelling. `revision` and `offline` concern hub ids;
    `dense_dtype` what GGUF types without an integer form are read as. Reads headers only, and raises ValueError (one
    line with the remedy) for whatever cannot be opened.
    """
    text = str(model)
    path, exists = _locate(text)
    hub = not (text == "demo" or text.startswith("random:") or exists)
    if revision is not None and not hub:
        raise ValueError(f"{text}: a revision ({revision}) only goes with a hub id; leave it out")
    if text == "demo":
        return GgufSource(demo_path(), dense_dtype=dense_dtype)
    if text.startswith("random:"):
        return RandomSource(text.removeprefix("random:"))
    if path.is_dir():
        return with_quantization(SafetensorsSource(path))
    if exists:
        return _open_file(path, dense_dtype)
    _refuse_path(text, path)
    return with_quantization(SafetensorsSource(fetch(text, revision, offline=offline)))


def _locate(text: str) -> tuple[Path, bool]:
    """The path that a name would mean, and whether it exists. Raises ValueError for what no file can be called."""
    if not text.strip():
        raise ValueError(f"no model given: it is {_FORMS}")
    try:
        path = Path(text).expanduser()
        return path, path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown ~user, a NUL byte
        raise ValueError(f"{text[:80]!r} cannot be a model ({error.__class__.__name__}); it is {_FORMS}") from None


def _open_file(path: Path, dense_dtype: torch.dtype) -> Source:
    if path.suffix in (".safetensors", ".json"):
        raise ValueError(f"{path}: is one file of a model; give the directory that holds it: {path.parent}")
    return GgufSource(path, dense_dtype=dense_dtype)


def _refuse_path(text: str, path: Path) -> None:
    """Raise ValueError for a name that means a path, which does not exist: it must not become a download."""
    if text.lower().endswith((".gguf", ".safetensors")):
        raise ValueError(f"{path}: no such file; check the path")
    if text[0] in "./~\\" or "\\" in text or text.count("/") > 1:
        raise ValueError(f"{path}: no such file or directory; check the path")
    if not is_hub_id(text):
        raise ValueError(f"{text}: no such file or directory, and not a hub id; a model is {_FORMS}")
    if path.parent.is_dir():
        raise ValueError(
            f"{path}: no such directory, though {path.parent} is one; if the hub's {text} is meant, run "
            f"`flexdecode pull {text}` and give the path that it prints"
        )
