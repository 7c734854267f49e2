"""One authenticated connection to a coordinator: retries, and answers turned into models or exceptions."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from coordinator.client.aio.pace import run_blocking, sleep
from coordinator.client.artifacts import IncomingFile
from coordinator.client.errors import NotConfigured, UnexpectedAnswer, Unreachable, refusal, told
from coordinator.client.tracing import trace_headers
from coordinator.wire.base import WireModel
from coordinator.wire.event_stream import KEEP_ALIVE_SECONDS, MEDIA_TYPE, EventDecoder, ServerSentEvent
from coordinator.wire.policies import FileUpload

JSON = "application/json"
_PART_BYTES = 1 << 20
_FRUITLESS_ATTEMPTS = 3
"""Uploads in a row of which nothing arrived, after which bytes that are sent count for nothing."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_LONGEST_ASKED_SECONDS = 30.0
# Besides 503, what a proxy says while the coordinator behind it restarts.
_AWAY = frozenset({502, 503, 504})
# Storage is full: it answers, and retention or an operator may make room.
_FULL = 429
_FAULTS = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError, httpx.ProxyError)

_log = logging.getLogger("coordinator.client")
Answer = TypeVar("Answer", bound=BaseModel)
Progress = Callable[[str, int, int], None]
"""Called with a file's name, the bytes of it that went over so far, and its size in bytes."""


@dataclass(frozen=True)
class _Stream:
    """An answer that goes on: where it comes from, its first piece, which the server sends at once, and the rest."""

    url: str
    received: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]


class AsyncConnection:
    """Sends requests, again where that may help: on connection faults, 503 and 429, with jittered back-off.

    Every call that changes something carries the caller's own id, so sending it twice changes nothing more.
    `timeout_seconds` bounds the silence on one attempt (beside what a long poll waits), `retry_seconds` the
    whole of the attempts. `url` may name several replicas, separated by commas: after a fault the next one is
    asked. May be used from several tasks.
    """

    def __init__(self, url: str, token: str, *, timeout_seconds: float, retry_seconds: float) -> None:
        urls = [address.strip().rstrip("/") for address in url.split(",")]
        for address in urls:
            if not address.startswith(("http://", "https://")):
                raise NotConfigured(f"the coordinator's address must begin with http:// or https://, not {address!r}")
            try:
                named = httpx.URL(address).host.encode("idna")  # as the look-up does
            except (httpx.InvalidURL, UnicodeError) as error:
                raise NotConfigured(f"the coordinator's address {address!r} cannot be read: {error}") from error
            if not named:
                raise NotConfigured(f"the coordinator's address names no host: {address!r}")
        if not token.isascii() or not token.isprintable() or not token:
            raise NotConfigured("the token is empty or holds characters that no token has: check its file or variable")
        self._urls = urls
        self._at = 0
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}", "User-Agent": "rollout-coordinator-client"},
            # Of connections there may be any number: no renewal waits behind long polls for a free one.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    @property
    def url(self) -> str:
        """The address in use."""
        return self._urls[self._at]

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._http.is_closed

    async def close(self) -> None:
        """Close the sockets. A call afterwards raises RuntimeError."""
        await self._http.aclose()

    async def call(
        self,
        method: str,
        segments: Iterable[str],
        answer: type[Answer],
        *,
        body: WireModel | None = None,
        params: dict[str, str | int | float] | None = None,
        wait_seconds: float = 0.0,
        timeout_seconds: float | None = None,
        retry_seconds: float | None = None,
    ) -> Answer:
        """Send JSON and read the answer into `answer`. `wait_seconds` is how long the server may hold it
        back."""
        content = None if body is None else body.request_body()
        received = await self.send(
            method,
            segments,
            content=None if content is None else lambda: content,
            params=params,
            wait_seconds=wait_seconds,
            timeout_seconds=timeout_seconds,
            retry_seconds=retry_seconds,
        )
        return read(received, answer)

    async def send(
        self,
        method: str,
        segments: Iterable[str],
        *,
        content: Callable[[], bytes | AsyncIterable[bytes]] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
        params: dict[str, str | int | float] | None = None,
        wait_seconds: float = 0.0,
        timeout_seconds: float | None = None,
        retry_seconds: float | None = None,
    ) -> httpx.Response:
        """Send bytes, made anew by `content` for each attempt. Raises `Refused` or `Unreachable`."""
        path = self._path(segments)
        headers = {"Accept": accept} | ({} if content is None else {"Content-Type": content_type}) | trace_headers()

        async def attempt() -> httpx.Response:
            return await self._http.request(
                method,
                self.url + path,
                content=None if content is None else content(),
                headers=headers,
                params=params,
                timeout=self._timeout(wait_seconds, timeout_seconds),
            )

        received = await self._persist(f"{method} {path}", attempt, retry_seconds)
        if received.status_code >= 400:
            raise refusal(received.status_code, received.content)
        return received

    async def send_file(
        self,
        state: Iterable[str],
        into: Iterable[str],
        content: Callable[[int], AsyncIterable[bytes]],
        *,
        longest_check_seconds: float,
    ) -> FileUpload:
        """Stream a file to `into`, each attempt from the byte on that the coordinator says at `state` it has.

        `content` makes the bytes from an offset on. Nothing is sent of a file that is stored already, or that somebody
        else is sending. The coordinator may take `longest_check_seconds` after the last byte. Bytes that arrive begin
        the time for retries anew.
        """
        state_path, path = self._path(state), self._path(into)
        arrived, fruitless, moved_at = -1, 0, 0.0

        async def moving(offset: int) -> AsyncIterable[bytes]:
            nonlocal moved_at
            async for part in content(offset):
                yield part
                if fruitless < _FRUITLESS_ATTEMPTS:
                    moved_at = time.monotonic()

        async def attempt() -> httpx.Response:
            nonlocal arrived, fruitless
            asked = await self._http.request("GET", self.url + state_path, timeout=self._timeout(0, None))
            if asked.status_code != 200:
                return asked
            upload = read(asked, FileUpload)
            if upload.stored or upload.busy:
                return asked
            fruitless = 0 if upload.received > arrived else fruitless + 1
            arrived = upload.received
            return await self._http.request(
                "PUT",
                self.url + path,
                content=moving(arrived),
                headers={"Content-Type": "application/octet-stream"} | trace_headers(),
                params={"offset": arrived},
                timeout=self._timeout(longest_check_seconds, None),
            )

        received = await self._persist(f"PUT {path}", attempt, None, lambda: moved_at)
        if received.status_code >= 400:
            raise refusal(received.status_code, received.content)
        return read(received, FileUpload)

    async def receive(
        self, segments: Iterable[str], file: IncomingFile, progress: Callable[[int], None] | None = None
    ) -> None:
        """Stream a file of known size and hash into `file`, after a fault from where it broke off.

        It is on disk when this returns. Raises `ArtifactCorrupt` for other bytes, and never writes more than there
        should be.
        """
        path = self._path(segments)
        moved_at = 0.0
        last: httpx.Response | None = None

        async def attempt() -> httpx.Response:
            nonlocal moved_at, last
            if last is not None and file.count == file.size:  # it broke off after the last byte
                return last
            wanted = {"Range": f"bytes={file.count}-"} if file.count else {}
            async with self._http.stream(
                "GET", self.url + path, headers=wanted | trace_headers(), timeout=self._timeout(0, None)
            ) as received:
                if received.status_code >= 400:
                    await received.aread()
                    return received
                last = received
                if file.count and received.status_code != 206:
                    await run_blocking(file.restart)
                async for part in received.aiter_bytes(_PART_BYTES):
                    count = await run_blocking(file.write, part)
                    moved_at = time.monotonic()
                    if progress:
                        progress(count)
                return received

        received = await self._persist(f"GET {path}", attempt, None, lambda: moved_at)
        if received.status_code >= 400:
            raise refusal(received.status_code, received.content)
        await run_blocking(file.finish)

    async def events(
        self, segments: Iterable[str], *, after: int | None, params: dict[str, str | int | float]
    ) -> AsyncGenerator[ServerSentEvent, None]:
        """Server-sent events without end: a stream that breaks is taken up where it was, from the next replica.

        `after` is the number to continue after. Raises `Refused`, or `Unreachable` when no replica gives a stream
        within the time for retries.
        """
        path = self._path(segments)
        place = "" if after is None else str(after)
        while True:
            stream = await self._open(path, place, params)
            piece, why = stream.first, "the stream ended"
            decoder = EventDecoder()
            try:
                while piece:
                    for event in decoder.feed(piece):
                        place = event.id or place
                        if event.data:
                            yield event
                    piece = await anext(stream.rest, b"")
            except _FAULTS as fault:
                why = told(fault)
            finally:
                await stream.received.aclose()
            self._turn_from(stream.url)
            _log.info("GET %s at %s: %s; going on after event %s", path, stream.url, why, place or "now")
            await sleep(random.uniform(_FIRST_PAUSE_SECONDS / 2, _FIRST_PAUSE_SECONDS))

    async def _open(self, path: str, place: str, params: dict[str, str | int | float]) -> _Stream:
        """A stream that has begun."""
        opened: list[_Stream] = []

        async def attempt() -> httpx.Response:
            url = self.url
            headers = {"Accept": MEDIA_TYPE} | ({"Last-Event-ID": place} if place else {}) | trace_headers()
            timeout = self._timeout(KEEP_ALIVE_SECONDS, None)
            request = self._http.build_request("GET", url + path, headers=headers, params=params, timeout=timeout)
            received = await self._http.send(request, stream=True)
            try:
                if received.status_code >= 400:
                    await received.aread()
                    return received
                if not received.headers.get("Content-Type", "").startswith(MEDIA_TYPE):
                    raise UnexpectedAnswer(f"{request.url} did not answer a stream of events")
                pieces = received.aiter_bytes()
                first = await anext(pieces, b"")
                if not first:
                    raise httpx.RemoteProtocolError("the stream ended before it began")
                opened.append(_Stream(url, received, first, pieces))
            except BaseException:
                await received.aclose()
                raise
            return received

        received = await self._persist(f"GET {path}", attempt, None)
        if received.status_code >= 400:
            raise refusal(received.status_code, received.content)
        return opened[0]

    async def _persist(
        self,
        what: str,
        attempt: Callable[[], Awaitable[httpx.Response]],
        retry_seconds: float | None,
        moved_at: Callable[[], float] = lambda: 0.0,
    ) -> httpx.Response:
        """The answer of the first attempt that gets one. `moved_at` is when something last went over, by the monotonic
        clock: from then on the time for retries counts anew."""
        started = time.monotonic()
        bound = self.retry_seconds if retry_seconds is None else retry_seconds
        attempts = 0
        while True:
            attempts += 1
            began = time.monotonic()
            asked_at = self.url
            cause: Exception | None = None
            full, asked = False, 0.0
            try:
                received = await attempt()
            except _FAULTS as fault:
                cause, why = fault, told(fault)
            else:
                full = received.status_code == _FULL
                if not full and received.status_code not in _AWAY:
                    return received
                why = str(refusal(received.status_code, received.content))
                asked = _retry_after(received) if full else min(_retry_after(received), _LONGEST_ASKED_SECONDS)
            if moved_at() > began:
                started, attempts = moved_at(), 1
            if not full:
                self._turn_from(asked_at)
            longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(attempts - 1, 10))
            pause = max(asked, random.uniform(longest / 2, longest))
            spent = time.monotonic() - started
            if spent + pause > bound:
                if full:
                    return received
                raise Unreachable(
                    f"{what} at {asked_at}: no answer after {attempts} attempts in {spent:.1f} s; {why}"
                ) from cause
            _log.log(
                logging.WARNING if attempts == 1 else logging.DEBUG, "%s at %s: %s; trying again", what, asked_at, why
            )
            await sleep(pause)

    def _turn_from(self, url: str) -> None:
        """To the next replica, unless somebody else has turned to another one meanwhile."""
        if self.url == url:
            self._at = (self._at + 1) % len(self._urls)

    def _path(self, segments: Iterable[str]) -> str:
        return "/".join(("", "v1", *(quote(segment, safe="") for segment in segments)))

    def _timeout(self, wait_seconds: float, timeout_seconds: float | None) -> httpx.Timeout:
        bound = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        return httpx.Timeout(bound, read=bound + wait_seconds)


def read(received: httpx.Response, answer: type[Answer]) -> Answer:
    """The body of a good answer as its model."""
    return read_text(received.content, answer, f"{received.request.method} {received.request.url}")


def read_text(text: str | bytes, answer: type[Answer], what: str = "the stream") -> Answer:
    """JSON as its model; `what` names the call that it came from. Fields that a newer server adds are passed over."""
    try:
        return answer.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        raise UnexpectedAnswer(
            f"{what} did not answer a {answer.__name__}: {error}. Client and coordinator may be of different versions."
        ) from error


def _retry_after(received: httpx.Response) -> float:
    value = received.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0
