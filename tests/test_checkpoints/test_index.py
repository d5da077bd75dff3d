"""Headers and the index, checked against each other at opening."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flexdecode.checkpoints.index import find_tensors, read_header
from tests.test_checkpoints.builders import INDEX, write_model, write_shards

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "m", {"a": torch.ones(4, 4), "b": torch.ones(2)}, {"c": torch.ones(3)})


def edit_index(directory: Path, **changes: str | None) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= changes
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    (directory / INDEX).write_text(json.dumps(index))


def refused(directory: Path) -> str:
    with pytest.raises(ValueError) as error:
        find_tensors(directory)
    message = str(error.value)
    assert "\n" not in message
    assert "again" in message or "download" in message
    return message


def test_single_file_without_an_index(tmp_path: Path) -> None:  # B15 (a)
    """A small model without an index was refused by loaders that know shards only."""
    assert set(find_tensors(write_model(tmp_path / "m", {"a": torch.ones(2)}))) == {"a"}


def test_index_of_a_single_shard(tmp_path: Path) -> None:  # B15 (e)
    assert set(find_tensors(write_shards(tmp_path / "m", {"a": torch.ones(2)}))) == {"a"}


def test_missing_shard(sharded: Path) -> None:  # B15 (b)
    (sharded / B).unlink()
    message = refused(sharded)
    assert f"{sharded / B}: missing" in message
    assert "tensor c" in message


def test_tensor_that_the_shard_lacks(sharded: Path) -> None:  # B15 (c)
    edit_index(sharded, absent=A)
    assert f"{sharded / A}: lacks tensor absent" in refused(sharded)


def test_zero_length_shard(sharded: Path) -> None:  # B15 (d)
    (sharded / B).write_bytes(b"")
    assert f"{sharded / B}: is empty (0 bytes)" in refused(sharded)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    """A download that stopped is found at opening, wherever it stopped."""
    model = write_model(tmp_path / "m", {"first": torch.ones(4), "last": torch.ones(4)})
    file = model / "model.safetensors"
    data = file.read_bytes()
    for size in range(len(data)):
        file.write_bytes(data[:size])
        assert str(file) in refused(model)
    file.write_bytes(data[:-1])
    assert f"tensor last ends at byte {len(data)} of {len(data) - 1}" in refused(model)
    file.write_bytes(data + b"\0")
    assert f"end at byte {len(data)} but the file has {len(data) + 1}" in refused(model)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>404</html>", "not a safetensors file"),
        (b"PK\x03\x04" + bytes(40), "cut short"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((3).to_bytes(8, "little") + b"{,}", "not JSON"),
    ],
)
def test_foreign_content(sharded: Path, content: bytes, says: str) -> None:
    (sharded / A).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        find_tensors(sharded)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"dtype": "F32", "shape": [1]}, "malformed"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "malformed"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "malformed"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "malformed"),
        ({"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}, "malformed"),
        ([], "malformed"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8 bytes but the header gives it 4"),
        ({"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}, "dtype 'F4'"),
    ],
)
def test_wrong_entries(tmp_path: Path, record: object, says: str) -> None:
    header = json.dumps({"some.tensor": record}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=rf"x\.safetensors: .*tensor some\.tensor.*{says}"):
        read_header(tmp_path / "x.safetensors")


def test_what_the_file_holds_decides(sharded: Path) -> None:
    """A tensor that the index forgot is read: a loader that trusts the index alone would call it missing."""
    edit_index(sharded, b=None)
    assert set(find_tensors(sharded)) == {"a", "b", "c"}


def test_the_index_decides_between_two_copies(sharded: Path) -> None:
    save_file({"c": torch.ones(3), "a": torch.zeros(4, 4)}, sharded / B)
    assert find_tensors(sharded)["a"].file.name == A
    edit_index(sharded, a=None)
    assert "tensor a is also in" in refused(sharded)


def test_the_single_file_wins_over_an_index(sharded: Path) -> None:
    save_file({"only": torch.ones(1)}, sharded / "model.safetensors")
    assert set(find_tensors(sharded)) == {"only"}


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert f"holds 2 safetensors files ({A} …) but no {INDEX}" in refused(sharded)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_broken_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refused(sharded)


@pytest.mark.parametrize("shard", ["../other/x.safetensors", "/x.safetensors", "sub/x.safetensors"])
def test_shards_stay_in_the_directory(sharded: Path, shard: str) -> None:
    edit_index(sharded, a=shard)
    assert "not a plain file name" in refused(sharded)
