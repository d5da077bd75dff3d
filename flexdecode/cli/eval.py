"""`flexdecode eval …`: how good a model's predictions are. Figures come with errors and what they were taken on."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexdecode.cli.heatmap import draw_heatmap
from flexdecode.cli.options import OUTPUT, EngineOptions, Json, Model
from flexdecode.cli.output import Bars, print_report, write_json
from flexdecode.cli.picture import check_drawing
from flexdecode.cli.results import append, check_out, finish, origin, plus_minus, read_texts, settings
from flexdecode.cli.verb import option, verb

if TYPE_CHECKING:
    from flexdecode.evaluation.needle import Found

NAME = "eval"
HELP = "Measure how good a model's predictions are."

app = typer.Typer(help=HELP, no_args_is_help=True)

_BUILT_IN_LIMIT = 4096  # tokens of the built-in text, where nothing else was asked for

TextFile = Annotated[
    str | None,
    option(
        "--text",
        metavar="FILE|-",
        help='Text to evaluate on, or .jsonl with a "text" a line, or - for stdin; by default one that Python has.',
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    option(
        "--context",
        help="Most tokens that a prediction sees; by default 1024, or what the model takes.",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    option(
        "--limit",
        help="Take the first so many tokens; by default 4096 of the built-in text, and all of any other.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    option("--out", "-o", help="Append the results here, as JSON lines.", panel=OUTPUT, show_default=False),
]


@app.command("perplexity", help="Perplexity of a text, with its standard error, and bits per byte.")
@verb
def perplexity(
    model: Model,
    engine: EngineOptions,
    text: TextFile = None,
    context: Context = None,
    stride: Annotated[
        int | None,
        option("--stride", help="Tokens from one window to the next; half the context by default.", show_default=False),
    ] = None,
    limit: Limit = None,
    out: Out = None,
    json: Json = False,
) -> None:
    check_out(out)
    texts, about = read_texts(text)
    from flexdecode.evaluation.perplexity import perplexity as measure

    with Bars() as bars:
        llm = engine.load(model, bars)
        found = measure(llm, texts, context=context, stride=stride, limit=_limit(limit, text), progress=bars)
        row = {"section": "perplexity", "model": model, **asdict(found), **about, **settings(engine, llm.describe())}
    shown = {
        "perplexity": plus_minus(found.perplexity, found.perplexity_error),
        "nats a token": plus_minus(found.nll, found.nll_error),
        "bits a byte": found.bits_per_byte,
        "of": f"{found.tokens:,} tokens of {about['text']}, {found.bytes:,} bytes",
        "windows": f"{found.context:,} tokens, {found.stride:,} apart, {_bos(found.bos)}",
    }
    finish(row, shown, f"{model}: perplexity", out, json)


@app.command("divergence", help="Kullback-Leibler divergence from a reference, and how often both agree.")
@verb
def divergence(
    model: Model,
    engine: EngineOptions,
    against: Annotated[
        str | None,
        option(
            "--against",
            metavar="MODEL",
            help="The reference; by default the same model without --dtype, --kv-dtype, --attention and --mask.",
            show_default=False,
        ),
    ] = None,
    against_dtype: Annotated[
        str, option("--against-dtype", help="The reference's compute type, as for --dtype.")
    ] = "auto",
    text: TextFile = None,
    context: Context = None,
    limit: Limit = None,
    out: Out = None,
    json: Json = False,
) -> None:
    check_out(out)
    reference = replace(
        engine,
        dtype=against_dtype,
        kv_dtype="auto",
        attention="auto",
        mask=None,
        replace_mask=False,
        revision=engine.revision if against in (None, model) else None,
    )
    if against is None and reference == engine:
        raise typer.BadParameter(
            "a model would be compared with itself; give --against MODEL, or what to vary: --dtype, --kv-dtype, "
            "--attention or --mask"
        )
    name = model if against is None else against
    texts, about = read_texts(text)
    context = _agree(context, name, reference, model, engine)
    from flexdecode.evaluation.divergence import divergence as measure
    from flexdecode.evaluation.divergence import read_reference

    with Bars() as bars:
        other = reference.load(name, bars)
        its = settings(reference, other.describe())
        read = read_reference(other, texts, context=context, limit=_limit(limit, text), progress=bars)
        del other  # with it goes all of the reference that `read` does not keep
        llm = engine.load(model, bars)
        found = measure(read, llm, bars)
        row = {
            "section": "divergence",
            "model": model,
            "against": name,
            "reference": its,
            **asdict(found),
            **about,
            **settings(engine, llm.describe()),
        }
    worst = found.largest
    shown = {
        "divergence, nats a token": plus_minus(found.kl, found.kl_error),
        "median": found.kl_median,
        "same likeliest token": plus_minus(found.agreement, found.agreement_error),
        "perplexity": f"{found.model_perplexity:.4g}, the reference's {found.reference_perplexity:.4g}",
        "largest": f"{worst.kl:.4g}, before token {worst.token:,} of document {worst.document}, {worst.text!r}: "
        f"{worst.model_top!r} is the likeliest, the reference's {worst.reference_top!r}",
        "of": f"{found.tokens:,} tokens of {about['text']}",
        "windows": f"{found.context:,} tokens side by side, {_bos(found.bos)}",
        "by position in the window": [asdict(bucket) for bucket in found.by_position],
    }
    finish(row, shown, f"{model} against {name}", out, json)


@app.command("needle", help="Whether a fact is found that stands at some depth of a long prompt.")
@verb
def needle(
    model: Model,
    engine: EngineOptions,
    text: TextFile = None,
    lengths: Annotated[str, option("--lengths", help="Tokens of the prompt, separated by commas.")] = "512,1024,2048",
    depths: Annotated[
        str, option("--depths", help="Where the fact stands, in percent of the text, separated by commas.")
    ] = "0,25,50,75,100",
    trials: Annotated[int, option("--trials", help="Facts and texts for each length and depth.")] = 1,
    first: Annotated[int, option("--first-trial", help="Number of the first trial: others are other facts.")] = 0,
    png: Annotated[
        Path | None,
        option("--png", metavar="FILE", help="Also draw it to this file, with matplotlib.", show_default=False),
    ] = None,
    out: Out = None,
    json: Json = False,
) -> None:
    check_out(out)
    if png is not None:
        check_drawing(png)
    sizes = [int(size) for size in numbers("lengths", lengths)]
    shares = [percent / 100 for percent in numbers("depths", depths)]
    texts, about = read_texts(text)
    from flexdecode.evaluation.needle import needle as ask
    from flexdecode.evaluation.needle import summarize

    found = []
    with Bars() as bars:
        llm = engine.load(model, bars)
        ran = {"section": "needle", "model": model, **about, **settings(engine, llm.describe())}
        haystack = "\n\n".join(texts)
        for one in ask(llm, haystack, sizes, shares, trials=range(first, first + trials), progress=bars):
            found.append(one)
            if out is not None:
                append(out, {**ran, **asdict(one), **origin()})
    told = summarize(found)
    if png is not None:
        _draw_needle(png, found, sizes, shares, model)
    if json:
        write_json({**ran, **asdict(told), "trials": [asdict(one) for one in found], **origin()})
        return
    shown = {
        "found": f"{told.found} of {told.asked}",
        "probability of the right answer among ten": plus_minus(told.likelihood, told.likelihood_error),
        "prompts": f"of {about['text']}, "
        + ("in the chat template" if told.chat else "plain: there is no chat template"),
        "by length and depth": [_needle_row(found, size, shares) for size in sizes],
    }
    print_report(shown, f"{model}: needle")


def _cell(found: list[Found], size: int, share: float) -> tuple[str, float]:
    """Of one length and depth: how many were found of how many, and the mean likelihood."""
    own = [one for one in found if (one.length, one.depth) == (size, share)]
    return f"{sum(one.found for one in own)}/{len(own)}", sum(one.likelihood for one in own) / len(own)


def _needle_row(found: list[Found], size: int, shares: list[float]) -> dict[str, Any]:
    cells = {f"{share:.0%}": _cell(found, size, share) for share in shares}
    return {"length": size, **{share: f"{word}, {value:.2f}" for share, (word, value) in cells.items()}}


def _draw_needle(png: Path, found: list[Found], sizes: list[int], shares: list[float], model: str) -> None:
    cells = [[_cell(found, size, share) for size in sizes] for share in shares]
    draw_heatmap(
        png,
        [[value for _, value in line] for line in cells],
        [[word for word, _ in line] for line in cells],
        [f"{share:.0%}" for share in shares],
        [f"{size:,}" for size in sizes],
        ("depth", "tokens", f"{model}: found; colour: right answer among ten"),
    )


def numbers(name: str, text: str) -> list[float]:
    """A list of different numbers, separated by commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} {text!r} is not a list of numbers such as 25,50") from None
    if len(set(found)) != len(found) or not all(value.is_integer() and value >= 0 for value in found):
        raise ValueError(f"--{name} {text!r} must hold whole numbers, each once")
    return found


def _agree(context: int | None, reference: str, its: EngineOptions, model: str, own: EngineOptions) -> int:
    """The context for both, from their headers: refuses, before either is loaded, two models without a vocabulary in
    common, and a context that is too much for one."""
    from flexdecode.evaluation.divergence import check_vocabulary
    from flexdecode.evaluation.windows import choose_context
    from flexdecode.llm import describe_model

    told = [
        describe_model(name, revision=o.revision, offline=o.offline, ignore_config=o.keys_to_ignore)
        for name, o in ((reference, its), (model, own))
    ]
    check_vocabulary(*(one["vocab_size"] for one in told))
    return choose_context(context, min(own.max_context or one["max_position"] for one in told))


def _limit(limit: int | None, text: str | None) -> int | None:
    return _BUILT_IN_LIMIT if limit is None and text is None else limit


def _bos(bos: bool) -> str:
    return "each behind a BOS" if bos else "no BOS, as the tokenizer has it"
