"""A server on a network: TLS, proxies, logs, traces, the order of its end, and no secret in anything that it says."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy.engine import make_url

from coordinator.client import Coordinator, Unreachable
from coordinator.operations.limits import FAILURES_AT_ONCE
from tests.api.ledger import refused
from tests.client.runs import new_run
from tests.client.server_process import ServerProcess
from tests.database import Databases
from tests.server.certificate import write_certificate
from tests.server.collecting import Collector, attributes, collecting

ADMIN = "given-" + secrets.token_urlsafe(24)


@dataclass
class Site:
    """A server process, and how it is reached."""

    process: ServerProcess
    database_url: str
    http: httpx.Client
    certificate: Path | None = None
    collector: Collector | None = None

    def get(self, path: str, token: str | None = ADMIN, **headers: str) -> httpx.Response:
        given = {} if token is None else {"authorization": f"Bearer {token}"}
        return self.http.get(path, headers=given | headers)

    def lines_with(self, text: str) -> list[str]:
        """The log's lines with this text, once there is one: a request's line comes after its answer."""
        until = time.monotonic() + 30
        while True:
            log = self.process.log.read_text()
            found = [line for line in log.splitlines() if text in line]
            if found and log.endswith("\n"):
                return found
            assert time.monotonic() < until, f"nothing is logged of {text}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def behind_tls(postgres: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """TLS, a trusted proxy, logs in JSON down to debug, and traces."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = write_certificate(folder)
    url = postgres.migrated()
    process = ServerProcess(
        folder / "data",
        url,
        admin_token=ADMIN,
        log="json",
        log_level="debug",
        tracing="true",
        trusted_proxies="127.0.0.1",
        tls_certificate=str(certificate),
        tls_key=str(key),
    )
    process.verify = ssl.create_default_context(cafile=str(certificate))
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        process.start()
        with httpx.Client(base_url=process.url, verify=process.verify, trust_env=False, timeout=30) as http:
            yield Site(process, url, http, certificate, collector)
        process.stop()


@pytest.fixture(scope="module")
def plain(postgres: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Plain HTTP, nobody trusted, logs as text."""
    folder = tmp_path_factory.mktemp("plain")
    url = postgres.migrated()
    process = ServerProcess(folder / "data", url, admin_token=ADMIN, log_level="debug", drain_seconds="60")
    process.start()
    with httpx.Client(base_url=process.url, trust_env=False, timeout=30) as http:
        yield Site(process, url, http)
    process.kill()


def test_the_address_is_https_and_the_client_is_told_whom_to_trust(
    behind_tls: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert behind_tls.process.url.startswith("https://127.0.0.1:")
    monkeypatch.setenv("SSL_CERT_FILE", str(behind_tls.certificate))
    with Coordinator(behind_tls.process.url, ADMIN) as coordinator:
        new_run(coordinator, "over-tls")
        assert coordinator.run("over-tls").view().run_id == "over-tls"
    monkeypatch.delenv("SSL_CERT_FILE")
    with (
        Coordinator(behind_tls.process.url, ADMIN, retry_seconds=0) as coordinator,
        pytest.raises(Unreachable, match=r"CERTIFICATE_VERIFY_FAILED.*; SSL_CERT_FILE names"),
    ):
        coordinator.runs()


def test_every_answer_has_its_headers(behind_tls: Site, plain: Site) -> None:
    for path in ("/v1/runs", "/v1/nowhere", "/healthz", "/docs"):
        for site in (behind_tls, plain):
            headers = site.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert ("strict-transport-security" in headers) == (site is behind_tls)
            assert (headers.get("cache-control") == "no-store") == path.startswith("/v1/"), path
            assert "server" not in headers


def test_a_request_has_one_id_in_its_answer_its_problem_and_the_log(behind_tls: Site) -> None:
    given = behind_tls.get("/v1/runs/nowhere/updates/u-7", **{"x-request-id": "from-the-proxy.7"})
    document = refused(given, 404, "run_unknown")
    assert document["request_id"] == given.headers["x-request-id"] == "from-the-proxy.7"
    made = behind_tls.get("/v1/runs", **{"x-request-id": "not an id; at all"})
    assert re.fullmatch("[0-9a-f]{16}", made.headers["x-request-id"])
    (line,) = [json.loads(line) for line in behind_tls.lines_with("from-the-proxy.7")]
    assert line["message"] == "get_update 404"
    assert (line["level"], line["operation"], line["status"], line["code"]) == (
        "warning", "get_update", 404, "run_unknown",
    )  # fmt: skip
    assert (line["run_id"], line["update_id"]) == ("nowhere", "u-7")
    assert line["actor"].startswith("admin:")
    assert line["seconds"] > 0
    quiet = [json.loads(line) for line in behind_tls.lines_with("readyz")]
    assert {(line["status"], line["level"]) for line in quiet} == {(200, "debug")}


def test_text_says_the_same_in_a_line(plain: Site) -> None:
    plain.get("/v1/runs/nowhere%0Aforged", **{"x-request-id": "in-text"})
    (line,) = plain.lines_with("in-text")
    assert re.fullmatch(
        r"\S+Z warning coordinator\.requests: get_run 422 operation=get_run status=422 code=invalid_request "
        r"seconds=\S+ actor=admin:\S+ request_id=in-text",
        line,
    )


def test_traces_go_on_from_the_caller_and_name_what_they_are_about(
    behind_tls: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = behind_tls.collector
    assert collector is not None
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    behind_tls.get("/v1/runs/over/updates/u-9", traceparent=f"00-{trace}-{parent}-01")
    ours = lambda: [span for span in collector.spans if span.trace_id.hex() == trace]  # noqa: E731
    collector.until(lambda: len(ours()) >= 3)
    request = next(span for span in ours() if span.parent_span_id.hex() == parent)
    assert request.name == "GET /v1/runs/{run_id}/updates/{update_id}"
    told = attributes(request)
    assert (told["coordinator.run_id"], told["coordinator.update_id"]) == ("over", "u-9")
    inside = {span.name: attributes(span) for span in ours() if span.parent_span_id == request.span_id}
    assert {"operations.access.authenticate", "updates.service.get_update"} <= inside.keys()
    assert inside["updates.service.get_update"]["coordinator.request_id"] == told["coordinator.request_id"]
    assert collector.resources[0]["service.name"] == "rollout-coordinator"
    (line,) = [json.loads(line) for line in behind_tls.lines_with(trace)]
    assert line["operation"] == "get_update"
    assert not any("readyz" in span.name for span in collector.spans)

    monkeypatch.setenv("SSL_CERT_FILE", str(behind_tls.certificate))
    with (
        TracerProvider().get_tracer("trainer").start_as_current_span("step") as step,
        Coordinator(behind_tls.process.url, ADMIN) as coordinator,
    ):
        coordinator.runs()
    caller = step.get_span_context()
    collector.until(lambda: any(span.trace_id == caller.trace_id.to_bytes(16) for span in collector.spans))
    (continued,) = [s for s in collector.spans if s.parent_span_id == caller.span_id.to_bytes(8)]
    assert continued.name == "GET /v1/runs"


async def execute(database_url: str, *statements: str) -> None:
    connection = await asyncpg.connect(database_url.replace("+asyncpg", ""))
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


def drive(site: Site) -> tuple[list[str], str]:
    """Secrets of every kind, good and bad, sent where they belong and where they do not; and what was answered."""
    made = [site.http.post(
        "/v1/tokens", json={"name": name, "role": "viewer"}, headers={"authorization": f"Bearer {ADMIN}"}
    ).json()["token"] for name in ("one", "two")]  # fmt: skip
    bad = ["rct_0123456789ab_" + secrets.token_urlsafe(32), "Zm9vOmJhcg" + secrets.token_hex(12)]
    password = make_url(site.database_url).password
    assert password
    known = [ADMIN, *made, bad[0], str(password)]
    answers = []
    for token in (*made, *bad, ADMIN):
        answers += [site.get("/v1/runs", token), site.get("/metrics", token)]
        answers.append(site.get(f"/v1/runs?token={token}&access_token={token}", token))
        answers.append(site.get(f"/v1/runs/nowhere/rollouts?after={token}", token))
        answers.append(site.http.get("/v1/runs", headers={"authorization": f"Basic {token}"}))
        answers.append(site.http.post("/v1/runs", content=b"{" + token.encode(), headers={"cookie": token}))
        if token != bad[1]:  # one without any shape could as well be a run's name
            site.get(f"/v1/runs/{token}/updates/{token}", token)  # whose answer repeats the address
            site.get(f"/nowhere/{token}?token={token}", token)
    asyncio.run(
        execute(
            site.database_url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
    )
    answers += [site.get("/v1/runs", made[0]) for _ in range(12)]
    asyncio.run(execute(site.database_url, "ALTER TABLE tokens RENAME TO tokens_gone"))
    try:
        failed = site.get("/v1/runs", made[1])
        refused(failed, 500, "internal_error")
        answers.append(failed)
    finally:
        asyncio.run(execute(site.database_url, "ALTER TABLE tokens_gone RENAME TO tokens"))
    return [*known, bad[1]], "\n".join(f"{answer.headers} {answer.text}" for answer in answers)


@pytest.mark.parametrize("kind", ["json", "text"])
def test_no_secret_is_in_anything_that_is_said(behind_tls: Site, plain: Site, kind: str) -> None:
    site = behind_tls if kind == "json" else plain
    hidden, answers = drive(site)
    log = site.process.log.read_text()
    assert "unexpected failure" in log and "Traceback" in log
    for secret in hidden:
        assert secret not in answers
        assert secret not in log
        if site.collector is not None:
            assert secret.encode() not in site.collector.received


@pytest.mark.parametrize("trusted", [True, False])
def test_only_a_trusted_proxy_says_where_a_request_comes_from(behind_tls: Site, plain: Site, trusted: bool) -> None:
    site = behind_tls if trusted else plain
    for n in range(int(FAILURES_AT_ONCE)):
        site.get("/v1/runs", f"none-{n}", **{"x-forwarded-for": "10.0.0.1"})
    assert site.get("/v1/runs", "none", **{"x-forwarded-for": "10.0.0.1"}).status_code == 429
    elsewhere = site.get("/v1/runs", "none", **{"x-forwarded-for": "10.0.0.2"})
    assert elsewhere.status_code == (401 if trusted else 429)
    assert site.get("/v1/runs").status_code == 200


def test_an_address_with_a_secret_in_the_wrong_place_is_not_repeated(tmp_path: Path) -> None:
    """A password with an @ or a colon that nobody quoted makes the address unreadable."""
    process = ServerProcess(tmp_path / "data", "postgresql://someone:pass:word@x@host:54x32/db")
    with pytest.raises(AssertionError, match="DATABASE_URL cannot be read"):
        process.start()
    assert "word@x" not in process.log.read_text()


def test_a_certificate_without_its_key_is_said(tmp_path: Path, postgres: Databases) -> None:
    certificate, _ = write_certificate(tmp_path)
    process = ServerProcess(tmp_path / "data", postgres.migrated(), tls_certificate=str(certificate))
    with pytest.raises(AssertionError, match="belong together"):
        process.start()
    process.settings["tls_key"] = str(certificate)
    with pytest.raises(AssertionError, match="no TLS with"):
        process.start()


def test_it_turns_away_balancers_before_it_ends(plain: Site) -> None:
    """The last test here: the server ends with it."""
    process = plain.process
    process._process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
    while (answer := plain.get("/readyz")).status_code == 200:
        pass
    refused(answer, 503, "shutting_down")
    assert plain.get("/v1/runs").status_code == 200
    assert process.stop() == 0  # told a second time, it does not wait
