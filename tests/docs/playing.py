"""Shell blocks of the documentation, run by bash with the real programs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.storage.postgres_programs import installed_programs
from tests.docs.blocks import ROOT

# `serve` goes on until it is ended: here in the background, on a free port of this machine, until the block has ended.
_COORDINATOR = f"""#!/bin/bash
if [ "$1" != serve ]; then exec "{sys.executable}" -m coordinator.cli "$@"; fi
rm -f .data/address
# The program itself, not a function: what is ended later is the server and no shell around it.
"{sys.executable}" -m coordinator.cli "$@" --host 127.0.0.1 --port 0 >"$SERVED.log" 2>&1 &
echo $! >"$SERVED"
until [ -s .data/address ] && curl -sf "$(cat .data/address)/readyz" >/dev/null; do
  kill -0 $! || {{ cat "$SERVED.log" >&2; exit 1; }}
  sleep 0.1
done
cat "$SERVED.log"
"""


@contextmanager
def shell(folder: Path, **environment: str) -> Iterator[dict[str, str]]:
    """The environment of blocks that share this folder; a server that one of them starts ends with the context."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "coordinator").write_text(_COORDINATOR, encoding="utf-8")
    (programs / "coordinator").chmod(0o755)
    served = programs / "served"
    path = [programs, Path(sys.executable).parent, installed_programs() / "bin", os.environ["PATH"]]
    names = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("COORDINATOR_", "WORKER_")) and name != "DATABASE_URL"
    }
    try:
        yield names | {
            "PATH": ":".join(map(str, path)),
            "PYTHONPATH": str(ROOT),
            "SERVED": str(served),
            **environment,
        }
    finally:
        if served.exists():
            _end(int(served.read_text()))
            # As root, an embedded Postgres lies elsewhere; the log says where.
            for elsewhere in set(re.findall(r"the database is in (\S+)", Path(f"{served}.log").read_text())):
                shutil.rmtree(elsewhere)


def _end(pid: int) -> None:
    """In good order, and to the end. The server is no child of this process, which cannot wait for it as for one."""
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)


def play(script: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a script to its end, and return what it printed. AssertionError with its errors if it fails."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
