"""The output file: added to, cut, locked, and left alone where it is not what it should be."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli.ledger import Ledger
from flexdecode.cli.rows import Key, error_row, read_line

LINES = [read_line(n, json.dumps({"id": f"q{n}", "prompt": f"p{n}"}).encode()) for n in range(1, 6)]
KNOWN: dict[Key, tuple[int, str]] = {line.key: (line.number, line.digest) for line in LINES}


def good(n: int) -> dict[str, Any]:
    return {"request": LINES[n - 1].digest, "id": f"q{n}", "text": "…"}


def bad(n: int) -> dict[str, Any]:
    return error_row(LINES[n - 1], ValueError("wrong"))


def ids(path: Path) -> list[Any]:
    return [json.loads(row)["id"] for row in path.read_text().splitlines()]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def opened(out: Path, retry_errors: bool = False) -> Ledger:
    return Ledger(out, "in.jsonl", KNOWN, retry_errors)


def write(out: Path, *rows: dict[str, Any], tail: str = "") -> bytes:
    out.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return out.read_bytes()


def test_rows_are_there_at_once_and_found_again(out: Path) -> None:
    with opened(out) as ledger:
        ledger.write(good(1))
        assert ids(out) == ["q1"]
        ledger.write(bad(2))
        assert ids(out) == ["q1", "q2"]
    with opened(out) as ledger:
        assert (ledger.done, ledger.failed) == ({"q1"}, {"q2"})
        ledger.write(good(3))
    assert ids(out) == ["q1", "q2", "q3"]


@pytest.mark.parametrize("row", [good(2), bad(2), {**good(2), "id": "\ud800"}])
def test_a_half_written_row_is_cut_wherever_it_ends(row: dict[str, Any], out: Path) -> None:
    whole = json.dumps(row)
    for length in range(len(whole) + 1):
        write(out, good(1), tail=whole[:length])
        with opened(out) as ledger:
            assert ledger.done == {"q1"}
            ledger.write(good(3))
        assert ids(out) == ["q1", "q3"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hello\n", "out.jsonl:1 is no row"),
        ("hello", "out.jsonl:1 is no row"),
        ('{"id": "q1", "prompt": "p1"}', "out.jsonl:1 is no row"),
        ('{"id": "q1", "prompt": "p1"}\n', "out.jsonl:1 is no row"),
        (json.dumps(good(1)) + "\n\n", "out.jsonl:2 is no row"),
        (json.dumps(good(1)) + "\n" + "\0" * 9 + "\n", "out.jsonl:2 is no row"),
        (json.dumps({**good(1), "id": "other"}) + "\n", "'other', which in.jsonl does not have"),
        (json.dumps({**bad(1), "id": 99}) + "\n", "99.*--retry-errors"),
        (json.dumps({**good(1), "request": "0" * 24}) + "\n", "line 1 of in.jsonl asks something else"),
        (json.dumps(good(1)) + "\n" + json.dumps(bad(1)) + "\n", "out.jsonl:2 answers id 'q1', and so does line 1"),
    ],
)
def test_a_file_that_is_something_else_is_refused_and_left_as_it_is(content: str, words: str, out: Path) -> None:
    out.write_text(content)
    with pytest.raises(ValueError, match=words):
        opened(out)
    assert out.read_text() == content


def test_failed_rows_are_taken_out_to_be_tried_again(out: Path) -> None:
    write(out, bad(1), good(2), bad(3), tail=json.dumps(good(4))[:20])
    os.chmod(out, 0o640)
    with opened(out, retry_errors=True) as ledger:
        assert (ledger.done, ledger.failed) == ({"q2"}, set())
        assert ids(out) == ["q2"]
        ledger.write(good(1))
        with pytest.raises(ValueError, match="another run"):
            opened(out)
    assert ids(out) == ["q2", "q1"]
    assert out.stat().st_mode & 0o777 == 0o640
    assert os.listdir(out.parent) == ["out.jsonl"]


def test_a_line_that_could_not_be_read_may_have_an_id_by_now(out: Path) -> None:
    write(out, {**bad(1), "id": 9}, good(2))
    with opened(out, retry_errors=True):
        assert ids(out) == ["q2"]


def test_a_failed_line_may_change(out: Path) -> None:
    write(out, {**bad(1), "request": "0" * 24})
    with opened(out) as ledger:
        assert ledger.failed == {"q1"}


@pytest.mark.parametrize("call", ["fsync", "rename", "fchmod"])
def test_an_end_while_failed_rows_are_taken_out_loses_nothing(
    call: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write(out, bad(1), good(2))

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, call, stop)
        with pytest.raises(KeyboardInterrupt):
            opened(out, retry_errors=True)
    assert out.read_bytes() == before
    assert os.listdir(out.parent) == ["out.jsonl"]
    with opened(out, retry_errors=True):
        assert ids(out) == ["q2"]


def test_a_disk_that_fills_up_leaves_a_file_that_can_be_gone_on_with(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    parts: Iterator[int] = iter([7, 5, 0])

    def little(file: int, data: Any) -> int:
        count = next(parts)
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:count])

    with opened(out) as ledger:
        ledger.write(good(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", little)
            with pytest.raises(OSError, match="No space"):
                ledger.write(good(2))
    with opened(out) as ledger:
        assert ledger.done == {"q1"}
    assert ids(out) == ["q1"]


def test_two_runs_cannot_have_one_file(out: Path) -> None:
    with opened(out) as ledger:
        ledger.write(good(1))
        with pytest.raises(ValueError, match="written by another run"):
            opened(out)
        assert ids(out) == ["q1"]
    with opened(out):
        pass


def test_a_lock_on_a_file_that_was_replaced_is_worth_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, another run put a new file in its place: the new one is what must be locked."""
    import fcntl

    write(out, good(1))
    real = fcntl.flock
    calls: list[int] = []

    def replaced(file: int, how: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            other = out.with_name("other")
            write(other, good(1), good(2))
            os.rename(other, out)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with opened(out) as ledger:
        assert ledger.done == {"q1", "q2"}
        ledger.write(good(3))
    assert ids(out) == ["q1", "q2", "q3"]
    assert len(calls) == 2


def test_a_run_that_wrote_nothing_leaves_nothing(out: Path) -> None:
    with opened(out):
        assert out.exists()
    assert not out.exists()
    out.touch()
    with opened(out):
        pass
    assert out.exists()


def test_a_link_stays_a_link(out: Path) -> None:
    real = out.with_name("real.jsonl")
    write(real, bad(1), good(2))
    out.symlink_to(real.name)
    with opened(out, retry_errors=True) as ledger:
        ledger.write(good(1))
    assert out.is_symlink()
    assert ids(real) == ["q2", "q1"]


@pytest.mark.parametrize("kind", ["folder", "fifo", "null", "no folder"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "null":
        path = Path(os.devnull)
    else:
        path = tmp_path / "absent" / "out"
    with pytest.raises(ValueError, match=r"cannot be written|ordinary file") as caught:
        opened(path)
    assert str(path) in str(caught.value)


def test_text_of_every_language_is_readable_and_half_a_surrogate_escaped(out: Path) -> None:
    with opened(out) as ledger:
        ledger.write({**good(1), "text": "naïve 日本"})
        ledger.write({**good(2), "text": "\ud800"})
    first, second = out.read_bytes().splitlines()
    assert "naïve 日本".encode() in first
    assert b"\\ud800" in second
