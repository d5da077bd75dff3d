"""Rows of results that are kept: what text they were taken on, how the model ran, where they come from, and their file.

Knows plain data and options; a file is only ever appended to, a whole row at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Any

from flexdecode.cli.options import EngineOptions
from flexdecode.cli.output import print_report, write_json
from flexdecode.cli.text import decode, read_stdin


def read_texts(text: str | None) -> tuple[list[str], dict[str, Any]]:
    """The documents that --text names, and what a row of results says of them."""
    from flexdecode.evaluation import texts

    if text is None:
        name, found = texts.BUILT_IN, [texts.built_in_text()]
    elif text == "-":
        name, found = "stdin", texts.documents(read_stdin(), "stdin")
    else:
        try:
            data = Path(text).read_bytes()
        except OSError as error:
            raise ValueError(f"--text {text}: {error.strerror or error}") from None
        name, found = text, texts.documents(decode(data, f"--text {text}"), text)
    return found, {"text": name, "text_sha256": texts.fingerprint(found)}


def settings(engine: EngineOptions, described: Mapping[str, Any]) -> dict[str, Any]:
    """What the model ran with, as far as it bears on its predictions."""
    keys = ("family", "format", "dtype", "kv_dtype", "device", "held_as", "attention_backends")
    return {"mask": engine.mask, "replace_mask": engine.replace_mask, **{key: described[key] for key in keys}}


def check_out(out: Path | None) -> None:
    """Refuses, before any work, a file that cannot be appended to."""
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ValueError(f"--out {out}: " + ("it is a folder" if out.is_dir() else f"there is no folder {out.parent}"))


def origin() -> dict[str, Any]:
    """Versions, processor, threads, commit and date, for a row that is kept."""
    from flexdecode.benchmark.provenance import provenance

    told = provenance(repetitions=1, warm_up=0)
    timing = ("repetitions", "warm_up", "load_average")
    return {key: value for key, value in told.items() if key not in timing}


def append(out: Path, row: Mapping[str, Any]) -> None:
    """One more line of JSON at the end of a file."""
    line = dumps(row, allow_nan=False) + "\n"
    with out.open("a", encoding="utf-8") as file:
        file.write(line)


def plus_minus(value: float, error: float | None) -> str:
    """A figure and its standard error, where there is one."""
    return f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")


def finish(row: Mapping[str, Any], shown: Mapping[str, Any], title: str, out: Path | None, json: bool) -> None:
    """A row of results to the file and, under --json, to stdout, with where it comes from; else `shown` in words."""
    kept = {**row, **origin()}
    if out is not None:
        append(out, kept)
    if json:
        write_json(kept)
    else:
        print_report(shown, title)
