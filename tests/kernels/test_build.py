"""Compiling the kernels: once, for this source and this machine, with a failure that explains itself."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from flexdecode.kernels import build


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources to spoil."""
    copy = tmp_path / "cpu"
    shutil.copytree(build.SOURCES, copy)
    monkeypatch.setattr(build, "SOURCES", copy)
    return copy


@pytest.fixture
def one_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all instruction sets the one that compiles quickest."""
    monkeypatch.setattr(build, "ISAS", {})


@pytest.mark.slow
@pytest.mark.usefixtures("one_isa")
def test_built_once_and_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert build.find(tmp_path) is None
    library = build.build(tmp_path)
    assert "compiling" in caplog.text
    caplog.clear()
    before = library.stat().st_mtime_ns
    assert build.build(tmp_path) == library == build.find(tmp_path)
    assert library.stat().st_mtime_ns == before
    assert caplog.text == ""
    assert [path.name for path in library.parent.iterdir()] == [library.name]


def test_another_source_is_another_library(sources: Path, tmp_path: Path) -> None:
    key = build._key({})
    (sources / "vec.h").write_text((sources / "vec.h").read_text() + "\n// more\n")
    assert build._key({}) != key


@pytest.mark.usefixtures("one_isa")
def test_a_failure_tells_what_the_compiler_said(sources: Path, tmp_path: Path) -> None:
    (sources / "isa.cpp").write_text("#error this cannot be compiled\n")
    with pytest.raises(build.KernelsUnavailableError, match="this cannot be compiled") as caught:
        build.build(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").rglob("*.so")) == []


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    for call in (build.build, build.find):
        with pytest.raises(build.KernelsUnavailableError, match=r"no C\+\+ compiler.*install"):
            call(tmp_path)


def test_every_machine_has_a_portable_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in ("x86_64", "aarch64", "riscv64"):
        monkeypatch.setattr("platform.machine", lambda name=machine: name)
        assert "portable" in build.isas()


@pytest.mark.parametrize(
    ("flags", "exit_code", "there"), [("amx_bf16", 0, True), ("amx_bf16", 1, False), ("avx2", 0, False)]
)
def test_amx_needs_a_processor_and_a_compiler_that_have_it(
    flags: str, exit_code: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo, cxx = tmp_path / "cpuinfo", tmp_path / "c++"
    cpuinfo.write_text(f"flags\t\t: fpu {flags} avx512f\n")
    cxx.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    cxx.chmod(0o755)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(build, "compiler", lambda: str(cxx))
    assert ("amx" in build.isas()) == there
    assert "avx512bf16" in build.isas()
