"""The client goes on with its caller's trace, and knows nothing of traces where there are none."""

from __future__ import annotations

import subprocess
import sys

from opentelemetry.sdk.trace import TracerProvider

from coordinator.client.tracing import trace_headers


def test_the_trace_under_way_is_sent() -> None:
    tracer = TracerProvider().get_tracer("trainer")
    assert trace_headers() == {}
    with tracer.start_as_current_span("training step") as span:
        trace, parent = span.get_span_context().trace_id, span.get_span_context().span_id
        headers = trace_headers()
        assert headers.keys() == {"traceparent"}
        assert headers["traceparent"].startswith(f"00-{trace:032x}-{parent:016x}-")
    assert trace_headers() == {}


def test_without_opentelemetry_nothing_of_it_is_loaded() -> None:
    script = (
        "import sys; from coordinator.client.tracing import trace_headers; import coordinator.client; "
        "assert trace_headers() == {}; assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
