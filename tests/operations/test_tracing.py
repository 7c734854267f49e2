"""Traces when the collector is away: they are lost, and nothing else is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from coordinator.operations import tracing


@pytest.fixture
def silent_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield listener


def test_the_end_does_not_wait_for_a_collector_that_is_silent(
    silent_collector: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.2)
    traces = tracing.Tracing()
    with traces._tracer.start_as_current_span("the last one"):
        pass
    traces.close()
    sending = [thread for thread in threading.enumerate() if thread.name == "last-spans"]
    assert [thread.daemon for thread in sending] == [True]  # still at it, and it holds no process up
    connection, _ = silent_collector.accept()
    connection.close()
    silent_collector.close()
    sending[0].join()
