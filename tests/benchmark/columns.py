"""The columns that rows about models share."""

from __future__ import annotations

PROVENANCE = {"warm_up", "repetitions", "threads", "isa", "cpu", "gpu", "flexdecode", "torch", "python", "commit"}
PROVENANCE |= {"dirty", "load_average", "date"}
EVERY_ROW = {"benchmark", "model", *PROVENANCE}
FACTS = {"dtype", "quantization", "kv_dtype", "mask", "attention", "device", "weights_bytes"}
FLOOR = {"weights_read_bytes", "kv_read_bytes", "read_gb_per_s", "floor_ms", "floor_steps_per_second"}
FLOOR |= {"fraction_of_floor"}


def spread(prefix: str = "") -> set[str]:
    return {f"{prefix}{name}" for name in ("ms", "ms_q1", "ms_q3", "ms_min", "ms_max")}
