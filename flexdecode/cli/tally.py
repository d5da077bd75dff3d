"""What becomes of the lines of `flexdecode batch`, in numbers. Knows nothing of what they say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Tally:
    """What has become of the lines. `seconds` is wall time from the first line on, with the model loaded."""

    lines: int
    skipped: int = 0
    failed_before: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    @property
    def left(self) -> int:
        return self.lines - self.skipped - self.failed_before - self.answered - self.failed

    @property
    def rate(self) -> float:
        """New tokens a second, over all lines."""
        return self.new_tokens / self.seconds if self.seconds > 0 else 0.0

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "left": self.left, "new_tokens_per_second": self.rate}

    def line(self) -> str:
        earlier = f", {self.skipped + self.failed_before} earlier" if self.skipped + self.failed_before else ""
        return (
            f"{self.answered} answered, {self.failed} failed{earlier} | prompt {self.prompt_tokens} tokens | "
            f"new {self.new_tokens} tokens, {self.rate:.1f} tok/s | {self.seconds:.1f} s"
        )
