"""`flexdecode quantize MODEL OUT`: a checkpoint in int4 or int8, made from a float one.

Knows the options and what is shown; the work is `quantizer`'s.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexdecode.cli.calibration import calibration_text, check_dataset
from flexdecode.cli.options import IgnoreConfig, Json, Model, Offline, Revision, Verbose
from flexdecode.cli.output import print_report, write_json
from flexdecode.cli.quantize_report import LayerBar, check_drawing, draw, rows
from flexdecode.cli.text import note
from flexdecode.cli.verb import option, verb

if TYPE_CHECKING:
    from flexdecode.quantizer.calibration import Samples
    from flexdecode.quantizer.job import Job

NAME = "quantize"
HELP = "Make an int4 or int8 checkpoint of a model."

WHAT = "What is made"
TEXT = "Calibration text (awq)"
RUN = "The run"


@verb
def command(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; it must not exist yet.")],
    method: Annotated[
        str, option("--method", help="awq (searched on text), rtn (plain rounding) or int8.", panel=WHAT)
    ] = "awq",
    group_size: Annotated[
        int, option("--group-size", help="Inputs that share a scale: 32, 64, 128, or -1 for a whole row.", panel=WHAT)
    ] = 128,
    format_: Annotated[
        str,
        option(
            "--format",
            help="awq-gemm or compressed-tensors; auto is the first for int4, the second for int8.",
            panel=WHAT,
        ),
    ] = "auto",
    symmetric: Annotated[bool, option("--symmetric", help="Without zero points.", panel=WHAT)] = False,
    skip: Annotated[
        list[str] | None,
        option(
            "--skip",
            metavar="MODULE",
            help="Leave in float: a name, whole first or last parts of one, or re:PATTERN. May be repeated.",
            panel=WHAT,
            show_default=False,
        ),
    ] = None,
    odd_widths: Annotated[
        str,
        option(
            "--odd-widths",
            help="Matrices that the group does not fit: refuse, leave in float, or take a smaller group.",
            panel=WHAT,
        ),
    ] = "refuse",
    no_clip: Annotated[bool, option("--no-clip", help="Let awq search scales only.", panel=WHAT)] = False,
    next_inputs: Annotated[
        str,
        option("--next-inputs", help="Calibrate a layer on what float or quantized layers put out.", panel=WHAT),
    ] = "float",
    data: Annotated[
        str | None,
        option(
            "--data",
            metavar="FILE|-",
            help="A text, or .jsonl with a document a line; - is stdin. Python's help topics by default.",
            panel=TEXT,
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        option(
            "--dataset",
            metavar="NAME[:CONFIG]",
            help="A Hugging Face dataset instead.",
            panel=TEXT,
            show_default=False,
        ),
    ] = None,
    split: Annotated[str, option("--split", help="Of the dataset.", panel=TEXT)] = "train",
    column: Annotated[str, option("--column", help="Where a dataset or .jsonl has its text.", panel=TEXT)] = "text",
    samples: Annotated[int, option("--samples", help="Most pieces of text.", panel=TEXT)] = 128,
    length: Annotated[int, option("--length", help="Most tokens of a piece.", panel=TEXT)] = 512,
    seed: Annotated[int, option("--seed", help="Makes the draws repeatable.", panel=TEXT)] = 0,
    dry_run: Annotated[
        bool, option("--dry-run", help="Say what would be made and what it would take, and stop.", panel=RUN)
    ] = False,
    resume: Annotated[bool, option("--resume", help="Go on with an interrupted run.", panel=RUN)] = False,
    dtype: Annotated[
        str, option("--dtype", help="Compute type: auto, bfloat16, float16 or float32.", panel=RUN)
    ] = "auto",
    device: Annotated[str, option("--device", help="auto, cpu or cuda.", panel=RUN)] = "auto",
    threads: Annotated[
        int | None, option("--threads", help="CPU threads; torch's choice by default.", panel=RUN, show_default=False)
    ] = None,
    png: Annotated[
        Path | None,
        option("--png", metavar="FILE", help="Draw the errors layer by layer.", panel=RUN, show_default=False),
    ] = None,
    revision: Revision = None,
    offline: Offline = False,
    ignore_config: IgnoreConfig = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    if png is not None:
        check_drawing(png)
    if data is not None and dataset is not None:
        raise ValueError("--data and --dataset both name the calibration text; leave one out")
    from flexdecode.quantizer.folder import check_out
    from flexdecode.quantizer.job import prepare
    from flexdecode.quantizer.options import Options

    options = Options(
        method=method,  # type: ignore[arg-type]
        group_size=group_size,
        format=format_,
        symmetric=symmetric,
        skip=tuple(skip or ()),
        odd_widths=odd_widths,  # type: ignore[arg-type]
        clip=not no_clip,
        next_inputs=next_inputs,  # type: ignore[arg-type]
        samples=samples,
        length=length,
        seed=seed,
        dtype=compute_type(dtype, device),  # type: ignore[arg-type]
    )
    if method != "awq" and (data is not None or dataset is not None):
        raise ValueError(f"--method {method} reads no calibration text; leave out --data and --dataset, or use awq")
    if not dry_run:
        check_out(out, resume=resume)
    if dataset is not None:
        check_dataset(dataset, offline)
    job = prepare(model, options, revision=revision, offline=offline, ignore_config=tuple(ignore_config or ()))
    place = configure(device, threads)
    text = None
    if method == "awq":
        text = calibration_text(job, data, dataset, split, column)
        note(f"calibration: {text}")
    if dry_run:
        show(forecast(job, text), "what it would take", json)
        return
    if verbose:
        for row in left_in_float(job):
            note(f"left: {row['count']} × {row['matrices']} ({row['why']})")
    from flexdecode.quantizer.walk import quantize, report

    begun = time.perf_counter()
    try:
        with LayerBar(verbose) as bar:
            records = quantize(
                job, out, text, device=place, resume=resume, progress=bar, beside=lambda path: beside_gguf(job, path)
            )
    except KeyboardInterrupt:
        note(f"finished layers are kept in {out}.unfinished; --resume goes on")
        raise
    told = report(job, text, records) | {"out": str(out), "seconds": time.perf_counter() - begun}
    if job.source.dequantized:
        note(f"{model} was quantized already; what that lost is in the result too")
    if png is not None:
        draw(png, told["matrices"], f"{Path(model).name} {method}")
    if json:
        write_json(told)
    else:
        summary = {key: told[key] for key in ("out", "calibration", "seconds")} | summarized(job, out)
        print_report(summary | {"layers": rows(told["matrices"])}, f"{method} of {model}")


def compute_type(dtype: str, device: str) -> str:
    """auto is bfloat16 where the processor multiplies it faster, which depends on the machine alone."""
    if dtype != "auto":
        return dtype
    from flexdecode.cli.machine import cpu

    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return "bfloat16"
    return "bfloat16" if {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu()["isa"]) else "float32"


def configure(device: str, threads: int | None) -> Any:
    import torch

    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
    if device not in ("auto", "cpu") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch {torch.__version__} sees no CUDA device; use cpu")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)


def forecast(job: Job, text: Samples | None) -> dict[str, Any]:
    """What the run will take; the time from the rate of one product, measured now."""
    import torch

    from flexdecode.memory import available_bytes, resident_bytes
    from flexdecode.quantizer.estimate import estimate

    found = estimate(job, text.tokens if text else 0, max(text.lengths) if text else 0)
    told = found.as_dict()
    told["peak_memory_bytes"] = found.peak_bytes + (resident_bytes() or 0)
    told["memory_available_bytes"] = available_bytes(torch.device("cpu"))
    told["seconds_about"] = round(found.operations / product_rate())
    told["left"] = left_in_float(job)
    return told


def left_in_float(job: Job) -> list[dict[str, Any]]:
    """A row for all matrices of one name and one reason."""
    counted = Counter((re.sub(r"\.\d+\.", ".*.", m.name), m.why) for m in job.modules if not m.quantized)
    return [{"matrices": name, "count": count, "why": why} for (name, why), count in counted.items()]


def product_rate() -> float:
    """Operations a second of an fp32 matrix product here."""
    import torch

    a = torch.ones(1024, 1024)
    a @ a
    begun = time.perf_counter()
    for _ in range(4):
        a @ a
    return 4 * 2 * 1024**3 / (time.perf_counter() - begun)


def summarized(job: Job, out: Path) -> dict[str, Any]:
    return {
        "matrices_quantized": sum(m.quantized for m in job.modules),
        "source_bytes": sum(job.source.nbytes(name) for name in job.source.names()),
        "saved_bytes": sum(path.stat().st_size for path in out.glob("*.safetensors")),
        "left": left_in_float(job),
    }


def show(told: dict[str, Any], title: str, json: bool) -> None:
    if json:
        write_json(told)
    else:
        print_report(told, title)


def beside_gguf(job: Job, path: Path) -> None:
    """For a GGUF source: its tokenizer and its end tokens in Hugging Face's files."""
    if job.source.format != "gguf":
        return
    from flexdecode.checkpoints.save import write_json as write_file
    from flexdecode.text.tokenizer import MissingTokenizerError, Tokenizer

    try:
        tokenizer = Tokenizer.load(job.source)
    except MissingTokenizerError as missing:
        note(f"no tokenizer was written: {missing}")
        return
    tokenizer.hf.save_pretrained(str(path))
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": list(tokenizer.eos_token_ids)}
    write_file(path / "generation_config.json", {key: value for key, value in ids.items() if value is not None})
