"""/metrics, /healthz and /readyz as they are asked for."""

import json
import os
import socket
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.worker_agent.status.reading import metrics
from worker_agent.status.server import StatusError, serving_status
from worker_agent.status.vitals import LOADS, VERDICTS, Vitals


def get(address: str) -> httpx.Response:
    return httpx.get(address, trust_env=False)


def test_the_numbers_are_those_of_the_moment(tmp_path: Path) -> None:
    vitals = Vitals()
    with serving_status("127.0.0.1", 0, vitals, tmp_path / "spool") as address:
        first = metrics(address)
        assert first[("worker_agent_rollouts_generated_total", None)] == 0
        assert first[("worker_agent_spool_batches", None)] == 0  # the folder is not there yet
        assert ("worker_agent_served_version", None) not in first
        assert ("worker_agent_heartbeat_age_seconds", None) not in first

        (tmp_path / "spool").mkdir()
        for name, content, age in (("1.arrow", b"abc", 100), ("2.arrow", b"de", 5), ("3.part", b"f", 999)):
            (tmp_path / "spool" / name).write_bytes(content)
            os.utime(tmp_path / "spool" / name, (time.time() - age,) * 2)
        vitals.register(60.0)
        vitals.turned(7)
        vitals.spooled(4)
        vitals.delivered({"accepted": 3, "conflict": 1})
        vitals.rejected()
        vitals.load_ended("policy_load_failed", 0.5)
        vitals.asleep_until = time.monotonic() + 60
        vitals.groups_in_flight = 2
        second = metrics(address)
        assert second[("worker_agent_spool_batches", None)] == 2
        assert second[("worker_agent_spool_bytes", None)] == 5
        assert second[("worker_agent_spool_oldest_seconds", None)] >= 100
        assert second[("worker_agent_served_version", None)] == 7
        assert second[("worker_agent_heartbeat_age_seconds", None)] >= 0
        assert second[("worker_agent_rollouts_spooled_total", None)] == 4
        assert second[("worker_agent_rollouts_delivered_total", "accepted")] == 3
        assert second[("worker_agent_rollouts_delivered_total", "conflict")] == 1
        assert second[("worker_agent_rollouts_rejected_total", None)] == 1
        assert second[("worker_agent_load_seconds_count", "policy_load_failed")] == 1
        assert second[("worker_agent_load_seconds_sum", "policy_load_failed")] > 0
        assert second[("worker_agent_groups_in_flight", None)] == 2
        assert [second[(f"worker_agent_{name}", None)] for name in ("engine_up", "asleep", "fenced")] == [0, 1, 1]


def test_labels_are_few_and_known(tmp_path: Path) -> None:
    with serving_status("127.0.0.1", 0, Vitals(), tmp_path) as address:
        families = {f.name: f for f in text_string_to_metric_families(get(f"{address}/metrics").text)}
    labels = {name: {v for s in f.samples for v in s.labels.values()} for name, f in families.items()}
    assert {name: found for name, found in labels.items() if found} == {
        "worker_agent_rollouts_delivered": set(VERDICTS),
        "worker_agent_load_seconds": set(LOADS),
    }
    assert all(family.documentation for family in families.values())


def test_health_and_readiness_say_in_words_what_is_missing(tmp_path: Path) -> None:
    vitals = Vitals()
    with serving_status("127.0.0.1", 0, vitals, tmp_path) as address:
        health, readiness = get(f"{address}/healthz"), get(f"{address}/readyz")
        assert (health.status_code, health.json()) == (200, {"alive": True, "missing": []})
        assert (readiness.status_code, readiness.json()["ready"]) == (503, False)
        assert "engine still starts" in readiness.json()["missing"][0]
        vitals.register(60.0)
        vitals.turned(1)
        vitals.turned_at -= 1000
        health, readiness = get(f"{address}/healthz"), get(f"{address}/readyz")
        assert (readiness.status_code, readiness.json()) == (200, {"ready": True, "missing": []})
        assert (health.status_code, health.json()["alive"]) == (503, False)
        head = httpx.head(f"{address}/readyz", trust_env=False)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(readiness.content))


def test_other_paths_and_methods_are_refused(tmp_path: Path) -> None:
    with serving_status("127.0.0.1", 0, Vitals(), tmp_path) as address:
        answer = get(f"{address}/")
        assert (answer.status_code, answer.text) == (404, "/metrics, /healthz and /readyz\n")
        assert httpx.post(f"{address}/metrics", trust_env=False).status_code == 501
        assert get(f"{address}/healthz?verbose=1").status_code == 200


def test_a_client_that_says_nothing_keeps_no_other_waiting(tmp_path: Path) -> None:
    with serving_status("127.0.0.1", 0, Vitals(), tmp_path) as address:
        port = httpx.URL(address).port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port)):
            assert get(f"{address}/healthz").status_code == 200


def test_the_port_is_free_again_afterwards_and_one_that_is_taken_is_named(tmp_path: Path) -> None:
    with serving_status("127.0.0.1", 0, Vitals(), tmp_path) as address:
        port = httpx.URL(address).port
        assert port is not None
        with pytest.raises(StatusError) as refused, serving_status("127.0.0.1", port, Vitals(), tmp_path):
            pass
        assert str(refused.value) == (
            f"metrics: 127.0.0.1:{port} cannot be had (Address already in use): give another metrics_port, 0 for a "
            f"free one, or another metrics_host"
        )
    with serving_status("127.0.0.1", port, Vitals(), tmp_path) as again:
        assert again == address
    with (
        pytest.raises(StatusError, match=r"192\.0\.2\.1:0 cannot be had"),
        serving_status("192.0.2.1", 0, Vitals(), tmp_path),
    ):
        pass


def test_the_log_names_the_addresses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "worker_agent")
    with serving_status("127.0.0.1", 0, Vitals(), tmp_path) as address:
        (record,) = (r for r in caplog.records if r.message == "status_served")
        assert json.dumps(record.__dict__["fields"]).count(address) == 3
