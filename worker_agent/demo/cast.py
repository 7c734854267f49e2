"""The demo's child processes: started with a log each, watched, and gone when the demo is."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: nothing may be imported between fork and exec.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class DemoError(Exception):
    """The demo cannot go on; the message is one line for the person who started it."""


@dataclass
class Child:
    """One process and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    may_end: bool


class Cast:
    """The children of this process. They are killed with it, however it ends; on Linux even by SIGKILL.

    `start` is to be called on the main thread: Linux ties a child's life to the thread that made it.
    """

    def __init__(self, logs: Path) -> None:
        self.logs: dict[str, Path] = {}
        """The log of every child that was ever started, by its name."""
        self._folder = logs
        self._children: dict[str, Child] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        last_signal: signal.Signals = signal.SIGKILL,
        may_end: bool = False,
    ) -> None:
        """Start a child. `last_signal` reaches it when this process dies; `may_end`: it may end with status 0."""
        parent = os.getpid()

        def tie() -> None:
            if _PRCTL is not None:
                _PRCTL(_PR_SET_PDEATHSIG, last_signal)
                if os.getppid() != parent:  # it died before the tie held
                    os._exit(1)

        log = self.logs[name] = self._folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is this process's to handle
                preexec_fn=tie,
            )
        self._children[name] = Child(name, process, log, may_end)

    def told(self, name: str) -> list[dict[str, object]]:
        """The JSON lines in a child's log so far, oldest first; what its libraries print is left out."""
        lines = self.logs[name].read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith('{"time"')]

    def check(self) -> None:
        """Raises `DemoError` if a child ended that should not have."""
        for child in self._children.values():
            status = child.process.poll()
            if status is not None and not (child.may_end and status == 0):
                how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
                raise DemoError(f"{child.name} ended with {how}: see {child.log}")

    def ended(self, name: str) -> bool:
        """Whether this child ended as it should; raises `DemoError` if it or another did otherwise."""
        self.check()
        return self._children[name].process.poll() is not None

    def kill(self, name: str) -> None:
        """End a child at once, as a crash would."""
        child = self._children.pop(name)
        child.process.kill()
        child.process.wait()

    def stop(self, names: Sequence[str], patience_seconds: float) -> None:
        """Ask children to end and wait for them together; kill those that do not within the patience."""
        children = [self._children[name] for name in names if name in self._children]
        for child in children:
            child.may_end = True
            if child.process.poll() is None:
                child.process.terminate()
        until = time.monotonic() + patience_seconds
        for child in children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            self._children.pop(child.name)
