"""Every row says where it comes from, and nothing is made up where that cannot be found out."""

from __future__ import annotations

import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
import torch

from flexdecode import __version__
from flexdecode.benchmark import provenance as module
from flexdecode.benchmark.provenance import commit, cpu_model, provenance
from flexdecode.kernels.build import KernelsUnavailableError


def test_the_fields_of_a_row() -> None:
    row = provenance(repetitions=7, warm_up=2)
    assert (row["repetitions"], row["warm_up"]) == (7, 2)
    assert row["threads"] == torch.get_num_threads()
    assert (row["flexdecode"], row["torch"]) == (__version__, torch.__version__)
    assert datetime.fromisoformat(row["date"]).tzinfo is not None
    assert row["cpu"]
    assert (row["gpu"] is None) == (not torch.cuda.is_available())
    assert {"isa", "python", "commit", "dirty", "load_average"} <= set(row)


def test_without_kernels_there_is_no_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise KernelsUnavailableError("no compiler")

    monkeypatch.setattr(module.ops, "use_isa", missing)
    assert module.isa() is None


@pytest.mark.parametrize(
    ("text", "expected"), [("vendor_id: X\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: other\n", "Fast CPU @ 3 GHz")]
)
def test_the_processors_own_name(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_model(tmp_path / "cpuinfo") == expected
    assert cpu_model(tmp_path / "absent")


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        told = subprocess.run(["git", *settings, "-C", str(tmp_path), *arguments], capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        return told.stdout.strip()

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "one")
    assert commit.__wrapped__(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert commit.__wrapped__(tmp_path)["dirty"] is True


def test_outside_of_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert commit.__wrapped__(tmp_path) == {"commit": None, "dirty": None}
    (tmp_path / ".git").mkdir()  # not a repository, whatever it looks like
    assert commit.__wrapped__(tmp_path) == {"commit": None, "dirty": None}
