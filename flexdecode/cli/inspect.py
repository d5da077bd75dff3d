"""`flexdecode inspect MODEL`: what a checkpoint holds and what it will need, from its headers alone.

With --measure the model is loaded in this process, and the memory that loading took is set against the weights.
"""

from __future__ import annotations

from typing import Annotated, Any

from flexdecode.cli.options import (
    Dtype,
    EngineOptions,
    IgnoreConfig,
    Json,
    KvDtype,
    MaxContext,
    Model,
    Offline,
    Revision,
)
from flexdecode.cli.output import Bars, print_report, write_json
from flexdecode.cli.verb import option, verb
from flexdecode.memory import peak_resident_bytes, resident_bytes

NAME = "inspect"
HELP = "Show a model's layers, quantization and the memory it needs; reads headers only."


@verb
def command(
    model: Model,
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    max_context: MaxContext = None,
    measure: Annotated[
        bool, option("--measure", help="Load the model and compare the memory taken with the weights.")
    ] = False,
    revision: Revision = None,
    offline: Offline = False,
    ignore_config: IgnoreConfig = None,
    json: Json = False,
) -> None:
    engine = EngineOptions(
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_context=max_context,
        revision=revision,
        offline=offline,
        ignore_config=ignore_config,
    )
    report = described(model, engine)
    if measure:
        report["measured"] = measured(model, engine)
    if json:
        write_json(report)
    else:
        print_report(report, model)


def described(model: str, engine: EngineOptions) -> dict[str, Any]:
    from flexdecode.llm import describe_model

    report = describe_model(
        model,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
        max_context=engine.max_context,
        revision=engine.revision,
        offline=engine.offline,
        ignore_config=engine.keys_to_ignore,
    )
    return dict(report)


def measured(model: str, engine: EngineOptions) -> dict[str, Any]:
    """In bytes: resident memory before, peak during and resident after loading, and the ratio of what loading took at
    its peak to the weights as they are held. Torch's own memory is in none of the differences."""
    before = resident_bytes() or peak_resident_bytes()
    with Bars() as bars:
        llm = engine.load(model, bars)
    held = int(llm.describe()["weights_bytes"])
    peak = peak_resident_bytes()
    return {
        "before_loading_bytes": before,
        "peak_bytes": peak,
        "after_loading_bytes": resident_bytes(),
        "weights_held_bytes": held,
        "peak_minus_before_over_weights": (peak - before) / held if held else None,
    }
