"""The folder of a run under way: what it refuses, and what it remembers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexdecode.quantizer import folder as folder_module
from flexdecode.quantizer.folder import Folder, check_out

PLAN = {"options": {"group_size": 32}, "source": "a"}


def test_it_remembers(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "out", PLAN, 3, resume=False)
    folder.add({"a": torch.ones(2)}, [{"module": "x"}], torch.full((2, 2), 7.0))
    (folder.path / "model-00002-of-00003.safetensors.tmp").write_text("half")
    again = Folder(tmp_path / "out", PLAN, 3, resume=True)
    assert (again.done, again.records) == (1, [{"module": "x"}])
    hidden = again.hidden()
    assert hidden is not None
    assert bool((hidden == 7).all())
    assert not list(again.path.glob("*.tmp"))
    again.add({"b": torch.ones(2)})
    assert again.hidden() is None
    again.add({"c": torch.ones(2)})
    again.close()
    again.finish()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["a", "b", "c"]


def test_a_large_model_has_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "LARGEST_FILE", 10)
    folder = Folder(tmp_path / "out", PLAN, 2, resume=False)
    for name in ("a", "b"):
        folder.add({name: torch.ones(2)})
    folder.close()
    folder.finish()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_an_interruption_while_files_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one file is whole, and some of the shards are gone already."""
    folder = Folder(tmp_path / "out", PLAN, 2, resume=False)
    for name in ("a", "b"):
        folder.add({name: torch.ones(2)})
    unlink, count = Path.unlink, 0

    def interrupted(self: Path, missing_ok: bool = False) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.close()
    monkeypatch.setattr(Path, "unlink", unlink)
    again = Folder(tmp_path / "out", PLAN, 2, resume=True)
    assert again.done == 2
    again.close()
    again.finish()
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["a", "b"]


def test_another_plan_is_refused_by_name(tmp_path: Path) -> None:
    Folder(tmp_path / "out", PLAN, 1, resume=False).add({"a": torch.ones(1)})
    with pytest.raises(ValueError, match="was begun with another options; ask for the same, or remove it"):
        Folder(tmp_path / "out", PLAN | {"options": {"group_size": 64}}, 1, resume=True)


def test_results_are_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for resume in (False, True):
        with pytest.raises(ValueError, match="exists already"):
            check_out(tmp_path / "out", resume=resume)
    with pytest.raises(ValueError, match="there is no folder"):
        check_out(tmp_path / "no" / "out", resume=False)
    with pytest.raises(ValueError, match="no unfinished run to --resume"):
        check_out(tmp_path / "new", resume=True)
    (tmp_path / "new.unfinished").mkdir()
    with pytest.raises(ValueError, match="is an unfinished run; go on with --resume, or remove it"):
        check_out(tmp_path / "new", resume=False)
