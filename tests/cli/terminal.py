"""A child process at a pseudo-terminal: what a person types, what a person sees, and how the program ends."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path


class Terminal:
    """A child process whose stdin, stdout and stderr are one pseudo-terminal, as a person has it."""

    def __init__(self, home: Path, *arguments: str) -> None:
        """Runs this Python with `arguments`; `home` takes what the program keeps."""
        argv = [sys.executable, *arguments]
        env = {name: value for name, value in os.environ.items() if not name.startswith("FLEXDECODE_")}
        env |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(home), "HOME": str(home)}
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, argv, env)
        self.seen = ""
        self.status: int | None = None

    def expect(self, text: str, seconds: float = 30.0) -> None:
        """Reads until `text` has appeared, and forgets what came up to its end."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.seen!r}"
            self._read(0.2)
        self.seen = self.seen.split(text, 1)[1]

    def send(self, keys: str) -> None:
        os.write(self.file, keys.encode())

    def exit_code(self, seconds: float = 30.0) -> int:
        deadline = time.monotonic() + seconds
        while self.status is None:
            assert time.monotonic() < deadline, f"still running: {self.seen!r}"
            self._read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def _read(self, seconds: float) -> None:
        if select.select([self.file], [], [], seconds)[0]:
            try:
                self.seen += os.read(self.file, 65536).decode(errors="replace")
            except OSError:  # the child has closed its side
                time.sleep(0.01)

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.file)
