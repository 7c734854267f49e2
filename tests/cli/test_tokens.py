"""token create, list and revoke."""

from __future__ import annotations

from pathlib import Path

import httpx

from coordinator.client import Coordinator
from tests.cli.conftest import Command
from tests.client.server_process import ServerProcess


def test_a_token_is_created_listed_with_its_uses_and_revoked(
    cli: Command, server: ServerProcess, coordinator: Coordinator
) -> None:
    created = cli("token", "create", "--name", "eye", "--role", "viewer", "--days", "2")
    assert created.code == 0, created.err
    secret = created.out.strip()
    assert httpx.get(f"{server.url}/v1/runs", headers={"authorization": f"Bearer {secret}"}).status_code == 200

    listed = cli("token", "list")
    assert listed.out.splitlines()[0].split() == "ID NAME ROLE RUN WORKER STATE EXPIRES LAST USED".split()  # noqa: SIM905
    (row,) = [row for row in listed.rows if row[1] == "eye"]
    assert row[2:6] == ["viewer", "-", "-", "valid"]
    assert secret not in listed.out
    documents = cli("token", "list", "--json").document
    assert documents["tokens"] == [token.model_dump(mode="json") for token in coordinator.tokens()]

    revoked = cli("token", "revoke", "eye", "--json")
    assert (revoked.code, revoked.document["name"]) == (0, "eye")
    assert httpx.get(f"{server.url}/v1/runs", headers={"authorization": f"Bearer {secret}"}).status_code == 401
    again = cli("token", "revoke", row[0])
    assert (again.code, again.rows[-1][0]) == (0, "revoked")
    assert [row[5] for row in cli("token", "list").rows if row[1] == "eye"] == ["revoked"]


def test_a_created_token_in_json_is_the_answer_of_the_api(cli: Command, coordinator: Coordinator) -> None:
    done = cli("token", "create", "--name", "machine", "--role", "worker", "--worker", "gpu-0", "--json")
    (view,) = [token for token in coordinator.tokens() if token.name == "machine"]
    assert done.document == view.model_dump(mode="json") | {"token": done.document["token"]}


def test_what_is_wrong_with_a_token_is_said_in_words(cli: Command, tmp_path: Path, command: Command) -> None:
    king = cli("token", "create", "--name", "a", "--role", "king")
    assert (king.code, king.out) == (2, "")
    assert king.err.startswith("coordinator: role: 'king' should be 'admin', 'trainer'")
    blank = cli("token", "create", "--name", "a b", "--role", "viewer")
    assert blank.err.startswith("coordinator: name: 'a b' is no id: letters, digits")
    unbound = cli("token", "create", "--name", "a", "--role", "worker")
    assert unbound.err == "coordinator: a worker's token, and only a worker's, names its worker_id\n"
    assert cli("token", "create", "--name", "twice", "--role", "viewer").code == 0
    twice = cli("token", "create", "--name", "twice", "--role", "viewer")
    assert twice.code == 1
    assert "coordinator: token_conflict: a token named twice exists\n  Choose another name; a token" in twice.err
    unknown = cli("token", "revoke", "nobody")
    assert (unknown.code, unknown.out) == (1, "")
    assert "coordinator: token_unknown: there is no token with the name or id nobody\n" in unknown.err
    nowhere = command("token", "list", "--data", str(tmp_path / "nowhere"))
    assert (nowhere.code, nowhere.out) == (2, "")
    assert "there is no database in" in nowhere.err
