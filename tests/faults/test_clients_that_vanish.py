"""Clients that leave in the middle, and a server that is killed in the middle, leave nothing half done behind."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import httpx
import pytest

from coordinator.client import Coordinator, Run
from coordinator.wire.policies import ArtifactFile, PreparePolicy
from tests.client.runs import BASE, new_run
from tests.client.server_process import ServerProcess

CONTENT = b"weights" * 300_000


@pytest.fixture
def server(database_url: str, tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "data", database_url)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run(server: ServerProcess) -> Iterator[Run]:
    """A run whose version 1 waits for its only file."""
    with Coordinator(server.url, server.token) as coordinator:
        run = new_run(coordinator)
        file = ArtifactFile(name="f", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
        body = PreparePolicy(version=1, parent_version=0, kind="lora", base_model=BASE, files=(file,))
        with caller(server) as http:
            assert http.post(f"/v1/runs/{run.id}/policies", content=body.model_dump_json()).status_code == 201
        yield run


def caller(server: ServerProcess) -> httpx.Client:
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
    return httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=30)


def begin(server: ServerProcess, method: str, path: str, kind: str, body: bytes) -> socket.socket:
    """A request whose head announces more than this body."""
    address = urlparse(server.url)
    connection = socket.create_connection((str(address.hostname), address.port or 80))
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {server.token}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(CONTENT)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def partial_uploads(server: ServerProcess) -> list[Path]:
    return list((server.data / "artifacts").glob("upload-*"))


def wait_for_uploads(server: ServerProcess, count: int) -> None:
    until = time.monotonic() + 10
    while len(partial_uploads(server)) != count:
        assert time.monotonic() < until, f"{partial_uploads(server)}, expected {count}"
        time.sleep(0.05)


def wait_until_free(http: httpx.Client, run: Run) -> int:
    """How much of the file is here, once nobody sends more of it."""
    until = time.monotonic() + 15
    while (upload := http.get(f"/v1/runs/{run.id}/policies/1/uploads/f").json())["busy"]:
        assert time.monotonic() < until
        time.sleep(0.05)
    return int(upload["received"])


def test_a_client_that_leaves_is_no_failure_of_the_server(server: ServerProcess, run: Run) -> None:
    upload = f"/v1/runs/{run.id}/policies/1/files/f"
    connections = [
        begin(server, "PUT", upload, "application/octet-stream", CONTENT[:1000]),
        begin(server, "PUT", upload, "application/octet-stream", CONTENT[:-1]),
        begin(server, "POST", f"/v1/runs/{run.id}/rollouts", "application/json", b'{"rollouts": ['),
        begin(server, "POST", f"/v1/runs/{run.id}/rewards", "application/json", b'{"rewards": ['),
        begin(server, "POST", "/v1/runs", "application/json", b"{"),
    ]
    wait_for_uploads(server, 2)
    for connection in connections:
        connection.close()
    with caller(server) as http:
        assert wait_until_free(http, run) == len(CONTENT) - 1
        assert http.post(f"/v1/runs/{run.id}/policies/1/commit").json()["code"] == "artifact_incomplete"
        assert http.put(upload, content=CONTENT).status_code == 200
        assert http.post(f"/v1/runs/{run.id}/policies/1/commit").status_code == 200
    assert "Traceback" not in server.log.read_text()


def test_an_upload_that_a_kill_cut_off_goes_on_where_it_was(server: ServerProcess, run: Run) -> None:
    upload = f"/v1/runs/{run.id}/policies/1/files/f"
    with begin(server, "PUT", upload, "application/octet-stream", CONTENT[:-1]):
        wait_for_uploads(server, 1)
        with caller(server) as http:
            until = time.monotonic() + 10
            while http.get(f"/v1/runs/{run.id}/policies/1/uploads/f").json()["received"] < 2**20:
                assert time.monotonic() < until
                time.sleep(0.02)
        server.kill()
    server.start()
    with caller(server) as http:
        assert http.post(f"/v1/runs/{run.id}/policies/1/commit").json()["code"] == "artifact_incomplete"
        received = wait_until_free(http, run)
        assert 2**20 <= received < len(CONTENT)
        rest = http.put(upload, params={"offset": received}, content=CONTENT[received:])
        assert rest.json() == {
            "name": "f",
            "size": len(CONTENT),
            "received": len(CONTENT),
            "stored": True,
            "busy": False,
        }
        assert http.post(f"/v1/runs/{run.id}/policies/1/commit").status_code == 200
        assert http.get(upload).content == CONTENT
    assert partial_uploads(server) == []


def test_an_upload_that_is_given_up_is_swept_away_while_the_server_runs(server: ServerProcess, run: Run) -> None:
    upload = f"/v1/runs/{run.id}/policies/1/files/f"
    with begin(server, "PUT", upload, "application/octet-stream", CONTENT[:-1]):
        wait_for_uploads(server, 1)
    with caller(server) as http:
        wait_until_free(http, run)
    for left in partial_uploads(server):
        os.utime(left, (0, 0))
    until = time.monotonic() + 45  # the clocks come by every 30 s
    while partial_uploads(server):
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_client_that_trickles_holds_up_nobody(server: ServerProcess, run: Run) -> None:
    path = f"/v1/runs/{run.id}/rollouts"
    connections = [begin(server, "POST", path, "application/json", b"{") for _ in range(50)]
    try:
        with caller(server) as http:
            began = time.monotonic()
            for _ in range(10):
                for connection in connections:
                    connection.sendall(b" ")
                assert http.get(f"/v1/runs/{run.id}/counts").status_code == 200
            assert time.monotonic() - began < 5
    finally:
        for connection in connections:
            connection.close()
