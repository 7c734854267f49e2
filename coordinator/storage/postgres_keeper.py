"""Starts an embedded Postgres again when it dies while its owner lives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from coordinator.storage.postgres import EmbeddedPostgres, EmbeddedPostgresError

_CHECK_SECONDS = 0.2
_RETRY_SECONDS = 1.0


@contextlib.contextmanager
def kept_running(server: EmbeddedPostgres, say: Callable[[str], None]) -> Iterator[str]:
    """The URL of a server that runs as long as this block, and is started again on the same URL should it die.

    `say` is told, one line each and from another thread, when it died, why it cannot be started, and when it runs
    again. Raises EmbeddedPostgresError if it cannot be started in the first place.
    """
    url = server.start()
    ended = threading.Event()
    keeper = threading.Thread(target=_keep, args=(server, say, ended), name="embedded-postgres-keeper", daemon=True)
    keeper.start()
    try:
        yield url
    finally:
        ended.set()
        try:
            keeper.join()
        finally:
            server.stop()


def _keep(server: EmbeddedPostgres, say: Callable[[str], None], ended: threading.Event) -> None:
    said = ""
    while not ended.wait(_CHECK_SECONDS):
        if not server.has_died():
            continue
        if not said:
            said = "Postgres has died and is started again"
            say(said)
        try:
            server.start()
        except EmbeddedPostgresError as error:
            if str(error) != said:
                said = str(error)
                say(said)
        else:
            said = ""
            say("Postgres runs again")
        ended.wait(_RETRY_SECONDS)  # also after a good start: one that dies at once is not started without a pause
