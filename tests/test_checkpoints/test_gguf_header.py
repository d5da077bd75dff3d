"""The GGUF header: metadata of every type, and files that are cut short or foreign."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from flexdecode.checkpoints.gguf_header import read_header


def text(value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def header(keys: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def padded(data: bytes, align: int, payload: bytes) -> bytes:
    return data + bytes(-len(data) % align) + payload


SCALARS: list[tuple[int, str, Any]] = [
    (0, "B", 200), (1, "b", -100), (2, "H", 60000), (3, "h", -30000), (4, "I", 4_000_000_000), (5, "i", -7),
    (6, "f", 0.5), (7, "?", True), (10, "Q", 1 << 60), (11, "q", -(1 << 60)), (12, "d", 1e300),
]  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_every_metadata_type(tmp_path: Path, version: int) -> None:
    keys = [text(f"k{kind}") + struct.pack(f"<I{code}", kind, value) for kind, code, value in SCALARS]
    keys += [text(f"a{kind}") + struct.pack(f"<IIQ3{code}", 9, kind, 3, *[value] * 3) for kind, code, value in SCALARS]
    keys.append(text("s") + struct.pack("<I", 8) + text("zażółć 😀"))
    keys.append(text("strings") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("") + text("ü"))
    nested = struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQ2H", 2, 2, 1, 2) + struct.pack("<IQ", 8, 1) + text("x")
    keys.append(text("nested") + nested)
    keys.append(text("empty") + struct.pack("<IIQ", 9, 8, 0))
    keys.append(text("last") + struct.pack("<II", 4, 9))
    (tmp_path / "m.gguf").write_bytes(header(keys, [], version))
    metadata, tensors = read_header(tmp_path / "m.gguf")
    assert tensors == {}
    for kind, _, value in SCALARS:
        assert metadata[f"k{kind}"] == value
        assert type(metadata[f"k{kind}"]) is type(value)
        assert metadata[f"a{kind}"] == [value] * 3
    assert metadata["s"] == "zażółć 😀"
    assert metadata["strings"] == ["a", "", "ü"]
    assert metadata["nested"] == [[1, 2], ["x"]]
    assert metadata["empty"] == []
    assert metadata["last"] == 9
    assert len(metadata) == len(keys)
    assert "absent" not in metadata
    assert metadata.get("absent", 3) == 3
    assert metadata["strings"] is metadata["strings"]  # decoded once


def test_bad_utf8_does_not_stop_a_load(tmp_path: Path) -> None:
    keys = [text("general.name") + struct.pack("<I", 8) + text(b"caf\xe9")]
    (tmp_path / "m.gguf").write_bytes(header(keys, []))
    assert read_header(tmp_path / "m.gguf")[0]["general.name"] == "caf\ufffd"


@pytest.mark.parametrize("align", [1, 8, 32, 64, 4096])
def test_alignment(tmp_path: Path, align: int) -> None:
    keys = [text("general.alignment") + struct.pack("<II", 4, align)]
    file = tmp_path / "m.gguf"
    file.write_bytes(padded(header(keys, [tensor("w", (4, 3), 0, 0)]), align, np.arange(12, dtype="<f4").tobytes()))
    found = read_header(file)[1]["w"]
    assert found.shape == (3, 4)
    assert np.frombuffer(file.read_bytes()[found.offset :][: found.nbytes], "<f4").tolist() == list(range(12))


def test_every_truncation_is_found(tmp_path: Path) -> None:
    keys = [
        text("a") + struct.pack("<I", 8) + text("value"),
        text("b") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yz"),
        text("c") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
    ]
    whole = padded(header(keys, [tensor("w", (32,), 0, 0), tensor("v", (32,), 2, 128)]), 32, bytes(128 + 18))
    file = tmp_path / "m.gguf"
    file.write_bytes(whole)
    read_header(file)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"m\.gguf: ") as error:
            read_header(file)
        assert "download it again" in str(error.value)
        assert "\n" not in str(error.value)
    assert f"tensor v ends at byte {len(whole)} of {len(whole) - 1}" in str(error.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian; convert it"),
        (b"GGUF" + struct.pack("<III", 1, 0, 0), "version 1, and only 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (header([text("k") + struct.pack("<II", 13, 0)], []), "metadata key k has the unknown type 13"),
        (header([text("k") + struct.pack("<IIQ", 9, 13, 1)], []), "metadata key k has the unknown type 13"),
        (header([text("k") + struct.pack("<IIQ", 9, 8, 1 << 62)], []), "cut short inside the header"),
        (header([text("k") + struct.pack("<IIQ", 9, 12, 1 << 62)], []), "cut short inside the header"),
        (header([text("k") + struct.pack("<IIQQ", 9, 8, 2, (1 << 64) - 1)], []), "cut short inside the header"),
        (header([struct.pack("<Q", 1 << 63)], []), "cut short inside the header"),
        (header([text("k") + struct.pack("<II", 4, 0)] * 2, []), "metadata key k appears twice"),
        (header([text("general.alignment") + struct.pack("<II", 4, 0)], []), "general.alignment is 0"),
        (header([], [tensor("w", (1,) * 5, 0, 0)]), "tensor w has 5 dimensions"),
        (header([], [tensor("w", (32,), 999, 0)]), "tensor w has GGUF type 999, which"),
        (header([], [tensor("w", (33,), 2, 0)]), "tensor w has 33 columns, but Q4_0 has blocks of 32"),
        (padded(header([], [tensor("w", (1,), 0, 0)] * 2), 32, bytes(4)), "tensor w appears twice"),
        (padded(header([], [tensor("w", (1 << 40,), 0, 0)]), 32, bytes(4)), "tensor w ends at byte"),
    ],
)
def test_foreign_and_broken_files(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ValueError) as error:
        read_header(tmp_path / "m.gguf")
    assert says in str(error.value)
    assert str(tmp_path / "m.gguf") in str(error.value)


def test_the_packages_own_big_endian_writer(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("w", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="is big-endian; convert it"):
        read_header(tmp_path / "m.gguf")
