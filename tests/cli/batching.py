"""Lines for `batch` and the rows that came of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path, *lines: object) -> None:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_key(path: Path) -> dict[Any, dict[str, Any]]:
    found = rows(path)
    keyed = {row.get("custom_id") or row["id"]: row for row in found}
    assert len(keyed) == len(found), "a line was answered twice"
    return keyed


def openai(key: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": key, "method": "POST", "url": url, "body": {"model": "any", **body}}


def chat(key: str, text: str, **body: Any) -> dict[str, Any]:
    return openai(key, messages=[{"role": "user", "content": text}], **body)
