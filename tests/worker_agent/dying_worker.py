"""`worker-agent` that is killed by SIGKILL in the middle of its work with the spool: at the place named by `DIES_AT`.

half: half a batch is written. written: it is, under its temporary name. renamed: it is in the spool, and nothing else
knows. answered: the coordinator has answered for it, and it is still in the spool.
"""

import os
import signal
from pathlib import Path

from worker_agent import spool
from worker_agent.cli import main

_PLACE = os.environ["DIES_AT"]
_write, _send = spool._write, spool.Spool._send


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write(path: Path, content: bytes) -> None:
    if _PLACE == "half":
        path.with_suffix(".part").write_bytes(content[: len(content) // 2])
        _die()
    if _PLACE == "written":
        path.with_suffix(".part").write_bytes(content)
        _die()
    _write(path, content)
    if _PLACE == "renamed":
        _die()


def send(self: spool.Spool, *arguments: object) -> None:
    _send(self, *arguments)  # type: ignore[arg-type]
    if _PLACE == "answered":
        _die()


if __name__ == "__main__":
    spool._write = write
    spool.Spool._send = send  # type: ignore[method-assign]
    main()
