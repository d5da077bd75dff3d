"""Text to token ids and back: tokenizers, chat templates, streaming and stop strings. Knows no model."""
