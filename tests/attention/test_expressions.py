"""Masks as text: what is read, what is refused and how, and functions in files."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdecode.attention.expressions import load_mask, parse_mask
from flexdecode.attention.masks import (
    Mask,
    block_diagonal,
    causal,
    chunked,
    dilated,
    document,
    per_head,
    prefix_lm,
    sinks,
    window,
)
from tests.attention.test_masks import combined, dense

SMALL = st.integers(1, 2**62)
ONE = st.one_of(
    st.just(causal()),
    SMALL.map(window),
    SMALL.map(chunked),
    SMALL.map(sinks),
    SMALL.map(prefix_lm),
    st.builds(dilated, st.integers(1, 2**31), st.integers(1, 2**31)),
    st.lists(st.integers(1, 99), min_size=1, max_size=16).map(block_diagonal),
    st.lists(st.integers(-99, 99), min_size=1, max_size=16).map(document),
)


def headed(inner: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    return combined(inner) | st.lists(inner, min_size=1, max_size=3).map(per_head)


@given(st.recursive(ONE, headed, max_leaves=8))
@settings(deadline=None)
def test_what_a_mask_prints_makes_it_again(mask: Mask) -> None:
    assert parse_mask(str(mask)) == mask
    assert str(parse_mask(str(mask))) == str(mask)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("causal", causal()),
        ("causal()", causal()),
        ("  causal\n & window( 4_096 )", causal() & window(4096)),
        ("causal & (window(4096) | sinks(4))", causal() & (window(4096) | sinks(4))),
        ("causal & window(4096) | sinks(4)", causal() & window(4096) | sinks(4)),
        ("~causal & ~~window(size=3)", ~causal() & window(3)),
        ("prefix_lm(7)", prefix_lm(7)),
        ("dilated(4, step=0x10)", dilated(4, 16)),
        ("document([0, 0, -1])", document([0, 0, -1])),
        ("document((0, 0, 1))", document([0, 0, 1])),
        ("block_diagonal(sizes=[3, 4])", block_diagonal([3, 4])),
        ("per_head([causal, causal & window(4)])", per_head([causal(), causal() & window(4)])),
        ("chunked(8192)", chunked(8192)),
    ],
)
def test_expressions(text: str, wanted: Mask) -> None:
    assert parse_mask(text) == load_mask(text) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "causal & widnow(4)",
            r"at 'widnow\(4\)': there is no mask widnow \(did you mean window\?\); known are .*sinks",
        ),
        ("mask(f)", "there is no mask mask.*known are block_diagonal, causal"),
        ("xyzzy", "there is no mask xyzzy; known"),
        ("window", r"missing a required argument: 'size'; write window\(size\)"),
        ("window()", r"write window\(size\)"),
        ("causal & window(1, 2)", r"at 'window\(1, 2\)': too many positional arguments; write window\(size\)"),
        ("window(n=4)", r"window has no n; write window\(size\)"),
        ("window(**{})", r"window has no \*\*"),
        ("window(4, size=4)", "multiple values"),
        ("window(*[1])", "not a mask"),
        ("window(0)", r"window\(0\): a window shows at least 1 key"),
        ("window(-4)", r"window\(-4\)"),
        ("causal & window(4.0)", "at '4.0': not a whole number"),
        ("window('4')", "not a whole number"),
        ("window(True)", "not a whole number"),
        ("window(-True)", "not a mask"),
        ("window(causal)", r"causal\(\) is no whole number"),
        ("window([4])", r"\[4\] is no whole number"),
        ("window(10**3)", r"at '10\*\*3': not a mask"),
        ("window(99999999999999999999)", "more than"),
        ("per_head([4])", "4 is no mask"),
        ("document(4)", "wanted are integers"),
        ("document([0, causal])", "list of integers"),
        ("causal and window(4)", "write & in place of and"),
        ("sinks(1) | (causal or window(4))", r"at 'causal or window\(4\)': write | in place of or"),
        ("not causal", "write ~ in place of not"),
        ("causal + window(4)", "not a mask; an expression has masks with their numbers"),
        ("causal - window(4)", "not a mask"),
        ("4 & causal", "at '4': not a mask"),
        ("-causal", "not a mask"),
        ("masks.causal()", "not a mask"),
        ("causal.__class__", "not a mask"),
        ("causal()()", "not a mask"),
        ("[causal]", "not a mask"),
        ("causal if causal else causal", "not a mask"),
        ("(lambda: causal)()", "not a mask"),
        ("__import__('os').system('true')", "not a mask"),
        ("[x for x in causal]", "not a mask"),
        ("causal < window(4)", "not a mask"),
        ("causal # & window(4)", "'#' has no meaning"),
        ("causal\0", r"'\\x00' has no meaning"),
        ("", "cannot be read at its end"),
        ("causal &", "cannot be read"),
        ("causal window(4)", "cannot be read"),
        ("window(4", r"cannot be read from '\(4' on: .*never closed"),
        ("causal; causal", "cannot be read"),
        ("x = causal", "cannot be read"),
        ("window(" + "9" * 5000 + ")", "cannot be read|more than"),
        ("~" * 50000 + "causal", "nested too deeply"),
        ("(" * 5000, "cannot be read|nested too deeply"),
        (" & ".join(["causal"] * 20000), "nested too deeply"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_expression_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_mask(text)
    assert "\n" not in str(caught.value)
    assert "^" not in str(caught.value)


@given(st.text(alphabet="causlwindo(4)&|~[], =*.'", max_size=40) | st.text(max_size=20))
@settings(deadline=None)
def test_any_text_is_a_mask_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_mask(text), Mask)


FILE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from flexdecode import masks

KEEP = torch.tensor([0, 5])
SIZE = 7
near = masks.causal() & masks.window(3)

def keep(b, h, q_idx, kv_idx):
    return (kv_idx == KEEP).any() & (kv_idx <= q_idx)

def make(): return near
def three(b, h, q_idx): return q_idx

@dataclass
class Every:
    step: int
    def __call__(self, b, h, q_idx, kv_idx): return kv_idx % self.step == 0

even = Every(2)
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def written(text: str) -> Path:
        path = tmp_path / "my masks.py"
        path.write_text(textwrap.dedent(text))
        return path

    return written


def test_a_function_in_a_file(write: Callable[[str], Path]) -> None:
    path = write(FILE)
    shown = dense(load_mask(f"{path}:keep"), range(8), range(8))
    assert shown.nonzero().tolist() == [[q, k] for q in range(8) for k in (0, 5) if k <= q]
    assert load_mask(f"{path}:near") == causal() & window(3)
    assert dense(load_mask(f"{path}:even"), [0], range(4)).tolist() == [[True, False, True, False]]
    assert str(load_mask(f"{path}:keep")) == "mask(keep)"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kepe", r"has no 'kepe' \(did you mean keep\?\)"),
        ("", "has no ''"),
        ("keep()", "has no"),
        ("SIZE", r"SIZE is 7, wanted is a mask or a function \(b, h, q_idx, kv_idx\)"),
        ("KEEP", r"KEEP is tensor"),
        ("make", r"mask function make takes \(\).*if it makes a mask, pass what it returns"),
        ("three", r"takes \(b, h, q_idx\)"),
        ("Every", r"takes \(step\)"),
    ],
)
def test_a_name_that_is_no_mask(name: str, words: str, write: Callable[[str], Path]) -> None:
    path = write(FILE)
    with pytest.raises(ValueError, match=words) as caught:
        load_mask(f"{path}:{name}")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", "cannot be run: SyntaxError: .*line 1"),
        ("import no_such_module\n", "cannot be run: ModuleNotFoundError: .*no_such_module"),
        ("raise RuntimeError('two\\nlines')\n", "cannot be run: RuntimeError: two lines"),
    ],
)
def test_a_file_that_fails(text: str, words: str, write: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        load_mask(f"{write(text)}:f")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    for name in ("none.py", "folder.py"):
        with pytest.raises(ValueError, match=f"{name}: there is no such file"):
            load_mask(f"{tmp_path / name}:f")
