"""A large artifact through the coordinator: upload, verification, download, beside a plain copy of the same file.

    python -m benchmarks.artifacts

One file of 3 GB (`--megabytes`) is published by the public client to one server process on loopback, and downloaded
again. The client hashes it before it sends it; the server hashes it while it arrives and syncs it to disk, reads it
again in the background before the commit, and sends it; the client hashes it while it arrives and syncs it. Beside it
stands what no way around a coordinator can be without: one copy, synced to disk, and one reading with sha256. The
memory of the server is read from /proc, its peak anew for each stage; the client's is this process's own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.coordinator_here import coordinator_here
from benchmarks.workload import new_run
from coordinator.client import Coordinator
from coordinator.wire.policies import BaseModelIdentity

PIECE = 1 << 20
BASE = BaseModelIdentity(name="benchmark", revision="1", sha256="0" * 64)


@dataclass(frozen=True)
class Stage:
    """What was done, how long it took, and the most memory (bytes) that server and client had meanwhile."""

    name: str
    seconds: float
    server_peak: int | None
    client_peak: int | None


def say(line: str) -> None:
    """Progress goes to stderr, the table to stdout."""
    sys.stderr.write(line + "\n")


def peak(pid: int) -> int:
    """The most memory (resident bytes) that a process had since `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc has no memory of process {pid}")


def forget_peak(pid: int) -> None:
    """From now on the peak is counted anew: proc(5), clear_refs."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def write_file(path: Path, size: int) -> None:
    """A file of this many bytes, no two pieces of it alike."""
    piece = os.urandom(PIECE - 8)
    with path.open("wb") as file:
        for number in range(size // PIECE):
            file.write(number.to_bytes(8, "big") + piece)
        file.write(piece[: size % PIECE])
        os.fsync(file.fileno())


def plain_copy(source: Path, target: Path) -> None:
    """Reads and writes in the pieces that the server reads and writes, and syncs."""
    with source.open("rb") as from_file, target.open("wb") as to_file:
        while piece := from_file.read(PIECE):
            to_file.write(piece)
        os.fsync(to_file.fileno())


def plain_sha256(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(folder: Path, size: int) -> tuple[list[Stage], int, int]:
    """All stages, and the server's memory (bytes) before and after them."""
    source = folder / "v1"
    source.mkdir()
    write_file(source / "model.safetensors", size)
    stages = [
        Stage(
            "plain copy, synced", timed(lambda: plain_copy(source / "model.safetensors", folder / "copy")), None, None
        )
    ]
    (folder / "copy").unlink()
    stages.append(Stage("plain sha256", timed(lambda: plain_sha256(source / "model.safetensors")), None, None))
    with coordinator_here(say) as here, Coordinator(here.url, here.token) as coordinator:
        run = coordinator.create_run(new_run("artifacts"))
        forget_peak(here.server_pid)
        before = peak(here.server_pid)
        marks: list[float] = []
        peaks: list[tuple[int, int]] = []

        def at(name: str, count: int, whole: int) -> None:
            """Called for every part that was sent: the first and the last one divide the call into its stages."""
            if not marks or (count == whole and len(marks) < 2):
                marks.append(time.perf_counter())
                peaks.append((peak(here.server_pid), peak(os.getpid())))
                for pid in (here.server_pid, os.getpid()):
                    forget_peak(pid)

        def ended(name: str, began: float, until: float, most: tuple[int, int]) -> None:
            stages.append(Stage(name, until - began, *most))
            say(f"{name}: {until - began:.1f} s")

        forget_peak(os.getpid())
        began = time.perf_counter()
        view = run.publish(version=1, parent_version=0, folder=source, base_model=BASE, kind="full", progress=at)
        until = time.perf_counter()
        if view.state != "committed" or len(marks) != 2:
            raise RuntimeError(f"the artifact is {view.state} after {len(marks)} marks")
        ended("client: sha256 before sending", began, marks[0], peaks[0])
        ended("upload, hashed and synced", marks[0], marks[1], peaks[1])
        ended("verification, until committed", marks[1], until, (peak(here.server_pid), peak(os.getpid())))
        for pid in (here.server_pid, os.getpid()):
            forget_peak(pid)
        began = time.perf_counter()
        run.download(1, folder / "v1-again")
        ended("download, hashed and synced", began, time.perf_counter(), (peak(here.server_pid), peak(os.getpid())))
        forget_peak(here.server_pid)
        return stages, before, peak(here.server_pid)


def as_text(stages: list[Stage], size: int, before: int, after: int) -> str:
    """The table, and the memory of the server around it."""
    beside = {stage.name: stage.seconds for stage in stages[:2]}
    both = sum(beside.values())
    rows = [["", "seconds", "MB/s", "of copy + sha256", "server peak MB", "client peak MB"]]
    for stage in [*stages[:2], Stage("plain copy + sha256", both, None, None), *stages[2:]]:
        memory = ["" if b is None else f"{b / 1e6:.0f}" for b in (stage.server_peak, stage.client_peak)]
        rows.append(
            [
                stage.name,
                f"{stage.seconds:.1f}",
                f"{size / 1e6 / stage.seconds:,.0f}",
                f"{both / stage.seconds:.2f}",
                *memory,
            ]
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    text = [
        f"machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}, "
        f"load {', '.join(f'{load:.2f}' for load in os.getloadavg())}",
        f"artifact: one file of {size / 1e6:,.0f} MB",
        f"server's memory: {before / 1e6:.0f} MB before, {after / 1e6:.0f} MB after",
        "",
    ]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        text.append("  ".join(cells))
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.artifacts", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=3000, help="size of the file; four times that on the disk")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    arguments = parser.parse_args()
    size = arguments.megabytes * 1_000_000
    folder = Path(tempfile.mkdtemp(prefix="coordinator-benchmark-artifacts-"))
    try:
        if size <= 0 or shutil.disk_usage(folder).free < 4 * size:
            parser.error(f"{4 * size / 1e9:.0f} GB must be free in {folder.parent}: another TMPDIR, or fewer megabytes")
        stages, before, after = measure(folder, size)
    finally:
        shutil.rmtree(folder)
    sys.stdout.write(as_text(stages, size, before, after) + "\n")
    if arguments.json is not None:
        numbers = {"bytes": size, "server_before": before, "server_after": after, "stages": [vars(s) for s in stages]}
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
