"""The caller's trace, for the coordinator to go on with; where nobody traces, nothing is loaded and nothing is sent."""

from __future__ import annotations

import importlib
import sys


def trace_headers() -> dict[str, str]:
    """`traceparent` and its like, by the propagators of this process; empty where OpenTelemetry is not in use."""
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        importlib.import_module("opentelemetry.propagate").inject(headers)
    return headers
