"""One server process: its database, its first token, its socket, and uvicorn on top."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from coordinator.app import create_app
from coordinator.operations.access import new_secret
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


def _exit(number: int, _: object) -> None:
    raise SystemExit(0)


class Server(uvicorn.Server):
    """uvicorn's own, but for the end: whoever waits is answered at once, and streams end, to go on elsewhere."""

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
        address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"
        app = create_app(
            connect(url, settings.pool_size),
            settings.data / "artifacts",
            settings.max_body_bytes,
            settings.artifact_uris,
        )
        write_private(address_file, address + "\n")
        say(f"serving {address}, the API page is {address}/docs")
        config = uvicorn.Config(
            app, http=ProblemProtocol, log_level="warning", access_log=False, timeout_graceful_shutdown=10
        )
        Server(config).run(sockets=[listener])
