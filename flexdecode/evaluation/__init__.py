"""How good a model's predictions are: perplexity, divergence from a reference, retrieval. Times nothing."""
