"""Which processes an engine has, and that they end."""

import subprocess
import time
from collections.abc import Iterable


def _table() -> list[tuple[int, int, str]]:
    """Process id, parent and command of every live process."""
    lines = subprocess.run(["ps", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in lines.splitlines()]
    return [(int(row[0]), int(row[1]), row[3]) for row in rows if not row[2].startswith("Z")]


def descendants(pid: int) -> dict[int, str]:
    """Commands of the live processes below `pid`, by process id."""
    table = _table()
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        below = {child: command for child, parent, command in table if parent in parents}
        found |= below
        parents = set(below)
    return {child: command for child, command in found.items() if not command.startswith("ps -eo")}


def wait_until_gone(pids: Iterable[int]) -> None:
    """Fails naming those that still live after a minute."""
    wanted = set(pids)
    until = time.monotonic() + 60
    while left := {pid: command for pid, _, command in _table() if pid in wanted}:
        assert time.monotonic() < until, left
        time.sleep(0.2)
