"""Hugging Face hub ids to local directories, through huggingface_hub's cache.

Knows nothing of tensors. Only what a model needs is fetched: safetensors, JSON, tokenizer files and chat templates,
never pickles. HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and the rest are huggingface_hub's business; progress bars are its
own, on stderr and only on a terminal.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors

_ALLOW = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
# other formats' copies of the same weights lie in folders, and Mistral's own beside the shards
_IGNORE = ["*/*.safetensors", "*/*.json", "*/*.model", "*/*.txt", "consolidated*.safetensors"]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form owner/name of a hub id."""
    return _ID.fullmatch(text) is not None and len(text) <= 96 and "--" not in text and ".." not in text


def fetch(model_id: str, revision: str | None = None, *, offline: bool = False, tqdm_class: Any = None) -> Path:
    """The local directory of a model, downloaded where the cache does not have it.

    `offline` never touches the network. Raises ValueError (one line, with the remedy) for an id that is malformed,
    unknown or gated, a revision that does not exist, and a network or a cache that does not answer.
    """
    if not is_hub_id(model_id):
        raise ValueError(f"{model_id!r} is not a hub id; one has the form owner/name, as HuggingFaceTB/SmolLM2-135M")
    at = f"{model_id} at revision {revision}" if revision else model_id
    command = f"flexdecode pull {model_id}" + (f" --revision {revision}" if revision else "")
    try:
        path = huggingface_hub.snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=_ALLOW,
            ignore_patterns=_IGNORE,
            local_files_only=offline,
            tqdm_class=tqdm_class,
        )
    except errors.GatedRepoError:
        raise ValueError(
            f"{at}: access is gated; accept the terms on the model's page, then set HF_TOKEN or run `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{at}: not found on the hub; check the spelling; for a private model set HF_TOKEN or run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{model_id}: the hub has no revision {revision!r}; check the spelling") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        where = "the local cache" if offline else "the local cache, and the hub cannot be reached"
        part = " in full" if isinstance(error, errors.IncompleteSnapshotError) else ""
        raise ValueError(f"{at}: not{part} in {where}; run `{command}` while connected") from None
    except (errors.HTTPError, OSError) as error:
        raise ValueError(f"{at}: download failed ({_line(error)}); run `{command}` again") from None
    except ValueError as error:  # huggingface_hub's own check of the id
        raise ValueError(f"{at}: {_line(error)}") from None
    directory = Path(path)
    if not any(directory.glob("*.safetensors")):
        if offline:
            raise ValueError(f"{at}: not in full in the local cache (no weights); run `{command}` while connected")
        raise ValueError(
            f"{at}: the hub repository holds no safetensors; download a .gguf file of it and give its path, or choose "
            "a repository with safetensors"
        )
    return directory


def pull(model_id: str, revision: str | None = None, *, tqdm_class: Any = None) -> Path:
    """Download a model into huggingface_hub's cache, finishing what an earlier try left, and say where it lies.

    `tqdm_class` replaces huggingface_hub's progress bar. Raises ValueError as `fetch` does.
    """
    return fetch(model_id, revision, tqdm_class=tqdm_class)


def _line(error: Exception) -> str:
    """The first line of a message, for errors that print a page."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
