"""Make or complete the environment in ``.venv``: what ``make setup`` runs.

Run with the Python that the environment is to have, standard library only::

    python3.11 requirements/install.py

It installs ``requirements/cpu.lock`` pin by pin in small batches, then the project itself, editable. A batch
that is done stays done: after an interruption the same command goes on where it stopped. When nothing has
changed since the last run it returns at once. It shows what it does at least every two seconds.

Exit status: 0 ready; 1 one line on stderr says what is wrong and what to do; 130 interrupted.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".setup.json"  # written last: what this environment was made from
BATCH = VENV / ".setup-batch"  # the pins that pip is unpacking now: half written if the run dies here

DISK_BYTES = 6_000_000_000  # 3.5 GB installed, the wheels of one batch beside it, and pip's cache
BATCH_SIZE = 24
SAY_EVERY_SECONDS = 1.5

NETWORK_SIGNS = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|SSLError"
    r"|Temporary failure in name resolution|Network is unreachable"
    r"|Connection (?:refused|reset|broken|aborted)"
)
NOT_FOUND = re.compile(r"No matching distribution found for (\S+)")


class SetupError(Exception):
    """One line for the user: what is wrong and what to do."""


class Progress:
    """A line that says how many of the packages are in place, what pip does now, and for how long.

    On a terminal it is redrawn in place; elsewhere a new line is written every 1.5 seconds.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.doing = ""
        self._started = time.monotonic()
        self._said = 0.0
        self._terminal = sys.stdout.isatty()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._said < (0.1 if self._terminal else SAY_EVERY_SECONDS):
            return
        self._said = now
        seconds = int(now - self._started)
        bar = "#" * (24 * self.done // self.total)
        line = f"setup [{bar:<24}] {self.done}/{self.total}  {seconds // 60}:{seconds % 60:02}  {self.doing}"
        if self._terminal:
            line = "\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K"
        print(line, end="" if self._terminal else "\n", flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", flush=True)


def canonical(name: str) -> str:
    """The name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(lock: Path) -> dict[str, str]:
    """Canonical name -> ``name==version`` of every pin in a lock file, in its order."""
    lines = (line.strip() for line in lock.read_text().splitlines())
    return {canonical(pin.split("==")[0]): pin for pin in lines if pin and not pin.startswith("#")}


def installed() -> dict[str, Path]:
    """``canonical-name==version`` -> its ``.dist-info`` folder, of what lies in the environment."""
    found = {}
    for folder in VENV.glob("lib/python3.*/site-packages/*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        found[f"{canonical(name)}=={version}"] = folder
    return found


def key(pin: str) -> str:
    name, _, version = pin.partition("==")
    return f"{canonical(name)}=={version}"


def wanted_stamp() -> dict[str, str]:
    """All that decides the environment's content: any difference makes the installer run again."""
    return {
        "root": str(ROOT),
        "python": platform.python_version(),
        "lock": hashlib.sha256(LOCK.read_bytes()).hexdigest(),
        "project": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
        "installer": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }


def read_stamp() -> dict[str, str]:
    """The last finished run's stamp; empty when there was none or it was cut short."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def check_machine() -> None:
    if sys.version_info[:2] != (3, 11):
        raise SetupError(
            f"the lock is for Python 3.11, and this is {platform.python_version()}: make PYTHON=python3.11"
        )
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SetupError(
            f"verl, vLLM and torch are pinned for Linux on x86_64, and this is {platform.system()} on"
            f" {platform.machine()}: use such a machine, or `docker compose up` for the coordinator alone"
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise SetupError("this Python has no venv module: install it (Debian and Ubuntu: the package python3.11-venv)")


def check_disk(share: float) -> None:
    """Refuse to begin what the disk cannot hold; `share` is the part of the packages still to come."""
    need, free = int(DISK_BYTES * share), shutil.disk_usage(ROOT).free
    if free < need:
        raise SetupError(
            f"{need / 1e9:.1f} GB of disk are needed in {ROOT} and {free / 1e9:.1f} GB are free:"
            " make room and run again"
        )


def make_environment() -> None:
    """A `.venv` of this Python in this place; one that was moved here or has another Python is replaced."""
    config = VENV / "pyvenv.cfg"
    made_here = config.exists() and f"version = {platform.python_version()}\n" in config.read_text()
    pip = VENV / "bin" / "pip"
    if made_here and pip.exists() and str(VENV) in pip.read_text():
        return
    if VENV.exists():
        print("setup: replacing the .venv of another Python or another place", flush=True)
        shutil.rmtree(VENV)
    print("setup: creating .venv", flush=True)
    result = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stdout + result.stderr).strip().splitlines() or ["no message"]
        raise SetupError(f"python -m venv failed: {said[-1]}")


def explain(output: list[str], pins: list[str]) -> str:
    """Pip's output as one line with what to do."""
    text = "\n".join(output)
    if "No space left on device" in text:
        return "the disk is full: make room (about 6 GB in all) and run again, it goes on from here"
    if NETWORK_SIGNS.search(text):
        return (
            "pip cannot reach its package index: check the network and pip's proxy settings, then run again,"
            " it goes on from here"
        )
    missing = NOT_FOUND.search(text)
    if missing and missing[1].startswith("torch=="):
        return (
            f"pip cannot find {missing[1]}: add PyTorch's CPU wheel index to pip's configuration, for example"
            " through PIP_EXTRA_INDEX_URL (its address: PyTorch's site, Start Locally), and run again"
        )
    if missing:
        return f"pip's index has no {missing[1]} for this Python: check pip's settings (pip config list)"
    errors = [line for line in output if line.lower().startswith("error:")] or output[-1:] or ["no message"]
    return f"pip failed on {', '.join(pins)}: {errors[-1]}"


def say(line: str) -> str | None:
    """What a line of pip's means for the progress line, None if nothing."""
    if line.startswith("Collecting "):
        return f"fetching {line.split()[1]}"
    if match := re.match(r"\s+(?:Downloading|Using cached) (?:\S*/)?([^/\s]+) \(([^)]*)\)", line):
        return f"fetching {match[1].split('-cp')[0].split('-py')[0]} ({match[2]})"
    if line.startswith("Building wheel"):
        return f"building {line.split()[3]}"
    if line.startswith("Installing collected packages"):
        return "unpacking"
    return None


def run_pip(arguments: list[str], progress: Progress, wanted: set[str]) -> list[str] | None:
    """Run ``pip install`` with the progress line alive; pip's output when it failed, None when it worked."""
    # The wheels of a batch lie beside the environment, so that one free-space check covers both.
    scratch = VENV / "tmp"
    scratch.mkdir(exist_ok=True)
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--no-deps", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--no-warn-conflicts", "--no-warn-script-location", *arguments]
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    pip = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    output: list[str] = []
    try:
        while True:
            try:
                line = lines.get(timeout=0.2)
            except queue.Empty:
                progress.done = len(wanted & installed().keys())
            else:
                if line is None:
                    break
                output.append(line)
                progress.doing = say(line) or progress.doing
            progress.tick()
        return output if pip.wait() else None
    finally:
        if pip.poll() is None:
            pip.terminate()
            pip.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def forget_half_written() -> None:
    """Drop the records of the batch that an earlier run died in, so that its packages are unpacked again."""
    if not BATCH.exists():
        return
    lie = installed()
    for pin in BATCH.read_text().split():
        if folder := lie.get(key(pin)):
            shutil.rmtree(folder)
    BATCH.unlink()


def batches(pins: list[str]) -> Iterator[list[str]]:
    """Torch first and alone, since it comes from an index of its own and that is best learnt at once."""
    torch = [pin for pin in pins if pin.startswith("torch==")]
    if torch:
        yield torch
    rest = [pin for pin in pins if pin not in torch]
    for start in range(0, len(rest), BATCH_SIZE):
        yield rest[start : start + BATCH_SIZE]


def install() -> None:
    stamp = wanted_stamp()
    if read_stamp() == stamp and PYTHON.exists():
        return
    check_machine()
    pins = read_pins(LOCK)
    wanted = {key(pin) for pin in pins.values()}
    make_environment()
    STAMP.unlink(missing_ok=True)
    forget_half_written()
    missing = [pin for pin in pins.values() if key(pin) not in installed()]
    check_disk(len(missing) / len(pins))
    progress = Progress(total=len(pins))
    progress.done = len(pins) - len(missing)
    try:
        for batch in batches(missing):
            BATCH.write_text("\n".join(batch))
            if (output := run_pip(batch, progress, wanted)) is not None:
                raise SetupError(explain(output, batch))
            BATCH.unlink()
        progress.done = len(pins)
        progress.doing = "the project itself"
        # Without isolation the build takes hatchling from the environment, where it is pinned.
        editable = ["--no-build-isolation", "--editable", str(ROOT)]
        if (output := run_pip(editable, progress, wanted)) is not None:
            raise SetupError(explain(output, ["the project itself"]))
    finally:
        progress.end()
    STAMP.write_text(json.dumps(stamp, indent=1))
    print(f"setup: ready, {len(pins)} packages in .venv", flush=True)


def main() -> int:
    # Two runs at once must not unpack into each other. The folder itself is locked: no file is left behind.
    folder = os.open(LOCK.parent, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                print("setup: waiting for another setup in this folder", flush=True)
                time.sleep(SAY_EVERY_SECONDS)
        install()
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again and it goes on from here", file=sys.stderr)
        return 130
    finally:
        os.close(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
