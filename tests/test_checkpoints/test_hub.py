"""Hub ids: what is asked of huggingface_hub, its cache without a network, and its errors in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from flexdecode.checkpoints.hub import fetch, is_hub_id, pull
from flexdecode.checkpoints.open import open_source
from tests.test_checkpoints.builders import write_model

ID = "owner/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a network that must not be touched."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def store(cache: Path, revision: str = "main") -> Path:
    """What a download leaves: a ref, and a snapshot of links to blobs."""
    repo = cache / "models--owner--some-model"
    snapshot = repo / "snapshots" / COMMIT
    write_model(repo / "blobs", {"a": torch.arange(3.0)})
    snapshot.mkdir(parents=True)
    for file in (repo / "blobs").iterdir():
        os.symlink(os.path.relpath(file, snapshot), snapshot / file.name)
    (repo / "refs").mkdir()
    (repo / "refs" / revision).write_text(COMMIT)
    return snapshot


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as error:
        fetch(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "text", ["a/b", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B-Instruct", "0x/y_z", "hf-internal-testing/tiny.x"]
)
def test_ids(text: str) -> None:
    assert is_hub_id(text)


@pytest.mark.parametrize(
    "text", ["gpt2", "a/b/c", "./a", "/a/b", "a/", "/a", "", "a b/c", "a/b--c", "a/..", "-a/b", "a/" + "b" * 96, "a\\b"]
)
def test_no_ids(text: str) -> None:
    assert not is_hub_id(text)
    assert "is not a hub id; one has the form owner/name" in refused(text)


def test_a_cached_model_without_a_network(cache: Path) -> None:
    snapshot = store(cache)
    assert fetch(ID, offline=True) == snapshot
    assert fetch(ID) == snapshot  # HF_HUB_OFFLINE, or no network: the cache serves
    assert fetch(ID, COMMIT, offline=True) == snapshot
    assert pull(ID) == snapshot
    source = open_source(ID, offline=True)
    assert source.path == snapshot
    assert source.read("a").tolist() == [0, 1, 2]  # type: ignore[union-attr]


def test_a_revision(cache: Path) -> None:
    snapshot = store(cache, revision="v2")
    assert open_source(ID, revision="v2", offline=True).path == snapshot
    assert f"{ID}: not in the local cache" in refused(ID, offline=True)
    assert f"run `flexdecode pull {ID} --revision v3` while" in refused(ID, "v3", offline=True)


def test_not_cached(cache: Path) -> None:
    assert refused(ID, offline=True) == f"{ID}: not in the local cache; run `flexdecode pull {ID}` while connected"
    assert "not in the local cache, and the hub cannot be reached; run `flexdecode pull" in refused(ID)


def test_cached_without_weights(cache: Path) -> None:
    """Reading a tokenizer or config alone leaves a snapshot without weights."""
    (store(cache) / "model.safetensors").unlink()
    assert f"not in full in the local cache (no weights); run `flexdecode pull {ID}`" in refused(ID, offline=True)


def test_what_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights once, and never a pickle: repositories hold the same weights in four formats."""
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(write_model(tmp_path / "m", {"a": torch.ones(1)}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    bar = object()
    assert pull(ID, "v1", tqdm_class=bar) == tmp_path / "m"
    assert (asked["repo_id"], asked["revision"], asked["local_files_only"]) == (ID, "v1", False)
    assert asked["tqdm_class"] is bar
    fetch(ID, offline=True)
    assert asked["local_files_only"] is True
    wanted = [
        "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "merges.txt",
        "chat_template.jinja", "additional_chat_templates/tool.jinja", "quant_config.json",
    ]  # fmt: skip
    others = [
        "pytorch_model.bin", "model.pth", "consolidated.safetensors", "consolidated.00.pth", "model-q4.gguf",
        "original/model.safetensors", "original/params.json", "onnx/model.onnx", "tf_model.h5", "README.md",
        "flax_model.msgpack", "onnx/config.json",
    ]  # fmt: skip
    patterns = {"allow_patterns": asked["allow_patterns"], "ignore_patterns": asked["ignore_patterns"]}
    assert list(filter_repo_objects(wanted + others, **patterns)) == wanted


class Response:
    """As much of a response as huggingface_hub's errors look at."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    status_code = 404


def http(kind: type[Exception]) -> Exception:
    return kind("404 Client Error.\n\nRepository Not Found for url: x.\nPlease …", response=Response())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (http(errors.GatedRepoError), "owner/some-model: access is gated; accept the terms on the model's page"),
        (http(errors.RepositoryNotFoundError), "owner/some-model: not found on the hub; check the spelling"),
        (http(errors.RevisionNotFoundError), "owner/some-model: the hub has no revision None"),
        (
            http(errors.HfHubHTTPError),
            "download failed (404 Client Error.); run `flexdecode pull owner/some-model` again",
        ),
        (errors.LocalEntryNotFoundError("x\ny"), "not in the local cache, and the hub cannot be reached"),
        (errors.IncompleteSnapshotError("x", "y"), "not in full in the local cache"),
        (errors.OfflineModeIsEnabled("x"), "not in the local cache"),
        (errors.HTTPError("connection reset\nlong story"), "download failed (connection reset); run"),
        (OSError(28, "No space left on device"), "download failed ([Errno 28] No space left on device); run"),
        (TimeoutError(), "download failed (TimeoutError); run"),
        (errors.HFValidationError("bad id"), "owner/some-model: bad id"),
    ],
)
def test_errors_in_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert says in refused(ID)


def test_a_repository_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **kwargs: str(tmp_path))
    assert "the hub repository holds no safetensors; download a .gguf file of it" in refused(ID)
