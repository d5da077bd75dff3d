"""What must start at once imports neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "huggingface_hub",
    "prompt_toolkit",
    "matplotlib",
)
VERBS = (
    "generate",
    "chat",
    "batch",
    "mask",
    "inspect",
    "env",
    "pull",
    "quantize",
    "eval",
    "eval perplexity",
    "eval needle",
    "bench",
    "bench step",
)
PROGRAM = "from flexdecode.cli.main import main; code = main({argv!r}); assert code == {code}, code"


def loaded_by(program: str) -> set[str]:
    """Which of HEAVY are in sys.modules after `program` has run in a process of its own."""
    report = f"\nimport json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    told = subprocess.run([sys.executable, "-c", program + report], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return set(json.loads(told.stdout.splitlines()[-1]))


def test_the_package_itself() -> None:
    assert loaded_by("import flexdecode; assert 'LLM' in dir(flexdecode)") == set()


HELPS = [[*verb.split(), "--help"] for verb in VERBS]


@pytest.mark.parametrize("argv", [["--version"], ["--help"], *HELPS], ids=" ".join)
def test_version_and_help(argv: list[str]) -> None:
    assert loaded_by(PROGRAM.format(argv=argv, code=0)) == set()


@pytest.mark.parametrize(
    "argv", [["nonsense"], ["generate"], ["generate", "demo", "--nonsense"], ["generate", "demo"], ["mask", "causal"]]
)
def test_wrong_usage(argv: list[str]) -> None:
    assert loaded_by(PROGRAM.format(argv=argv, code=2)) == set()
