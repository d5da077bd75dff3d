"""The pages of docs/ and the README keep their word: their Python runs, their errors and outputs are the real ones.

A ```python block whose last line is `# ValueError: text` must raise just that. In a ```console block a line with `$ `
is a command, and what follows is its output. Blocks of one page run in order, in one namespace.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli.main import main
from tests.checkpoints import byte_tokenizer, tiny

ROOT = Path(__file__).parent.parent
MASKS = ROOT / "docs" / "masks.md"
BATCH = ROOT / "docs" / "batch.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LARGEST_PICTURE = 30_000  # bytes
_BLOCK = re.compile(r"^```([\w ]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ERROR = re.compile(r"^# ValueError: (.*)\n\Z", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which it opens."""

    language: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in _BLOCK.finditer(text)]


def run_python(page: Path, found: list[Block]) -> None:
    """All of a page's Python, in order. The demo model is left to the tests that are made for it."""
    names: dict[str, Any] = {"__name__": "docs"}
    for block in found:
        program = compile(block.text.replace('"demo"', '"random:tiny"'), page.name, "exec")
        error = _ERROR.search(block.text)
        if error is None:
            exec(program, names)
            continue
        with pytest.raises(ValueError) as caught:
            exec(program, names)
        assert str(caught.value) == error[1], f"{page.name}:{block.line}"


def test_every_snippet_about_masks_runs_and_every_error_is_the_real_one() -> None:
    found = [b for b in blocks(MASKS.read_text()) if b.language == "python"]
    assert len(found) > 15
    assert sum(_ERROR.search(b.text) is not None for b in found) > 5
    run_python(MASKS, found)


def shape(value: Any) -> Any:
    """The keys of a JSON value, all the way down."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value[:1] if isinstance(item, dict)] if isinstance(value, list) else None


def test_the_page_on_batches_keeps_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are served, its answers have the shape of the real ones, its mistakes give just these errors."""
    found = blocks(BATCH.read_text())
    requests, answers = (block.text for block in found if block.language == "jsonl")
    wrong, messages = (block.text for block in found if block.language in ("jsonl errors", "text"))
    monkeypatch.chdir(tmp_path)
    tiny("model")
    byte_tokenizer("model", "{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = []
    for name, text in (("requests", requests), ("wrong", wrong)):
        Path(f"{name}.jsonl").write_text(text)
        assert main(["batch", "model", f"{name}.jsonl", f"{name}.out"]) == (name == "wrong")
        rows.append([json.loads(line) for line in Path(f"{name}.out").read_text().splitlines()])
    served, refused = rows
    wanted = [json.loads(line) for line in answers.splitlines()]
    assert sorted(str(shape(row)) for row in served) == sorted(str(shape(row)) for row in wanted)
    assert [row["error"]["message"] for row in refused] == messages.splitlines()
    assert [row["error"]["line"] for row in refused] == list(range(1, 7))
    run_python(BATCH, [block for block in found if block.language == "python"])


def test_every_snippet_about_the_engine_runs() -> None:
    page = ROOT / "docs" / "engine.md"
    found = [b for b in blocks(page.read_text()) if b.language == "python"]
    assert sum(_ERROR.search(b.text) is not None for b in found) == 3
    run_python(page, found)


def test_the_readme_section_on_attention_runs() -> None:
    section = (ROOT / "README.md").read_text().split("## Attention is yours")[1].split("\n## ")[0]
    found = [b for b in blocks(section) if b.language == "python"]
    assert len(found) == 1
    run_python(ROOT / "README.md", found)


def commands(text: str) -> list[tuple[list[str], str]]:
    """(arguments of flexdecode, expected output) of every command in a page's console blocks."""
    found = []
    for block in blocks(text):
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                line, output = part.split("\n", 1)
                program, *argv = shlex.split(line)
                assert program == "flexdecode"
                found.append((argv, output))
    return found


def test_commands_print_what_the_page_says_and_draw_its_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    text = MASKS.read_text()
    found = commands(text)
    assert len(found) > 5
    for argv, output in found:
        assert main(argv) == 0, argv
        printed = capsys.readouterr().out
        if "--png" not in argv:
            assert printed.splitlines() == output.splitlines(), argv
    drawn = {path.name for path in (tmp_path / "docs" / "pictures").iterdir()}
    kept = {path.name: path.stat().st_size for path in (ROOT / "docs" / "pictures").iterdir()}
    assert drawn == set(kept), "the page's commands draw the pictures that are there"
    assert set(re.findall(r"\(pictures/([^)]*)\)", text)) == drawn
    assert max(kept.values()) < LARGEST_PICTURE, "pictures are small"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
