"""A receiver of OpenTelemetry spans over OTLP/HTTP, as a collector is one."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(ThreadingHTTPServer):
    """Keeps every span that it is sent, and the bytes that they came in."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.received = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits for spans: they come in batches."""
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end, [span.name for span in self.spans]
            time.sleep(0.05)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        self.server.received += body
        for resource in request.resource_spans:
            self.server.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Not onto the tests' output."""


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector for the length of the block."""
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()


def attributes(span: Span) -> dict[str, str | int]:
    """What a span says of itself."""
    return {
        a.key: a.value.int_value if a.value.HasField("int_value") else a.value.string_value for a in span.attributes
    }
