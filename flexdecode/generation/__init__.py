"""From token ids to token ids: sampling, scheduling, the engine. Knows no text."""
