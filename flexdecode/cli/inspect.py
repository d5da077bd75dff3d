"""`flexdecode inspect MODEL`: what a checkpoint holds and what it will need, from its headers alone.

With --measure the model is loaded in this process, and the memory that loading took is set against the weights.
"""

from __future__ import annotations

from typing import Annotated, Any

from flexdecode.cli.memory import peak_resident_bytes, resident_bytes
from flexdecode.cli.options import EngineOptions, Model, OutputOptions
from flexdecode.cli.output import Bars, print_report, write_json
from flexdecode.cli.verb import option, verb

NAME = "inspect"
HELP = "Show a model's layers, quantization and memory; reads headers only."


@verb
def command(
    model: Model,
    engine: EngineOptions,
    output: OutputOptions,
    context: Annotated[
        int | None,
        option("--context", help="Also show the memory needed at this many tokens.", show_default=False),
    ] = None,
    measure: Annotated[
        bool, option("--measure", help="Load the model and compare the memory taken with the weights.")
    ] = False,
) -> None:
    if context is not None and context < 1:
        raise ValueError(f"--context is {context}; it is a number of tokens, at least 1")
    report = measured(model, engine, context) if measure else described(model, engine, context)
    if output.json:
        write_json(report)
    else:
        print_report(report, model)


def described(model: str, engine: EngineOptions, context: int | None) -> dict[str, Any]:
    from flexdecode.llm import describe_model

    return dict(
        describe_model(
            model,
            revision=engine.revision,
            offline=engine.offline,
            ignore_config=tuple(engine.ignore_config or ()),
            context=context,
        )
    )


def measured(model: str, engine: EngineOptions, context: int | None) -> dict[str, Any]:
    """`described`, and a section "measured" in bytes: resident memory before, peak during and resident after loading,
    and the ratio of what loading took at its peak to the weights as they are held."""
    report = described(model, engine, context)
    import flexdecode.llm  # noqa: F401  torch's own memory is no part of the model's

    before = resident_bytes() or peak_resident_bytes()
    with Bars() as bars:
        llm = engine.load(model, bars)
    held = int(llm.describe()["weights_bytes"])
    peak = peak_resident_bytes()
    report["measured"] = {
        "before_loading_bytes": before,
        "peak_bytes": peak,
        "after_loading_bytes": resident_bytes(),
        "weights_held_bytes": held,
        "peak_minus_before_over_weights": (peak - before) / held if held else None,
    }
    return report
