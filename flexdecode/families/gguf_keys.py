"""One architecture's part of a GGUF file's metadata. Knows how values are written, not what they mean."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flexdecode.checkpoints.source import Source


class Keys:
    """Reads keys by their names after the architecture's; remembers which, so that `rest` can tell the others."""

    def __init__(self, source: Source, arch: str) -> None:
        self.where, self.arch, self._all = str(source.path), arch, source.config
        self._asked: set[str] = set()

    def __call__(self, key: str, default: Any = None) -> Any:
        """The value as it stands: a number, a string, or a list."""
        name = self.name(key)
        self._asked.add(name)
        value = self._all.get(name)
        return default if value is None else value

    def name(self, key: str) -> str:
        """As the file has it, for messages."""
        return f"{self.arch}.{key}"

    def shared(self, key: str) -> Any:
        """A value that all layers share: an array with an entry a layer is understood where the entries agree."""
        value = self(key)
        if not isinstance(value, list | tuple):
            return value
        if len(set(value)) != 1:
            raise ValueError(
                f"{self.where}: {self.name(key)} differs from layer to layer ({sorted(set(value))}), which is not "
                "supported"
            )
        return value[0]

    def rest(self, inert: Collection[str]) -> dict[str, Any]:
        """What nobody has asked for, under its whole name. `inert` lists what may be passed over."""
        known = self._asked | {self.name(key) for key in inert}
        return {k: self._all[k] for k in self._all if k.startswith(f"{self.arch}.") and k not in known}
