"""One server process: its database, its first token, its socket, and uvicorn on top."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import ipaddress
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from coordinator.app import create_app
from coordinator.operations import logs
from coordinator.operations.access import new_secret
from coordinator.operations.limits import Limits
from coordinator.protocol import ProblemProtocol
from coordinator.settings import Settings
from coordinator.storage.database import check_durability, connect, wait_until_started
from coordinator.storage.migrations import check_schema, upgrade
from coordinator.storage.postgres import EmbeddedPostgres
from coordinator.storage.postgres_keeper import kept_running
from coordinator.tokens import service as tokens

Say = Callable[[str], None]


class ServerError(RuntimeError):
    """The server cannot start; the message says why and what to do."""


@contextlib.contextmanager
def database_url(settings: Settings, say: Say) -> Iterator[str]:
    """The address of the database: the one that was given, or an embedded one that lives as long as this block."""
    if settings.database_url is not None:
        url = settings.database_url.get_secret_value()
        asyncio.run(wait_until_started(url, say))
        yield url
        return
    with kept_running(EmbeddedPostgres(settings.data / "postgres", progress=say), say) as url:
        yield url


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def write_private(path: Path, content: str) -> None:
    """Writes a file that only its owner can read, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
    partial.replace(path)


async def _prepare(url: str, settings: Settings, loopback: bool, say: Say) -> None:
    """Checks the database and makes sure that somebody can sign in."""
    database = connect(url, pool_size=1)
    try:
        await check_durability(database)
        await check_schema(database)
        if settings.admin_token is not None:
            given = settings.admin_token.get_secret_value()
            if len(given) < 16:
                raise ServerError("COORDINATOR_ADMIN_TOKEN is shorter than 16 characters; choose a longer one")
            await database.transaction(tokens.ensure_given_admin, given)
            return
        if not loopback:
            if not await database.transaction(tokens.any_valid):
                raise ServerError(
                    "refusing to listen beyond loopback while there is no token: set COORDINATOR_ADMIN_TOKEN, "
                    "or run 'coordinator token create --role admin --name ADMIN' first"
                )
            return
        file = settings.data / "admin.token"
        if file.exists() and await database.transaction(tokens.is_admin, file.read_text().strip()):
            return
        _, token, _ = new_secret()
        await database.transaction(tokens.ensure_given_admin, token)
        write_private(file, token + "\n")
        say(f"an admin's token is in {file}")
    finally:
        await database.close()


def _remembered_port(file: Path) -> int | None:
    try:
        return int(file.read_text().strip().rpartition(":")[2])
    except (FileNotFoundError, ValueError):
        return None


def bind(host: str, port: int, address_file: Path) -> socket.socket:
    """The listening socket. Port 0 takes the port of the last start on this data, or a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [port] if port else [p for p in (_remembered_port(address_file), 0) if p is not None]
    for candidate in wanted:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
        except OSError as error:
            listener.close()
            if candidate == wanted[-1]:
                raise ServerError(
                    f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port"
                ) from error
            continue
        return listener
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _served_alone(data: Path) -> Iterator[None]:
    """One server per data folder: a second one would take over its address file, and its port at the next start."""
    lock = os.open(data / "serving.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        where = (data / "address").read_text().strip() if (data / "address").exists() else "another address"
        raise ServerError(
            f"{data} is served already, at {where}; several servers need one DATABASE_URL, see the docs on operating"
        ) from error
    try:
        yield
    finally:
        os.close(lock)


def _secrets(settings: Settings) -> Iterator[str]:
    """What must not be logged, wherever it would come from."""
    if settings.admin_token is not None:
        yield settings.admin_token.get_secret_value()
    if settings.database_url is not None:
        with contextlib.suppress(ArgumentError, ValueError):  # one that cannot be read is refused, without its text
            password = make_url(settings.database_url.get_secret_value()).password
            if password:
                yield from {str(password), quote(str(password), safe="")}


def _speaks_tls(settings: Settings) -> bool:
    """Whether it is to speak https; refuses a certificate or key that cannot be used."""
    if settings.tls_certificate is None and settings.tls_key is None:
        return False
    if settings.tls_certificate is None or settings.tls_key is None:
        raise ServerError("COORDINATOR_TLS_CERTIFICATE and COORDINATOR_TLS_KEY belong together; set both or none")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_certificate, settings.tls_key, lambda: "")
    except OSError as error:
        raise ServerError(
            f"no TLS with {settings.tls_certificate} and {settings.tls_key}: {error.strerror or error}; "
            "both are PEM files, of one key pair, the key without a password"
        ) from error
    return True


def _exit(number: int, _: object) -> None:
    raise SystemExit(0)


class Server(uvicorn.Server):
    """uvicorn's own, but for the end: it is not ready for `drain_seconds` first, so that a balancer turns away; then
    whoever waits is answered at once, and streams end, to go on elsewhere.
    """

    def __init__(self, config: uvicorn.Config, drain_seconds: float = 0.0) -> None:
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._told: tuple[int, FrameType | None] | None = None
        self._until = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the end, a second one does not wait for it."""
        app = self.config.app
        assert isinstance(app, FastAPI)
        app.state.readiness.ending = True
        if self._told is None and self._drain_seconds:
            self._told, self._until = (sig, frame), time.monotonic() + self._drain_seconds
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        if self._told is not None and not self.should_exit and time.monotonic() >= self._until:
            super().handle_exit(*self._told)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nobody is let in any more; requests under way are finished first."""
        app = self.config.app
        assert isinstance(app, FastAPI)
        app.state.changes.end()
        app.state.feeds.end()
        await super().shutdown(sockets)


def serve_forever(settings: Settings, host: str, port: int, say: Say) -> None:
    """Serves until SIGTERM or SIGINT; requests under way are finished first, and an embedded Postgres is shut down."""
    # uvicorn raises the signal again when it has shut down. Left to its default, SIGTERM would end the process
    # there and then, and the embedded Postgres would be cut off without its closing checkpoint.
    signal.signal(signal.SIGTERM, _exit)
    logs.configure(settings.log, settings.log_level, _secrets(settings))
    if settings.log == "json":
        say = logging.getLogger("coordinator.server").info
    https = _speaks_tls(settings)
    settings.data.mkdir(parents=True, exist_ok=True)
    address_file = settings.data / "address"
    with contextlib.ExitStack() as stack:
        if settings.database_url is None:
            stack.enter_context(_served_alone(settings.data))
        listener = stack.enter_context(contextlib.closing(bind(host, port, address_file)))
        url = stack.enter_context(database_url(settings, say))
        if settings.database_url is None:
            upgrade(url)
        asyncio.run(_prepare(url, settings, _is_loopback(host), say))
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        scheme = "https" if https else "http"
        address = f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"
        database = connect(url, settings.pool_size)
        app = create_app(
            database,
            settings.data / "artifacts",
            settings.max_body_bytes,
            settings.artifact_uris,
            limits=Limits(settings.requests_per_second, guesses=True),
            metrics_open=settings.metrics_open,
        )
        if settings.tracing:
            from coordinator.operations.tracing import Tracing  # not to be loaded where it is off

            tracing = Tracing()
            stack.callback(tracing.close)
            tracing.follow(app, database)
        write_private(address_file, address + "\n")
        say(f"serving {address}: its dashboard is {address}/dashboard, its API page {address}/docs")
        config = uvicorn.Config(
            app,
            http=ProblemProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=settings.trusted_proxies,
            timeout_graceful_shutdown=10,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
        # What is loaded by now stays: no search for garbage need walk it, and hold the event loop for 30 to 70 ms.
        gc.freeze()
        Server(config, settings.drain_seconds).run(sockets=[listener])
