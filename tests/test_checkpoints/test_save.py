"""Directories that are written: whole files only, and what an index must say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexdecode.checkpoints import save
from flexdecode.checkpoints.index import read_header
from flexdecode.checkpoints.safetensors import SafetensorsSource


def write(directory: Path) -> None:
    save.write_json(directory / "config.json", {"model_type": "llama"})
    for number, names in enumerate([("b", "a"), ("c",)]):
        save.write_tensors(
            directory / save.shard_name(number, 2), {name: torch.full((2, 3), ord(name)).float() for name in names}
        )
    save.write_index(directory, 2)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    write(tmp_path)
    source = SafetensorsSource(tmp_path)
    assert sorted(source.names()) == ["a", "b", "c"]
    assert float(source.read("b")[0, 0]) == ord("b")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 24
    assert list(index["weight_map"]) == ["a", "b", "c"]
    assert list(save.leftovers(tmp_path)) == []


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    write(tmp_path)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert modes == {plain.stat().st_mode & 0o777}


def test_the_same_tensors_make_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.zeros(2)}
    save.write_tensors(tmp_path / "1", tensors)
    save.write_tensors(tmp_path / "2", dict(reversed(tensors.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    save.write_json(path, {"a": 1})

    def fail(number: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [left.name for left in save.leftovers(tmp_path)] == ["config.json.tmp"]


def test_two_shards_with_one_name_are_refused(tmp_path: Path) -> None:
    for number in range(2):
        save.write_tensors(tmp_path / save.shard_name(number, 2), {"a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"tensor a is also in model-00001-of-00002\.safetensors"):
        save.write_index(tmp_path, 2)


def test_what_stands_beside_the_weights(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    wanted = {"tokenizer.json", "chat_template.jinja", "vocab.json", "tokenizer.model", "LICENSE", "merges.txt"}
    for name in wanted | {"config.json", "model.safetensors", "README.md", "pytorch_model.bin"}:
        (tmp_path / "a" / name).write_text(name)
    assert set(save.copy_beside(tmp_path / "a", tmp_path / "b")) == wanted
    assert {path.name for path in (tmp_path / "b").iterdir()} == wanted


def test_shards_are_joined_with_every_tensor_in_its_place(tmp_path: Path) -> None:
    """Types of all widths, an odd number of bytes, an empty tensor and a single number; mapped without a copy after."""
    generator = torch.Generator().manual_seed(0)
    shards = [
        {"b": torch.randint(0, 255, (3, 5), dtype=torch.uint8, generator=generator), "d": torch.randn(7).bfloat16()},
        {"a": torch.tensor([3, 5]), "c": torch.randn(4, 3).half(), "e": torch.empty(0, 4), "f": torch.tensor(2.5)},
        {"g": torch.randint(-9, 9, (2, 3), dtype=torch.int32, generator=generator)},
    ]
    save.write_json(tmp_path / "config.json", {"model_type": "llama"})
    for number, shard in enumerate(shards):
        save.write_tensors(tmp_path / save.shard_name(number, 3), shard)
    save.join_shards(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    source, read = SafetensorsSource(tmp_path), load_file(tmp_path / "model.safetensors")
    for name, tensor in {name: t for shard in shards for name, t in shard.items()}.items():
        assert torch.equal(source.read(name), tensor)
        assert torch.equal(read[name], tensor)
    entries = read_header(tmp_path / "model.safetensors").values()
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in entries if entry.nbytes)
