"""`flexdecode mask EXPR|FILE.py:NAME --length L`: what a mask shows, what a plan under it skips, and why.

All queries of a prefill as a grid of blocks (of single tokens where they are few), or with --at the one query of a
decode step as ranges of keys. What is said in words is in mask_text.py, what is drawn in picture.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexdecode.cli.mask_text import lines
from flexdecode.cli.options import Json
from flexdecode.cli.output import write_json, write_text
from flexdecode.cli.picture import Grid, check_drawing, draw
from flexdecode.cli.verb import option, verb

if TYPE_CHECKING:
    from flexdecode.attention.explain import BlockMap, Span
    from flexdecode.attention.masks import Ints, Mask

NAME = "mask"
HELP = "Show which keys a mask shows, and which blocks a plan skips and why."

_TOKENS = 64  # up to so many keys, a cell of the grid is one token


@verb
def command(
    mask: Annotated[
        str,
        typer.Argument(
            metavar="EXPR|FILE.py:NAME",
            help="Such as 'causal & (window(4096) | sinks(4))', or a mask or mask_mod in a Python file.",
            show_default=False,
        ),
    ],
    length: Annotated[int, option("--length", help="Keys of the sequence.", show_default=False)],
    at: Annotated[
        int | None, option("--at", metavar="Q", help="Only the query at this position.", show_default=False)
    ] = None,
    heads: Annotated[
        int | None,
        option("--heads", help="Query heads there are; by default as many as the mask names.", show_default=False),
    ] = None,
    head: Annotated[
        int | None, option("--head", help="The query head to show; 0 by default.", show_default=False)
    ] = None,
    png: Annotated[
        Path | None,
        option("--png", metavar="FILE", help="Also draw it to this file, with matplotlib.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    if length < 1:
        raise ValueError(f"--length is {length}; it is a number of keys, at least 1")
    if at is not None and not 0 <= at < length:
        raise ValueError(f"--at {at} is no position of a sequence of --length {length}: wants 0 to {length - 1}")
    if png is not None:
        check_drawing(png)
    from flexdecode.attention.expressions import load_mask

    found = load_mask(mask)
    shown = Shown(found, length, at, _heads(found, heads, head), head)
    if png is not None:
        draw(png, shown.grid(), str(shown.map.mask), shown.legend())
    if json:
        write_json(shown.data(), indent=None)
    else:
        write_text("".join(f"{line}\n" for line in lines(shown)))


class Shown:
    """A mask at a length, worked out once for all that is told of it.

    `map` is that of the chosen head, `row` the keys of the one query of --at. `alike` holds the heads that see the
    same, and `densities` the visible share of each of these groups where there are several.
    """

    def __init__(self, mask: Mask, length: int, at: int | None, heads: int, head: int | None) -> None:
        import numpy as np

        from flexdecode.attention.explain import alike_heads, explain, explain_row

        self.mask, self.at, self.heads = mask, at, heads
        self.queries: Ints = np.arange(length) if at is None else np.array([at])
        self.map: BlockMap = explain(mask, length, self.queries, head=head or 0)
        self.row: list[Span] = [] if at is None else explain_row(mask, length, at, head=head or 0)
        self.alike = alike_heads(mask, length, self.queries, heads)
        several = self.alike if len(self.alike) > 1 else []
        self.densities = [explain(mask, length, self.queries, head=group[0]).density for group in several]

    @property
    def by_token(self) -> bool:
        """Whether a cell of the grid is one query and one key."""
        return self.map.length <= _TOKENS

    def legend(self) -> dict[int, str]:
        """What the states of the grid's cells mean."""
        return {2: "seen", 0: "hidden"} if self.by_token else {2: "full", 1: "partial", 0: "skipped"}

    def grid(self) -> Grid:
        from flexdecode.attention.explain import shown
        from flexdecode.attention.visible import BLOCK

        first = self.at or 0
        if self.by_token:
            return Grid(shown(self.mask, self.map.length, self.queries, head=self.map.head) * 2, 1, 1, first)
        tile = self.map.queries[0]
        return Grid(self.map.states_TN, tile.stop - tile.first, BLOCK, first)

    def data(self) -> dict[str, Any]:
        """Everything, for --json. Ranges hold their last position or block; `by` names the parts that decided."""
        from flexdecode.attention.reasons import State
        from flexdecode.attention.visible import BLOCK

        found, states = self.map, tuple(reversed(State))
        report: dict[str, Any] = {
            "mask": str(self.mask),
            "length": found.length,
            "at": self.at,
            "heads": self.heads,
            "head": found.head,
            "heads_alike": self.alike,
            "block": BLOCK,
            "blocks": {state.name.lower(): found.count(state) for state in states},
            "decided": {
                state.name.lower(): [{"by": _names(by), "blocks": n} for by, n in found.deciders(state).items()]
                for state in states
            },
            "pairs": found.pairs,
            "all_pairs": found.all_pairs,
            "density": found.density,
            "keys_read": found.keys_read,
            "tiles": [
                {"queries": [q.first, q.stop - 1], "blocks": [_span(span) for span in found.spans(t)]}
                for t, q in enumerate(found.queries)
            ],
        }
        return report if self.at is None else report | {"keys": [_span(span) for span in self.row]}


def _heads(mask: Mask, heads: int | None, head: int | None) -> int:
    """The number of query heads, checked against the mask and the head that was asked for."""
    from flexdecode.attention.explain import heads_wanted

    if heads is not None and heads < 1:
        raise ValueError(f"--heads is {heads}; it is a number of query heads, at least 1")
    count = heads or heads_wanted(mask) or max(head or 0, 0) + 1
    mask.check_heads(count)
    if head is not None and not 0 <= head < count:
        raise ValueError(f"--head {head} is none of {count} query heads: wants 0 to {count - 1}")
    return count


def _span(span: Span) -> dict[str, Any]:
    return {"first": span.first, "last": span.last, "state": span.state.name.lower(), "by": _names(span.by)}


def _names(by: tuple[Mask, ...]) -> list[str]:
    return [str(part) for part in by]
