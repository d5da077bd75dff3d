"""Reading the machine, from made-up /proc files and paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode.cli import machine

X86 = (
    "processor\t: 0\nmodel name\t: Imaginary 9000\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n\nprocessor\t: 1\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16 sve\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "isa"),
    [
        (X86, ["avx2", "avx512f", "avx512_bf16", "amx_tile"]),
        (ARM, ["neon", "dotprod", "i8mm", "bf16", "sve"]),
        ("", []),
    ],
)
def test_cpu_flags_of_both_architectures(text: str, isa: list[str]) -> None:
    found = machine.cpu(text)
    assert found["isa"] == isa
    assert found["model"], "never empty, whatever the file lacks"
    assert found["processors"] >= 1


def test_memory_is_in_bytes() -> None:
    found = machine.memory()
    assert found["total_bytes"] is None or found["total_bytes"] > 1 << 26


def test_absent_packages_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("typer", "no-such-package-of-ours"))
    found = machine.versions()
    assert found["typer"]
    assert found["no-such-package-of-ours"] is None


def test_the_compiler_is_the_first_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.compiler() == {"path": None, "version": None}
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho 'my-c++ 1.2.3'\necho more\n")
    fake.chmod(0o755)
    assert machine.compiler() == {"path": str(fake), "version": "my-c++ 1.2.3"}


def test_kernels_say_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexdecode.kernels import build, ops

    ops.use_isa()
    assert machine.kernels() == {"state": "compiled", "in_use": ops.use_isa(), "runnable": ops.isas()}
    monkeypatch.setattr(build, "find", lambda folder: None)
    assert "not compiled yet" in machine.kernels()["state"]
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.undo()
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert "no C++ compiler" in machine.kernels()["reason"]


def test_a_demo_model_that_is_absent_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Path:
        raise ValueError("demo: run this")

    monkeypatch.setattr("flexdecode.checkpoints.demo.demo_path", absent)
    assert machine.demo_model() == {"present": False, "remedy": "demo: run this"}
