"""`flexdecode chat MODEL`: a conversation, at a terminal or line by line from any other stdin.

Answers go to stdout as they grow; prompts, figures and messages go to stderr. Ctrl-C stops an answer, which then stays
in the conversation as far as it came; Ctrl-C at an empty prompt leaves with 130, Ctrl-D and /bye leave with 0. Without
a terminal a turn is a line, and the first error or Ctrl-C ends the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flexdecode.cli import lines, slash
from flexdecode.cli.answer import as_data, receive, stats_line
from flexdecode.cli.conversation import Conversation
from flexdecode.cli.explain import explain, has_chat_template
from flexdecode.cli.options import EngineOptions, Json, Model, SamplingOptions, Speculate, Verbose
from flexdecode.cli.output import Bars, write_json, write_text
from flexdecode.cli.text import clean, note
from flexdecode.cli.verb import option, verb

if TYPE_CHECKING:
    from flexdecode.llm import LLM

NAME = "chat"
HELP = "Talk with a model."


@verb
def command(
    model: Model,
    sampling: SamplingOptions,
    engine: EngineOptions,
    system: Annotated[
        str | None, option("--system", metavar="TEXT", help="System message.", show_default=False)
    ] = None,
    overflow: Annotated[
        str,
        option(
            "--overflow",
            help="A conversation longer than the context: error, or sinks: its oldest turns go, system text stays.",
        ),
    ] = "error",
    speculate: Speculate = "off",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    from flexdecode.text.overflow import check_overflow

    check_overflow(overflow)
    text = None if system is None else clean(system, "--system")
    conversation = Conversation(sampling.params(), text)
    interactive = lines.is_interactive()
    with Bars() as bars:
        llm = engine.load(model, bars, speculate)
        if not has_chat_template(llm):
            raise ValueError(f"{model} has no chat template; `flexdecode generate {model} -p TEXT` needs none")
        if verbose:
            explain(llm, conversation.params, chat=True)
        Chat(llm, conversation, _reader(interactive, model), bars, interactive, overflow, json, verbose).talk()


def _reader(interactive: bool, model: str) -> lines.ReadLine:
    if not interactive:
        return lines.plain_reader()
    note(f"{model}: /help lists the commands")
    return lines.terminal_reader([f"/{name}" for name in slash.COMMANDS])


@dataclass(frozen=True)
class Chat:
    """A conversation, the model that answers in it and the place its lines come from."""

    llm: LLM
    conversation: Conversation
    read: lines.ReadLine
    bars: Bars
    interactive: bool
    overflow: str
    json: bool
    verbose: bool

    def talk(self) -> None:
        """Turns until the input ends. At a terminal an error costs only its turn."""
        while True:
            try:
                after = self.take_turn(lines.read_message(self.read))
            except EOFError:
                return
            except ValueError as error:
                if not self.interactive:
                    raise
                note(f"flexdecode: error: {error}")
                continue
            if after is slash.After.LEAVE:
                return

    def take_turn(self, message: str) -> slash.After:
        """One message: a command is done, a question answered."""
        if not message.strip():
            return slash.After.WAIT
        if message.startswith("/") and not message.startswith("//"):
            after = slash.run(message, self.conversation, note)
            if after is not slash.After.ANSWER:
                return after
        else:
            self.conversation.ask(message.removeprefix("/"))
        self.answer()
        return slash.After.WAIT

    def answer(self) -> None:
        """Answers the question that waits. A question that fails is forgotten, so that the next one can be asked."""
        conversation = self.conversation
        try:
            chunks = self.llm.stream_chat(conversation.request(), conversation.params, overflow=self.overflow)
            answer = receive(chunks, self._write)
        except Exception:
            conversation.take_back()
            raise
        self.bars.close()
        # An answer stopped before its first text would leave an empty turn, which some templates refuse.
        if answer.interrupted and not answer.text:
            conversation.take_back()
        else:
            conversation.answered(answer.text)
        if self.json:
            write_json(as_data(answer), indent=None)
        else:
            write_text("\n")
        if answer.interrupted:
            if not self.interactive:
                raise typer.Exit(130)
            note("[stopped]")
        if self.verbose and answer.stats is not None:
            note(stats_line(answer.stats))

    def _write(self, text: str) -> None:
        self.bars.close()
        if not self.json:
            write_text(text)
