"""Which room may import which, held by walking every import of the package.

A room imports itself and the rooms above it in ROOMS, never a private name of another one. Imports of our own modules
stand at the top of a file, so that the walk sees what runs, except in the command line (which must start without
torch) and where attention loads a backend. Only the command line reads the environment and argv.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flexdecode"
ROOMS = (
    {"config", "memory"},
    {"kernels"},
    {"quantization"},
    {"checkpoints"},
    {"families"},
    {"attention"},
    {"models"},
    {"text"},
    {"generation"},
    {"distributed"},
    {"needs"},
    {"answer", "arguments", "describe"},  # llm's own helpers
    {"jobs"},
    {"llm"},
    {"transformers"},
    {"evaluation", "benchmark", "serving", "quantizer"},  # neighbours: none uses another
    {"cli"},
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
LATE_IMPORTS_ALLOWED = ("cli/", "attention/backends/")
# The package itself names modules of every room, as strings, so that its public names load on first use.
ABOVE_ALL = ("__init__.py", "__main__.py")
PUBLIC_OF_THE_PACKAGE = {"__version__"}
ENVIRONMENT = {("os", name) for name in ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")}
ENVIRONMENT |= {("sys", "argv"), ("sys", "orig_argv")}


@dataclass(frozen=True)
class Import:
    """One import of flexdecode: the module it names, the name taken from it, and whether a function holds it."""

    module: str
    name: str | None
    late: bool
    line: int

    @property
    def room(self) -> str:
        """The room that is imported, "" for the package itself."""
        parts = self.module.split(".")
        if len(parts) > 1:
            return parts[1]
        return self.name if self.name in RANK else ""


def imports(tree: ast.Module) -> Iterator[Import]:
    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.split(".")[0] == "flexdecode":
                        yield Import(alias.name, None, late, child.lineno)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: a relative import; name the module in full"
                if (child.module or "").split(".")[0] == "flexdecode":
                    for alias in child.names:
                        yield Import(child.module or "", alias.name, late, child.lineno)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, late or inside)

    return walk(tree, late=False)


def faults(path: str, source: str) -> list[str]:
    """What is wrong with the file at `path` (relative to the package), a line each."""
    tree = ast.parse(source)
    room = Path(path).parts[0].removesuffix(".py")
    found = []
    for entry in imports(tree):
        where = f"{path}:{entry.line}"
        if entry.late and not path.startswith(LATE_IMPORTS_ALLOWED):
            found.append(f"{where} imports {entry.module} inside a function")
        if path in ABOVE_ALL:
            continue
        if entry.room == "":
            if entry.name not in PUBLIC_OF_THE_PACKAGE:
                found.append(f"{where} imports {entry.name or 'flexdecode'} from the package; name its module")
        elif entry.room != room:
            if RANK[entry.room] >= RANK[room]:
                found.append(f"{where} imports {entry.room}, which does not stand above {room}")
            taken = [*entry.module.split(".")[2:], entry.name or ""]
            found += [f"{where} takes the private {name} of {entry.room}" for name in taken if name.startswith("_")]
    if room != "cli":
        found += [f"{path}:{line} reads {name}; only cli/ may" for line, name in environment_reads(tree)]
    if not path.startswith(LATE_IMPORTS_ALLOWED) and path not in ABOVE_ALL:
        found += [f"{path}:{line} imports by string" for line in dynamic_imports(tree)]
    return found


def environment_reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in ENVIRONMENT:
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (node.module, alias.name) in ENVIRONMENT:
                    yield node.lineno, f"{node.module}.{alias.name}"


def dynamic_imports(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            first = node.args[0] if node.args else None
            ours = isinstance(first, ast.Constant) and str(first.value).startswith("flexdecode")
            if name in ("import_module", "__import__") and ours:
                yield node.lineno


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_file_keeps_to_its_place(path: str) -> None:
    assert faults(path, (PACKAGE / path).read_text()) == []


def test_every_room_has_a_place() -> None:
    rooms = {Path(path).parts[0].removesuffix(".py") for path in FILES if path not in ABOVE_ALL}
    assert rooms <= set(RANK), f"rooms without a place in ROOMS: {sorted(rooms - set(RANK))}"


@pytest.mark.parametrize(
    ("path", "source", "words"),
    [
        ("text/a.py", "from flexdecode.models.linear import Linear", None),
        ("models/a.py", "from flexdecode.text.stop import StopStrings", "does not stand above"),
        ("models/a.py", "from flexdecode import text", "does not stand above"),
        ("models/a.py", "import flexdecode.text.stop", "does not stand above"),
        ("models/a.py", "if True:\n    from flexdecode.llm import LLM", "does not stand above"),
        ("serving/a.py", "from flexdecode.benchmark.step import run", "does not stand above"),
        ("config.py", "from flexdecode.cli.main import main", "does not stand above"),
        ("models/a.py", "from flexdecode import LLM", "name its module"),
        ("models/a.py", "import flexdecode", "name its module"),
        ("models/a.py", "from flexdecode import __version__", None),
        ("models/a.py", "from flexdecode.config import _hidden", "private"),
        ("models/a.py", "from flexdecode.families._inner import x", "private"),
        ("models/a.py", "from flexdecode.models._inner import _x", None),
        ("llm.py", "def f():\n    from flexdecode.text.stop import StopStrings", "inside a function"),
        ("llm.py", "class A:\n    def f(self):\n        import flexdecode.config", "inside a function"),
        ("cli/a.py", "def f():\n    from flexdecode.llm import LLM", None),
        ("attention/backends/a.py", "def f():\n    from flexdecode.attention.plan import Plan", None),
        ("llm.py", "import importlib\nimportlib.import_module('flexdecode.cli.main')", "by string"),
        ("llm.py", "import os\nos.environ['A']", "reads os.environ"),
        ("llm.py", "from os import getenv", "reads os.getenv"),
        ("llm.py", "import sys\nprint(sys.argv)", "reads sys.argv"),
        ("cli/a.py", "import os\nos.environ['A']", None),
    ],
)
def test_the_walk_sees_what_it_should(path: str, source: str, words: str | None) -> None:
    found = faults(path, source)
    if words is None:
        assert found == []
    else:
        assert len(found) >= 1
        assert words in found[0]
