"""The shape of the code: short files that say what they are for, in a flat house, each with tests of its own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flexdecode"
TESTS = ROOT / "tests"
MOST_LINES = 400
CODE = sorted([*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")])
SOURCES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".cpp", ".h", ".hpp", ".cu"))
PROSE = [ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml", *sorted((ROOT / "docs").rglob("*.md"))]

# tests/checkpoints.py builds models for every room, so the tests of flexdecode/checkpoints have a folder of this name.
ROOM_OF_FOLDER = {"test_checkpoints": "checkpoints"}
# Tests of a topic that lies across files: the whole, or a promise about all of a room.
TOPICS = {
    "attention/test_choose.py": "which backend serves",
    "attention/test_cuts.py": "guesses cut from pages and caches",
    "attention/test_life.py": "sequences in a cache, in any order",
    "attention/test_reports.py": "public fault reports, one by one",
    "attention/test_reuse.py": "what a later sequence finds in a cache",
    "attention/test_steps.py": "attend over sequences cut into steps",
    "cli/test_demo.py": "the whole way, with a real model",
    "cli/test_flags.py": "the command line's surface, frozen",
    "cli/test_stopping.py": "batches that are stopped and go on",
    "families/test_parity.py": "every family against transformers",
    "families/test_shapes.py": "every random shape fits its family",
    "generation/test_batch_invariance.py": "the same bits by whatever schedule",
    "generation/test_reuse.py": "what a later prompt finds in the cache",
    "generation/test_schedules.py": "the same tokens by whatever schedule",
    "generation/test_soak.py": "two thousand requests, and nothing left",
    "generation/test_speculation.py": "guessed tokens, through the engine",
    "kernels/test_alike.py": "rows whose bits hang on no other row",
    "kernels/test_attend_few.py": "a kernel on every instruction set",
    "kernels/test_attend_many.py": "a kernel on every instruction set",
    "kernels/test_linear_dense.py": "a kernel on every instruction set",
    "llm/test_complete.py": "many jobs at once, through LLM",
    "llm/test_batch.py": "faults of batches, through LLM",
    "llm/test_chat.py": "conversations, through LLM",
    "llm/test_ends.py": "why an answer ends, through LLM",
    "llm/test_explain.py": "what a decode step reads, through LLM",
    "llm/test_life.py": "what requests leave behind, through LLM",
    "llm/test_mods.py": "masks and scores of a user's, through LLM",
    "llm/test_numbers.py": "logits that are none, through LLM",
    "llm/test_sampling.py": "sampling and penalties, through LLM",
    "llm/test_speculation.py": "guessed tokens, through LLM",
    "llm/test_text.py": "text in a stream, through LLM",
    "models/test_memory.py": "what loading takes",
    "models/test_quantized.py": "every quantized layout against its float twin",
    "quantizer/test_quality.py": "perplexity after quantizing",
    "quantizer/test_readers.py": "saved files in readers that are not ours",
    "test_demo.py": "a real model against transformers",
    "test_docs.py": "what the pages say",
    "test_import_time.py": "what must not be imported",
    "test_layering.py": "which room imports which",
    "test_style.py": "this",
    "test_transformers_masks.py": "what transformers' masks show",
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [*CODE, *SOURCES], ids=name)
def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{name(path)} has {lines} lines, more than {MOST_LINES}; split it"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name)
def test_module_opens_with_its_boundary(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text, f"{name(path)} has no docstring; say what it does and what it does not know"


@pytest.mark.parametrize("path", [*CODE, *SOURCES], ids=name)
def test_no_room_has_more_than_one_folder_below_it(path: Path) -> None:
    depth = len(path.relative_to(ROOT).parts)
    assert depth <= 4, f"{name(path)} lies {depth - 3} folders below its room; one is the most"


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=name)
def test_tests_mirror_the_package(path: Path) -> None:
    relative = path.relative_to(TESTS)
    if relative.as_posix() in TOPICS:
        return
    room = Path(*(ROOM_OF_FOLDER.get(part, part) for part in relative.parent.parts))
    module = relative.name.removeprefix("test_")
    candidates = [PACKAGE / room / module, *(PACKAGE / room).glob(f"*/{module}")]
    wanted = f"flexdecode/{room.as_posix()}/{module}"
    assert any(candidate.exists() for candidate in candidates), (
        f"{name(path)} mirrors no file; name it after {wanted}, or list its topic in TOPICS"
    )


def test_topics_are_not_stale() -> None:
    assert [topic for topic in TOPICS if not (TESTS / topic).exists()] == []


def test_every_folder_of_tests_is_a_package() -> None:
    """Two test files of one name in different folders can only live in packages."""
    folders = {path.parent for path in TESTS.rglob("*.py")}
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


# The beginnings of paths that exist on one machine only, put together here so that this file does not match itself.
ONE_MACHINE = re.compile(
    "|".join(rf"(?<![\w.$}}~/-])/{root}/" for root in ("home", "root", "Users", "work", "opt", "mnt"))
)


@pytest.mark.parametrize("path", [*CODE, *SOURCES, *PROSE], ids=name)
def test_no_path_of_one_machine(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        match = ONE_MACHINE.search(line)
        assert match is None, f"{name(path)}:{number} names a path of one machine: {line.strip()}"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("open('{}home/someone/model')", True),
        ("see {}root/x", True),
        ("owner{}work/name", False),
        ("https:{}{}host{}home/", False),
        ("~{}opt/", False),
    ],
)
def test_the_search_for_paths_sees_what_it_should(line: str, found: bool) -> None:
    assert (ONE_MACHINE.search(line.replace("{}", "/")) is not None) == found
