"""The entrance: one coordinator, by its address and a token."""

from __future__ import annotations

import os
import uuid
from datetime import datetime
from pathlib import Path
from types import TracebackType

from coordinator.client.aio.connection import AsyncConnection
from coordinator.client.aio.run import AsyncRun
from coordinator.client.errors import NotConfigured
from coordinator.wire.runs import CreateRun, RunList, RunView
from coordinator.wire.tokens import CreatedToken, CreateToken, Role, TokenList, TokenView


class AsyncCoordinator:
    """A coordinator, as one process sees it; close it, or use it with `async with`.

    `url` may name several replicas, separated by commas: when one does not answer, the next is asked.
    `url` and `token` come from the arguments, else from COORDINATOR_URL and COORDINATOR_TOKEN (or the file that
    COORDINATOR_TOKEN_FILE names), else from the files `address` and `admin.token` in the data folder of a coordinator
    on this machine (COORDINATOR_DATA, else ./.data). `timeout_seconds` bounds the silence on one attempt,
    `retry_seconds` all attempts of one call. Raises `NotConfigured` where nothing is found. May be used from several
    tasks.

    `owner` names this process as the owner of its updates. Left out it is random: a restarted trainer cannot touch
    the update that it had open, whose lease ends it. Name the owner, and the update, to go on with it after a restart;
    only where the process before is surely gone, since two of one owner are the same to the coordinator.

    All of them on one event loop. CPU and disk work of the client runs in threads and does not hold it up.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 60.0,
        owner: str | None = None,
    ) -> None:
        self._connection = AsyncConnection(
            url or os.environ.get("COORDINATOR_URL") or _from_data_folder("address", "address", "COORDINATOR_URL"),
            token
            or os.environ.get("COORDINATOR_TOKEN")
            or _from_token_file()
            or _from_data_folder("admin.token", "token", "COORDINATOR_TOKEN"),
            timeout_seconds=timeout_seconds,
            retry_seconds=retry_seconds,
        )
        self._owner = f"trainer-{uuid.uuid4().hex}" if owner is None else owner

    @property
    def url(self) -> str:
        """The address in use."""
        return self._connection.url

    async def __aenter__(self) -> AsyncCoordinator:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the sockets."""
        await self._connection.close()

    async def create_run(self, run: CreateRun) -> AsyncRun:
        """Create a run, or find it when it exists with the same content."""
        view = await self._connection.call("POST", ("runs",), RunView, body=run)
        return self.run(view.run_id)

    def run(self, run_id: str) -> AsyncRun:
        """A run by its id; asks nothing yet."""
        return AsyncRun(self._connection, run_id, self._owner)

    async def runs(self) -> list[RunView]:
        """All runs in the order of their creation."""
        answer = await self._connection.call("GET", ("runs",), RunList)
        return answer.runs

    async def create_token(
        self,
        name: str,
        role: Role,
        *,
        run_id: str | None = None,
        worker_id: str | None = None,
        expires_at: datetime | None = None,
    ) -> CreatedToken:
        """A new token; its secret is in this answer and nowhere else."""
        body = CreateToken(name=name, role=role, run_id=run_id, worker_id=worker_id, expires_at=expires_at)
        return await self._connection.call("POST", ("tokens",), CreatedToken, body=body)

    async def tokens(self) -> list[TokenView]:
        """All tokens, without their secrets."""
        answer = await self._connection.call("GET", ("tokens",), TokenList)
        return answer.tokens

    async def revoke_token(self, token_id: str) -> None:
        """End a token at once."""
        await self._connection.send("DELETE", ("tokens", token_id))


def _from_token_file() -> str | None:
    """What the file holds that COORDINATOR_TOKEN_FILE names; None where it names none."""
    if not (name := os.environ.get("COORDINATOR_TOKEN_FILE")):
        return None
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotConfigured(f"COORDINATOR_TOKEN_FILE names a file that cannot be read: {error}") from error


def _from_data_folder(name: str, what: str, variable: str) -> str:
    folder = Path(os.environ.get("COORDINATOR_DATA") or ".data")
    try:
        text = (folder / name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise NotConfigured(
            f"no {what} was given: pass it, set {variable}, or name the data folder of a coordinator on this "
            f"machine in COORDINATOR_DATA ({folder / name}: {error.strerror})"
        ) from error
    if not text:
        raise NotConfigured(f"{folder / name} is empty: set {variable}, or restart the coordinator of that data folder")
    return text
