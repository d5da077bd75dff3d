"""From a checkpoint to a quantized one: what is rounded, how its scales are searched, and how the result is saved."""
