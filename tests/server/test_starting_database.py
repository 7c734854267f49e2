"""A Postgres that is starting, or replays its log after a crash, is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from coordinator.storage.database import wait_until_started

SSL_REQUEST = 80877103


class Starting:
    """Stands before a Postgres and answers the first connections as Postgres does while it recovers."""

    def __init__(self, url: str, refusals: int) -> None:
        self._url = make_url(url)
        self._refusals = refusals
        self.refused = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            yield self._url.set(port=port).render_as_string(hide_password=False)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refused == self._refusals:
            await self._pass_on(reader, writer)
            return
        self.refused += 1
        length, code = struct.unpack("!II", await reader.readexactly(8))
        if code == SSL_REQUEST:
            writer.write(b"N")
            (length,) = struct.unpack("!I", await reader.readexactly(4))
            await reader.readexactly(length - 4)
        fields = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is in recovery mode\0\0"
        writer.write(b"E" + struct.pack("!I", len(fields) + 4) + fields)
        await writer.drain()
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._url.host, self._url.port)
        await asyncio.gather(_pipe(reader, there_writer), _pipe(there_reader, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_it_is_said_once_and_waited_for(database_url: str) -> None:
    postgres = Starting(database_url, refusals=4)
    said: list[str] = []
    async with postgres.listening() as url:
        await wait_until_started(url, said.append)
    assert postgres.refused == 4
    assert said == ["waiting for Postgres, for up to 120 s: the database system is in recovery mode"]


async def test_not_for_ever(database_url: str) -> None:
    postgres = Starting(database_url, refusals=1000)
    said: list[str] = []
    async with postgres.listening() as url:
        with pytest.raises(DBAPIError, match="recovery mode"):
            await wait_until_started(url, said.append, seconds=1)
    assert len(said) == 1
