"""Options in groups: a dataclass whose fields are options, and the decorator that gives them to a verb.

Knows typer and nothing of what an option means. A verb's parameter whose type is such a dataclass is replaced, on the
command line, by the dataclass's fields, so that verbs which share options share one definition of them. Every verb
also gets `--debug`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer


@dataclasses.dataclass
class Session:
    """What one run of the program keeps outside its verbs: whether an error may show its traceback."""

    debug: bool = False


def option(*flags: str, help: str, panel: str | None = None, also_env: str | None = None, **more: Any) -> Any:
    """An option with these spellings, readable from FLEXDECODE_<FIRST LONG SPELLING> too; `also_env` names a second
    variable, asked when the first one is unset."""
    long = next(flag for flag in flags if flag.startswith("--"))
    env = "FLEXDECODE_" + long.removeprefix("--").replace("-", "_").upper()
    names: str | list[str] = env if also_env is None else [env, also_env]
    return typer.Option(*flags, help=help, rich_help_panel=panel, envvar=names, show_envvar=True, **more)


def _remember_debug(context: typer.Context, value: bool) -> bool:
    if value:
        context.ensure_object(Session).debug = True
    return value


Debug = Annotated[
    bool,
    option("--debug", help="Show the traceback of an error.", callback=_remember_debug, is_eager=True),
]


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as typer should see it: groups spread out into their fields, `--debug` added at the end."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []

    def add(name: str, annotation: Any, default: Any) -> None:
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        if not dataclasses.is_dataclass(kind):
            add(name, kind, parameter.default)
            continue
        assert isinstance(kind, type)
        field_hints = get_type_hints(kind, include_extras=True)
        groups[name] = (kind, [field.name for field in dataclasses.fields(kind)])
        for field in dataclasses.fields(kind):
            add(field.name, field_hints[field.name], field.default)
    add("debug", Debug, False)
    seen = [parameter.name for parameter in parameters]
    assert len(seen) == len(set(seen)), f"an option is given twice: {seen}"

    def call(**values: Any) -> None:
        values.pop("debug")
        for name, (kind, fields) in groups.items():
            values[name] = kind(**{field: values.pop(field) for field in fields})
        function(**values)

    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
