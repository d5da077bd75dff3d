"""The folder of a quantization under way: finished shards, and what it takes to go on after an interruption.

It stands beside the result under a name of its own, and becomes the result when all is written. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from flexdecode.checkpoints.files import read_json
from flexdecode.checkpoints.index import SINGLE
from flexdecode.checkpoints.save import join_shards, leftovers, shard_name, write_index, write_json, write_tensors

LARGEST_FILE = 4 << 30  # bytes; of a larger model every layer has a file
_STATE = "unfinished.json"
_HIDDEN = "unfinished-{}.hidden"


class Folder:
    """`plan` is everything that decides the result: a run goes on only where it is the same.

    Raises ValueError where `out` exists, where an unfinished run is there and `resume` was not asked for, or where it
    was made by another plan.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any], shards: int, *, resume: bool) -> None:
        self.out, self.path, self.shards, self._plan = out, out.with_name(out.name + ".unfinished"), shards, dict(plan)
        check_out(out, resume=resume)
        self.records: list[Mapping[str, Any]] = []
        self.done = 0  # shards that are complete
        if self.path.exists() and (self.path / _STATE).exists():
            self._go_on()
        else:
            self.path.mkdir(parents=True, exist_ok=True)

    def _go_on(self) -> None:
        state = read_json(self.path / _STATE)
        if state.get("plan") != self._plan:
            named = dict(state.get("plan") or {})
            other = [key for key in {**named, **self._plan} if named.get(key) != self._plan.get(key)]
            raise ValueError(
                f"{self.path}: was begun with another {', '.join(sorted(other))}; ask for the same, or remove it and "
                "begin anew"
            )
        self.done, self.records = int(state["done"]), list(state["records"])
        for stale in leftovers(self.path):
            stale.unlink()

    def hidden(self) -> Tensor | None:
        """What the finished layers put out for the calibration text; None where there is none yet."""
        path = self.path / _HIDDEN.format(self.done)
        return load_file(path)["hidden"] if path.exists() else None

    def add(
        self, tensors: Mapping[str, Tensor], records: Sequence[Mapping[str, Any]] = (), hidden: Tensor | None = None
    ) -> None:
        """Write the next shard. The state is written last, so that an interruption loses this shard at most."""
        write_tensors(self.path / shard_name(self.done, self.shards), tensors)
        previous = self.path / _HIDDEN.format(self.done)
        if hidden is not None:
            write_tensors(self.path / _HIDDEN.format(self.done + 1), {"hidden": hidden})
        self.done += 1
        self.records = [*self.records, *records]
        write_json(self.path / _STATE, {"plan": self._plan, "done": self.done, "records": self.records})
        previous.unlink(missing_ok=True)

    def close(self) -> None:
        """All shards are there: make one file of them, or write the index where that would be a large one."""
        files = [self.path / shard_name(number, self.shards) for number in range(self.shards)]
        if (self.path / SINGLE).exists() or sum(file.stat().st_size for file in files) <= LARGEST_FILE:
            join_shards(self.path, self.shards)
        else:
            write_index(self.path, self.shards)

    def finish(self) -> None:
        """Remove what only a run under way needs, and give the folder its name."""
        for path in [self.path / _STATE, *self.path.glob(_HIDDEN.format("*")), *leftovers(self.path)]:
            path.unlink(missing_ok=True)
        self.path.rename(self.out)


def check_out(out: Path, *, resume: bool) -> None:
    """Raises ValueError where a result may not be written to `out`."""
    unfinished = out.with_name(out.name + ".unfinished")
    if out.exists():
        raise ValueError(f"{out}: exists already; give another name, or remove it")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.absolute().parent}; make it first")
    if unfinished.exists() and not resume:
        raise ValueError(f"{unfinished}: is an unfinished run; go on with --resume, or remove it")
    if resume and not unfinished.exists():
        raise ValueError(f"{unfinished}: there is no unfinished run to --resume; leave the option out")
