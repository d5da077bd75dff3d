"""Mapping bytes and reading JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flexdecode.checkpoints.files import as_dtype, map_bytes, read_json


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 4097, 70000])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 9001])
def test_any_run_of_bytes(tmp_path: Path, offset: int, nbytes: int) -> None:
    data = bytes(i * 7 % 251 for i in range(90000))
    (tmp_path / "f").write_bytes(data)
    assert bytes(map_bytes(tmp_path / "f", offset, nbytes).tolist()) == data[offset : offset + nbytes]


def test_writing_to_a_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    map_bytes(tmp_path / "f", 0, 100).fill_(1)
    assert (tmp_path / "f").read_bytes() == bytes(100)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_mapping_leaves_with_its_tensor(tmp_path: Path) -> None:
    """Peak memory is that of what is kept: no handle may keep a file's pages resident."""
    file = tmp_path / "weights-of-this-test"
    file.write_bytes(bytes(1 << 16))
    tensor = map_bytes(file, 10, 60000).view(torch.int16)[5:]
    assert file.name in Path("/proc/self/maps").read_text()
    del tensor
    assert file.name not in Path("/proc/self/maps").read_text()


def test_unaligned_bytes_are_copied(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\0" + torch.arange(6, dtype=torch.float32).numpy().tobytes())
    tensor = as_dtype(map_bytes(tmp_path / "f", 1, 24), torch.float32, (2, 3))
    assert tensor.data_ptr() % 4 == 0
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_beyond_the_end_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    with pytest.raises(ValueError, match=r"f: bytes 4 to 20 cannot be mapped"):
        map_bytes(tmp_path / "f", 4, 16)
    with pytest.raises(ValueError, match=r"gone: bytes 0 to 1 cannot be mapped"):
        map_bytes(tmp_path / "gone", 0, 1)


@pytest.mark.parametrize("text", [b"", b"{", b"{'a': 1}", b"\xff\xfe", b"[1]", b"null", b"3"])
def test_json_that_is_no_object(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "c.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"c\.json: ") as error:
        read_json(tmp_path / "c.json")
    assert "\n" not in str(error.value)


def test_json_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"c\.json: cannot be read"):
        read_json(tmp_path / "c.json")
