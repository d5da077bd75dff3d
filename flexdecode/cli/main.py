"""The program: its verbs, `--version`, and what becomes of an error.

Exit codes: 0 done, 1 failed (a ValueError or OSError is one line on stderr), 2 usage, 130 Ctrl-C. A verb's file
imports torch only inside its function, so that help and version cost none of it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer

from flexdecode import __version__
from flexdecode.cli import batch, bench, chat, env, eval, generate, inspect, mask, pull, quantize
from flexdecode.cli.text import note, speak_plainly, tolerate_encodings
from flexdecode.cli.verb import Debug, Session

app = typer.Typer(
    name="flexdecode",
    help="Language-model decoding in which attention is yours to program.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (generate, chat, batch, mask, inspect, env, pull, quantize):
    app.command(module.NAME, help=module.HELP)(module.command)
for group in (eval, bench):
    app.add_typer(group.app, name=group.NAME)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flexdecode {__version__}")
        raise typer.Exit()


@app.callback()
def _program(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: Debug = False,
) -> None:
    """Options that stand before the verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program with `argv` (sys.argv without its first by default) and gives back its exit code."""
    tolerate_encodings()
    speak_plainly()
    session = Session()
    try:
        code = _run(argv, session)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return 1
    except (ValueError, OSError) as error:
        return _failed(error, str(error) or type(error).__name__, session)
    except Exception as error:
        hint = "" if session.debug else " (--debug shows the traceback)"
        return _failed(error, f"{type(error).__name__}: {error}{hint}", session)


def _run(argv: Sequence[str] | None, session: Session) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="flexdecode", standalone_mode=False, obj=session)
    except typer.TyperException as error:
        return _wrong_usage(error)
    except typer.Abort:
        return 130
    return result if isinstance(result, int) else 0


def _wrong_usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        note(error.format_message())
        return error.exit_code
    if context is not None:
        note(context.get_usage())
        note(f"Try '{context.command_path} --help' for help.")
    note(f"flexdecode: error: {_one_line(error.format_message())}")
    return error.exit_code


def _failed(error: Exception, message: str, session: Session) -> int:
    if session.debug:
        traceback.print_exception(error)
    note(f"flexdecode: error: {_one_line(message)}")
    return 1


def _one_line(message: str) -> str:
    return " ".join(message.split("\n"))
