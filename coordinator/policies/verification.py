"""Every file of an artifact is read again before its version is committed: small ones in the call, others behind it.

The wish to commit a large artifact is a row. Whichever server claims it reads the files, and renews its claim while it
does; when that server is killed, the claim ends and another takes the wish up. The claim fences: who lost it changes
nothing any more.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.journal import record_event, record_failure
from coordinator.policies import queries
from coordinator.policies.activation import switch_if_ready
from coordinator.policies.service import find_version, get_policy
from coordinator.runs.service import Run, lock_run
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.changes import Changes
from coordinator.storage.database import Database
from coordinator.storage.locations import Locations
from coordinator.wire.policies import ArtifactFile, PolicyView

log = logging.getLogger("coordinator.verification")

SMALL_BYTES = 64 << 20
"""Uploaded artifacts of up to so many bytes are verified while the caller waits."""

CLAIM_SECONDS = 10.0
RENEW_SECONDS = 1.0
AT_ONCE = 8
"""Artifacts that one server reads at the same time, in turns."""

ASK = text("""
    INSERT INTO verifications (run_no, version, actor, bytes_total) VALUES (:run_no, :version, :actor, :bytes_total)
    ON CONFLICT (run_no, version) DO UPDATE SET state = 'running', actor = EXCLUDED.actor, bytes_done = 0,
        faulty = '{}', claimed_by = NULL, claimed_until = NULL, asked_at = clock_timestamp(), ended_at = NULL
    WHERE verifications.state <> 'running'
""")

CLAIM = text("""
    UPDATE verifications c SET claimed_by = :claimed_by, bytes_done = 0,
        claimed_until = clock_timestamp() + make_interval(secs => :claim_seconds)
    FROM (
        SELECT run_no, version FROM verifications
        WHERE state = 'running' AND (claimed_until IS NULL OR claimed_until < clock_timestamp())
        ORDER BY asked_at LIMIT :batch FOR UPDATE SKIP LOCKED
    ) AS due JOIN runs r USING (run_no)
    WHERE c.run_no = due.run_no AND c.version = due.version
    RETURNING r.run_id, c.run_no, c.version, c.actor
""")

_CLAIMED = "run_no = :run_no AND version = :version AND claimed_by = :claimed_by AND state = 'running'"

RENEW = text(f"""
    UPDATE verifications SET bytes_done = :bytes_done,
        claimed_until = clock_timestamp() + make_interval(secs => :claim_seconds)
    WHERE {_CLAIMED} RETURNING version
""")

END = text(f"""
    UPDATE verifications SET state = :state, faulty = CAST(:faulty AS text[]), bytes_done = :bytes_done,
        ended_at = clock_timestamp()
    WHERE {_CLAIMED} RETURNING version
""")


@dataclass(frozen=True)
class Claim:
    """A version that this server verifies, under a name that only this claim has."""

    run_id: str
    run_no: int
    version: int
    actor: str
    claimed_by: str

    @property
    def keys(self) -> dict[str, object]:
        """What its row is found by."""
        return {"run_no": self.run_no, "version": self.version, "claimed_by": self.claimed_by}


async def faulty_files(
    store: ArtifactStore, locations: Locations, policy: PolicyView, advanced: Callable[[int], None] = lambda _: None
) -> list[str]:
    """The names of those files of a version that are missing or changed, each read from its beginning to its end."""
    return [file.name for file in policy.files if not await _is_intact(store, locations, policy, file, advanced)]


async def _is_intact(
    store: ArtifactStore,
    locations: Locations,
    policy: PolicyView,
    file: ArtifactFile,
    advanced: Callable[[int], None],
) -> bool:
    if policy.uri is None:
        return await store.is_intact(file.sha256, file.size, advanced)
    opened = functools.partial(locations.open, policy.uri, file.name)
    try:
        return await store.digest(opened, advanced, remote=True) == (file.sha256, file.size)
    except Exception:  # each kind of filesystem has its own; whatever it is, the file cannot be read
        log.exception("%s/%s of version %d cannot be read", policy.uri, file.name, policy.version)
        return False


async def commit_version(connection: AsyncConnection, run: Run, version: int, actor: str) -> None:
    """Commits a version whose files were verified, if it is still prepared. The run's lock is held."""
    policy = await find_version(connection, run.run_no, version)
    if policy.state in ("abandoned", "withdrawn"):
        raise Refusal("policy_state", f"version {version} is {policy.state}")
    if policy.state == "prepared":
        await connection.execute(queries.COMMIT_VERSION, {"run_no": run.run_no, "version": version})
        await record_event(
            connection, run.run_no, "policy.committed", str(version), actor, artifact_hash=policy.artifact_hash
        )
        await switch_if_ready(connection, run, version, actor)


def incomplete(faulty: list[str]) -> str:
    """What is said of these files."""
    return f"missing or changed: {', '.join(faulty)}"


async def record_incomplete(
    connection: AsyncConnection, run_no: int, version: int, faulty: list[str], actor: str
) -> None:
    """Adds the failure that a commit was refused for."""
    await record_failure(
        connection, run_no, "artifact", "artifact_not_committed", incomplete(faulty)[:2000], actor, version=version
    )


async def ask(connection: AsyncConnection, run_id: str, version: int, actor: str) -> PolicyView:
    """Notes the wish to commit. One that is under way goes on; one that was refused begins anew."""
    run = await lock_run(connection, run_id)
    policy = await find_version(connection, run.run_no, version)
    if policy.state == "prepared":
        total = sum(file.size for file in policy.files)
        await connection.execute(ASK, {"run_no": run.run_no, "version": version, "actor": actor, "bytes_total": total})
        return await find_version(connection, run.run_no, version)
    return policy


async def _claim(connection: AsyncConnection, claimed_by: str, batch: int) -> list[Claim]:
    rows = await connection.execute(CLAIM, {"claimed_by": claimed_by, "claim_seconds": CLAIM_SECONDS, "batch": batch})
    return [Claim(row.run_id, row.run_no, row.version, row.actor, claimed_by) for row in rows]


async def _renew(connection: AsyncConnection, claim: Claim, bytes_done: int) -> bool:
    renewal = claim.keys | {"bytes_done": bytes_done, "claim_seconds": CLAIM_SECONDS}
    return await connection.scalar(RENEW, renewal) is not None


async def _end(connection: AsyncConnection, claim: Claim, faulty: list[str], bytes_done: int) -> bool:
    """Commits or refuses the version. False where the claim was lost."""
    run = await lock_run(connection, claim.run_id)
    wanted = (await find_version(connection, run.run_no, claim.version)).state == "prepared"
    state = "passed" if wanted and not faulty else "refused"
    ended = claim.keys | {"state": state, "faulty": faulty, "bytes_done": bytes_done}
    if await connection.scalar(END, ended) is None:
        return False
    if faulty:
        await record_incomplete(connection, run.run_no, claim.version, faulty, claim.actor)
    elif wanted:
        await commit_version(connection, run, claim.version, claim.actor)
    return True


class Verifier:
    """Verifies in the background what commits were asked for, here or at a server that is gone."""

    def __init__(self, database: Database, changes: Changes, store: ArtifactStore, locations: Locations) -> None:
        self._database = database
        self._changes = changes
        self._store = store
        self._locations = locations
        self._tasks: set[asyncio.Task[None]] = set()

    async def take_up(self) -> None:
        """Begins with what nobody is at, as far as this server has room for it."""
        room = AT_ONCE - len(self._tasks)
        if room <= 0:
            return
        for claim in await self._database.transaction(_claim, secrets.token_hex(8), room):
            # Of no request: it outlives the one that asked for it.
            task = asyncio.get_running_loop().create_task(
                self._verify(claim), name=f"verify {claim.run_id} {claim.version}", context=Context()
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stops all of it. Another server goes on when the claims end."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _verify(self, claim: Claim) -> None:
        where = f"run {claim.run_id}, version {claim.version}"
        try:
            if await self._verify_claimed(claim):
                self._changes.announce(claim.run_id)
            else:
                log.info("%s: another server verifies it now", where)
        except Exception:  # it is taken up again when the claim ends
            log.exception("%s: the verification was interrupted", where)

    async def _verify_claimed(self, claim: Claim) -> bool:
        """Reads the files while it renews the claim. False where the claim was lost."""
        policy = await self._database.transaction(get_policy, claim.run_id, claim.version)
        done = 0

        def advanced(count: int) -> None:
            nonlocal done
            done += count

        reading = asyncio.create_task(faulty_files(self._store, self._locations, policy, advanced))
        try:
            while not (await asyncio.wait((reading,), timeout=RENEW_SECONDS))[0]:
                if not await self._database.transaction(_renew, claim, done):
                    return False
            return await self._database.transaction(_end, claim, reading.result(), done)
        finally:
            reading.cancel()
            await asyncio.wait((reading,))
