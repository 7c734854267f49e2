"""Examples run as their first lines say: as a process, with a coordinator's address and token in the environment."""

import os
import subprocess
import sys
from pathlib import Path

from tests.client.server_process import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "examples"


def environment(server: ServerProcess) -> dict[str, str]:
    """This process's environment, with the coordinator's address and an admin's token."""
    return os.environ | {"COORDINATOR_URL": server.url, "COORDINATOR_TOKEN": server.token}


def play(server: ServerProcess, name: str, *arguments: str) -> str:
    """Run the example in this file to its end, and return what it printed. AssertionError with its log if it fails."""
    return _run(server, [str(EXAMPLES / name), *arguments], 60)


def play_module(server: ServerProcess, name: str, *arguments: str, timeout: float) -> str:
    """The same for one that is a module."""
    return _run(server, ["-m", name, *arguments], timeout)


def _run(server: ServerProcess, arguments: list[str], timeout: float) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLES.parent,
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
