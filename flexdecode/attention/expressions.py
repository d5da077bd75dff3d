"""Masks as text: `causal & (window(4096) | sinks(4))`, or a function in a file of the user's, FILE.py:NAME.

An expression is parsed and never evaluated: it can name the built-in masks and numbers, and nothing else. Knows of
functions only where to find them.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from flexdecode.attention import masks
from flexdecode.attention.masks import Mask, as_mask
from flexdecode.attention.tables import one_line

_MASKS: dict[str, Callable[..., Mask]] = {
    make.__name__: make
    for make in (
        masks.block_diagonal,
        masks.causal,
        masks.chunked,
        masks.dilated,
        masks.document,
        masks.per_head,
        masks.prefix_lm,
        masks.sinks,
        masks.window,
    )
}
_KNOWN = f"known are {', '.join(_MASKS)}"
_GRAMMAR = "an expression has masks with their numbers, & | ~ and parentheses"
_WORDS = {ast.And: ("and", "&"), ast.Or: ("or", "|"), ast.Not: ("not", "~")}


def load_mask(text: str) -> Mask:
    """The mask that `text` names: FILE.py:NAME for a mask or a mask_mod in a Python file, else an expression.

    The file is run, as an import would. Raises ValueError where there is no such file or name, or it is no mask.
    """
    file, separator, name = text.rpartition(".py:")
    if not separator:
        return parse_mask(text)
    path = Path(f"{file}.py")
    found = vars(_run(path))
    if name not in found:
        others = [n for n, value in found.items() if not n.startswith("_") and callable(value)]
        raise ValueError(f"{path} has no {one_line(name)}{_nearest(name, others)}")
    if not callable(found[name]):
        raise ValueError(
            f"{path}: {name} is {one_line(found[name])}, wanted is a mask or a function (b, h, q_idx, kv_idx)"
        )
    try:
        return as_mask(found[name])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_mask(text: str) -> Mask:
    """The mask that an expression describes: the built-in masks by name, integers, lists, keyword arguments, & | ~.

    A mask without arguments needs no parentheses. Raises ValueError, naming the part that is wrong.
    """
    expression = " ".join(text.split())
    for character in "#\0":  # would hide what follows it
        if character in expression:
            raise ValueError(f"mask {one_line(expression)}: {character!r} has no meaning; {_GRAMMAR}")
    try:
        return _Reader(expression).mask(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        rest = expression[max(error.offset or 1, 1) - 1 :]
        where = f"from {one_line(rest)} on" if rest else "at its end"
        raise ValueError(f"mask {one_line(expression)} cannot be read {where}: {error.msg}; {_GRAMMAR}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"mask {one_line(expression)} is nested too deeply") from None


class _Reader:
    """Walks the syntax tree of one expression."""

    def __init__(self, expression: str) -> None:
        self._expression = expression

    def mask(self, node: ast.expr) -> Mask:
        match node:
            case ast.BinOp(left, ast.BitAnd(), right):
                return self.mask(left) & self.mask(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return self.mask(left) | self.mask(right)
            case ast.UnaryOp(ast.Invert(), operand):
                return ~self.mask(operand)
            case ast.Name(name):
                return self._made(node, name, [], [])
            case ast.Call(ast.Name(name), arguments, keywords):
                return self._made(node, name, arguments, keywords)
            case ast.BoolOp(op) | ast.UnaryOp(op) if type(op) in _WORDS:
                word, symbol = _WORDS[type(op)]
                raise self._wrong(node, f"write {symbol} in place of {word}")
        raise self._wrong(node, f"not a mask; {_GRAMMAR}")

    def _made(self, node: ast.expr, name: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Mask:
        if name not in _MASKS:
            raise self._wrong(node, f"there is no mask {name}{_nearest(name, _MASKS)}; {_KNOWN}")
        make = _MASKS[name]
        values = [self._value(argument) for argument in arguments]
        signature = inspect.signature(make)
        named = {}
        for keyword in keywords:
            key = keyword.arg or "**"
            if key not in signature.parameters:
                raise self._wrong(node, f"{name} has no {key}; write {_form(make)}")
            named[key] = self._value(keyword.value)
        try:
            signature.bind(*values, **named)
        except TypeError as error:
            raise self._wrong(node, f"{error}; write {_form(make)}") from None
        return make(*values, **named)

    def _value(self, node: ast.expr) -> object:
        """An argument: an integer, a list of arguments, or a mask."""
        match node:
            case ast.Constant(int() as number) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(ast.USub(), ast.Constant(int() as number)) if not isinstance(number, bool):
                return -number
            case ast.List(items) | ast.Tuple(items):
                return [self._value(item) for item in items]
            case ast.Constant():
                raise self._wrong(node, "not a whole number")
        return self.mask(node)

    def _wrong(self, node: ast.expr, fault: str) -> ValueError:
        part = ast.get_source_segment(self._expression, node) or ""
        where = "" if part == self._expression else f", at {one_line(part)}"
        return ValueError(f"mask {one_line(self._expression)}{where}: {fault}")


def _form(make: Callable[..., Mask]) -> str:
    return f"{make.__name__}({', '.join(inspect.signature(make).parameters)})"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _run(path: Path) -> ModuleType:
    """The module that a file of the user's makes."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; masks are named as FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(f"flexdecode_mask_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {' '.join(str(error).split())}") from error
    return module
