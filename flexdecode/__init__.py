"""flexdecode: language-model decoding in which attention is yours to program.

The public names are loaded on first use, so that `import flexdecode` (and with it `flexdecode --version`)
imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "FlexdecodeWarning": "flexdecode.config",
    "LLM": "flexdecode.llm",
    "SamplingParams": "flexdecode.generation.params",
    "KVCache": "flexdecode.attention.cache",
    "plan_attention": "flexdecode.attention.plan",
    "attend": "flexdecode.attention.attend",
    "flex_attention": "flexdecode.attention.flex_attention",
    "masks": "flexdecode.attention.masks",
    "scores": "flexdecode.attention.scores",
}
_MODULES = {"masks", "scores"}

__all__ = [
    "LLM",
    "FlexdecodeWarning",
    "KVCache",
    "SamplingParams",
    "__version__",
    "attend",
    "flex_attention",
    "masks",
    "plan_attention",
    "scores",
]

if TYPE_CHECKING:
    from flexdecode.attention import masks, scores
    from flexdecode.attention.attend import attend
    from flexdecode.attention.cache import KVCache
    from flexdecode.attention.flex_attention import flex_attention
    from flexdecode.attention.plan import plan_attention
    from flexdecode.config import FlexdecodeWarning
    from flexdecode.generation.params import SamplingParams
    from flexdecode.llm import LLM


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'flexdecode' has no attribute {name!r}")
    module = import_module(home)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
