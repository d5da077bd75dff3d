"""What every row about a model carries, and the floor of its decode steps. Loads no model and times nothing."""

from __future__ import annotations

from flexdecode.benchmark.ceilings import Reader
from flexdecode.benchmark.rounds import Times
from flexdecode.benchmark.rows import Row
from flexdecode.describe import describe_decoder
from flexdecode.llm import LLM

STEP, READ = "step", "read"  # names of the works
_MOST_READ = 1 << 29  # bytes at a time: more than caches hold, and quick beside a step


def facts(llm: LLM, model: str) -> Row:
    """How the model named `model` is held and computed."""
    told = describe_decoder(llm.engine.model)
    masks = dict.fromkeys(str(layer.mask) for layer in llm.engine.cache.layers)
    return {
        "model": model,
        "dtype": told["dtype"],
        "quantization": " + ".join(kind.removesuffix(" bytes") for kind in told["held_as"]),
        "kv_dtype": told["kv_dtype"],
        "mask": ", ".join(masks),
        "attention": ", ".join(dict.fromkeys(told["attention_backends"].values())),
        "device": told["device"],
        "weights_bytes": told["weights_bytes"],
    }


def check_context(llm: LLM, needed: int, option: str) -> None:
    """Raises ValueError where `option` asks for a longer context than the model has."""
    if needed > llm.max_context:
        raise ValueError(
            f"{option} needs a context of {needed} tokens, and it ends at {llm.max_context}; ask for less, or raise "
            "--max-context where the model allows it"
        )


class Floor:
    """The least time of decode steps of `batch` sequences that see `keys` keys each: every weight read once for all,
    every visible key and value once for each, at the rate at which `reader` reads in the same rounds."""

    def __init__(self, llm: LLM, keys: int, batch: int = 1) -> None:
        told = llm.explain(keys)
        self.weights_bytes, self.kv_bytes = told.weights_bytes, batch * told.kv_bytes
        self.reader = Reader(min(self.nbytes, _MOST_READ), llm.engine.model.device, as_weights=True)

    @property
    def nbytes(self) -> int:
        return self.weights_bytes + self.kv_bytes

    def columns(self, times: Times, steps: int = 1, step: str = STEP) -> Row:
        """Of `times` of the works `step` (so many decode steps a call) and READ."""
        share = self.nbytes / self.reader.nbytes
        floor = times.ms(READ) * share
        return {
            "weights_read_bytes": self.weights_bytes,
            "kv_read_bytes": self.kv_bytes,
            "read_gb_per_s": self.reader.nbytes / times.ms(READ) / 1e6,
            "floor_ms": floor,
            "floor_steps_per_second": 1e3 / floor,
            "fraction_of_floor": times.ratio(READ, step) * share * steps,
        }
