"""Bring the two programs that the tests drive and PyPI does not have: Chromium and promtool.

Run by ``make test`` after the environment is made, standard library only::

    python3.11 requirements/programs.py

``promtool`` is taken out of Debian's package ``prometheus`` into ``.venv/bin``, so that no service is installed.
Chromium is installed as Debian's package, which takes root; without root the one line says what to type. What is
there already is left alone.

Exit status: 0 both are there; 1 one line on stderr says what is missing and what to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(__file__).resolve().parent.parent / ".venv" / "bin"
SAY_EVERY_SECONDS = 1.5


class ProgramError(Exception):
    """One line for the user: what is missing and what to do."""


def run(doing: str, *command: str, folder: Path | None = None) -> None:
    """Run a command, saying every 1.5 seconds what it does; what it said last is the error when it fails."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    started = said = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            time.sleep(0.05)
            if time.monotonic() - said >= SAY_EVERY_SECONDS:
                said = time.monotonic()
                print(f"setup: {doing}, {said - started:.0f} s", flush=True)
        if process.returncode:
            output.seek(0)
            lines = output.read().strip().splitlines() or ["no message"]
            raise ProgramError(f"{doing} failed: {lines[-1]}")


def refresh_lists() -> None:
    """The package lists, which a fresh container has none of; only root may fetch them."""
    if os.geteuid() == 0:
        run("fetching Debian's package lists", "apt-get", "update", "-qq")


def bring_promtool() -> None:
    """promtool from the PATH, or from Debian's package without installing it."""
    wanted = BIN / "promtool"
    if wanted.exists():
        return
    if found := shutil.which("promtool"):
        wanted.symlink_to(found)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)  # as root, apt downloads as another user
        try:
            run("fetching promtool", "apt-get", "download", "prometheus", folder=folder)
        except ProgramError:
            refresh_lists()
            run("fetching promtool", "apt-get", "download", "prometheus", folder=folder)
        (package,) = folder.glob("prometheus_*.deb")
        run("unpacking promtool", "dpkg-deb", "--extract", str(package), str(folder / "files"))
        shutil.copy2(folder / "files" / "usr" / "bin" / "promtool", wanted.with_name("promtool.partial"))
        wanted.with_name("promtool.partial").replace(wanted)


def bring_chromium() -> None:
    """Debian's Chromium, for the tests of the dashboard."""
    if shutil.which("chromium"):
        return
    if os.geteuid() != 0:
        raise ProgramError("the tests drive Chromium: sudo apt-get install chromium, then run this again")
    refresh_lists()
    run("installing Chromium", "apt-get", "install", "--yes", "-qq", "--no-install-recommends", "chromium")


def main() -> int:
    try:
        bring_promtool()
        bring_chromium()
    except ProgramError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        print(
            f"setup: {error.filename} was not found: the tests need Debian or Ubuntu, or promtool and chromium"
            " on the PATH",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
