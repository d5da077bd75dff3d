"""One decoder for every family, built from a ModelConfig and a checkpoint's weights."""
