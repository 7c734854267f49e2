"""What `/metrics` says, read by Prometheus' own parser."""

import httpx
from prometheus_client.parser import text_string_to_metric_families


def metrics(address: str) -> dict[tuple[str, str | None], float]:
    """Each sample's value by its name and the value of its only label, None where there is none."""
    answer = httpx.get(f"{address}/metrics", trust_env=False)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, next(iter(sample.labels.values()), None)): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
