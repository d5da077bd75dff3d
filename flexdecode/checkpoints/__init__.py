"""Bytes on disk to named tensors and a config dict, knowing nothing of what they mean."""
