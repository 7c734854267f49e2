"""OpenTelemetry traces: a span for each request, continued from the caller's, and one for each transaction in it.

Imported only where tracing is on. Where spans go, and how many, is said by the standard variables: OTEL_SERVICE_NAME,
OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER and the like.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id

from coordinator.operations.logs import CURRENT
from coordinator.operations.requests import name_request
from coordinator.storage.database import Database

QUIET = "/healthz,/readyz,/metrics"
"""Asked every few seconds by machines: without spans."""

CLOSE_SECONDS = 3.0
"""For so long the last spans are sent: a collector that is away must not hold up a server that was told to end."""

ADDRESSES = frozenset({"http.url", "http.target", "url.full", "url.path", "url.query"})


class Tracing:
    """Spans of one server process. `close` sends what was not sent yet."""

    def __init__(self) -> None:
        named = Resource({"service.name": "rollout-coordinator", "service.version": version("rollout-coordinator")})
        self._provider = TracerProvider(
            resource=Resource.create().merge(named).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("coordinator")

    def follow(self, app: FastAPI, database: Database) -> None:
        """Makes the app and its database tell what they do. Before the app's first request."""
        FastAPIInstrumentor.instrument_app(
            app,
            tracer_provider=self._provider,
            excluded_urls=QUIET,
            exclude_spans=["receive", "send"],
            server_request_hook=_without_query,
        )
        database.span = self._database_span

    def close(self) -> None:
        """Sends the last spans, as far as the collector takes them in time. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    @contextlib.contextmanager
    def _database_span(self, name: str) -> Iterator[None]:
        if CURRENT.get() is None:  # the sweepers' own, several a second
            yield
            return
        # Not the exception itself: the text of one has the statement in it.
        with self._tracer.start_as_current_span(
            name, kind=SpanKind.CLIENT, record_exception=False, set_status_on_exception=False
        ) as span:
            span.set_attribute("db.system.name", "postgresql")
            name_request(span)
            try:
                yield
            except BaseException as error:
                span.set_status(StatusCode.ERROR, type(error).__name__)
                raise


def _without_query(span: Span, scope: dict[str, Any]) -> None:
    """A secret that stands in an address by mistake must not go out with the span; the request is known by its id."""
    if isinstance(span, ReadableSpan):
        for attribute in ADDRESSES & (span.attributes or {}).keys():
            span.set_attribute(attribute, "")
    scope.setdefault("state", {}).update(span=span, trace_id=format_trace_id(span.get_span_context().trace_id))
