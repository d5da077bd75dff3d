"""Where calibration text comes from: a file, stdin, a Hugging Face dataset, or Python's own help topics.

Knows sources of text; what becomes of it is `quantizer.calibration`'s. The datasets package is loaded only when a
dataset is named.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexdecode.cli.text import warn

if TYPE_CHECKING:
    from flexdecode.quantizer.calibration import Document, Encode, Samples
    from flexdecode.quantizer.job import Job


def check_dataset(name: str, offline: bool) -> None:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"--dataset {name} needs the datasets package, which is not installed: pip install datasets")
    if offline and not Path(name).exists():
        raise ValueError(f"--dataset {name} is read over the network, which --offline (or HF_HUB_OFFLINE) forbids")


def calibration_text(job: Job, data: str | None, dataset: str | None, split: str, column: str) -> Samples:
    """The pieces to calibrate on. Raises ValueError for a file, a dataset or a tokenizer that cannot be read."""
    from flexdecode.quantizer.calibration import python_topics, random_ids, read_file, read_rows, read_text
    from flexdecode.text.tokenizer import MissingTokenizerError, Tokenizer

    options, vocab = job.options, job.config.vocab_size
    try:
        encode = Tokenizer.load(job.source).encode
    except MissingTokenizerError as missing:
        reason = str(missing)

        def encode(text: str, add_special_tokens: bool = True) -> list[int]:
            raise ValueError(f"{reason}: give --data a .jsonl file of lists of ids")

        if job.source.format == "random" and data is None and dataset is None:
            ids = random_ids(vocab, options.samples, options.length, options.seed)
            return take(ids, encode, job, "random token ids")
    if dataset is not None:
        found = read_rows(dataset_rows(dataset, split, options.seed), dataset, column)
        return take(found, encode, job, dataset, endless=True)
    if data == "-":
        return take(read_text(sys.stdin), encode, job, "stdin")
    if data is not None:
        return take(read_file(Path(data), column), encode, job, data)
    warn("no --data: Python's own help topics serve as text; text like that of your use is better")
    return take(python_topics(), encode, job, "Python's help topics")


def take(documents: Iterable[Document], encode: Encode, job: Job, origin: str, endless: bool = False) -> Samples:
    """The pieces of `documents` that the options ask for."""
    from flexdecode.quantizer.calibration import sample

    o = job.options
    return sample(
        documents,
        encode,
        job.config.vocab_size,
        samples=o.samples,
        length=min(o.length, job.config.max_position),
        seed=o.seed,
        origin=origin,
        endless=endless,
    )


def dataset_rows(name: str, split: str, seed: int) -> Iterator[Any]:
    from datasets import load_dataset

    path, _, config = name.partition(":")
    try:
        rows = load_dataset(path, config or None, split=split, streaming=True)
        yield from rows.shuffle(seed=seed, buffer_size=1000)
    except Exception as error:  # the library raises whatever its many readers raise
        raise ValueError(f"--dataset {name}: {' '.join(str(error).split())}") from error
