"""The schema: reached from nothing, equal to the tables, and asked for before anything is served."""

from __future__ import annotations

import asyncio

import pytest
from alembic import command
from sqlalchemy import text

from coordinator.storage.database import DatabaseError, check_durability, connect
from coordinator.storage.migrations import check_schema, config, newest, upgrade
from tests.database import Databases


async def run_checks(url: str, *statements: str) -> None:
    database = connect(url, pool_size=1)
    try:
        async with database.engine.begin() as connection:
            for statement in statements:
                await connection.execute(text(statement))
        await check_schema(database)
    finally:
        await database.close()


def test_a_fresh_database_reaches_the_newest_schema_and_again_changes_nothing(postgres: Databases) -> None:
    url = postgres.empty()
    with pytest.raises(DatabaseError, match=r"revision none.*run 'coordinator migrate'"):
        asyncio.run(run_checks(url))
    upgrade(url)
    upgrade(url)
    asyncio.run(run_checks(url))


def test_the_migrations_make_exactly_the_tables(database_url: str) -> None:
    command.check(config(database_url))


def test_a_schema_of_a_newer_release_is_refused(database_url: str) -> None:
    with pytest.raises(DatabaseError, match=f"revision 9999, this release knows {newest()}; a newer release"):
        asyncio.run(run_checks(database_url, "UPDATE alembic_version SET version_num = '9999'"))


@pytest.mark.parametrize("setting", ["synchronous_commit"])
def test_a_postgres_that_forgets_is_refused(postgres: Databases, setting: str) -> None:
    url = postgres.migrated()
    name = url.rsplit("/", 1)[1]

    async def look() -> None:
        database = connect(url, pool_size=1)
        try:
            async with database.engine.begin() as connection:
                await connection.execute(text(f'ALTER DATABASE "{name}" SET {setting} = off'))
            await database.engine.dispose()
            await check_durability(database)
        finally:
            await database.close()

    with pytest.raises(DatabaseError, match=f"{setting}=off"):
        asyncio.run(look())


def test_only_postgres_is_possible() -> None:
    with pytest.raises(DatabaseError, match="only postgresql"):
        connect("sqlite:///x.db")


async def test_what_was_there_before_the_ledger_in_full_is_kept_and_counted(postgres: Databases) -> None:
    """A database of the first release, with two runs and three rollouts."""
    url = await asyncio.to_thread(postgres.empty)
    await asyncio.to_thread(command.upgrade, config(url), "0001")
    database = connect(url, pool_size=1)
    try:
        async with database.engine.begin() as connection:
            for run_no in (1, 2):
                await connection.execute(text(FIRST_RELEASE_RUN), {"run_id": f"run-{run_no}"})
            for rollout_id, state in (("a", "generated"), ("b", "generated"), ("c", "quarantined")):
                await connection.execute(text(FIRST_RELEASE_GROUP), {"group_id": rollout_id})
                await connection.execute(text(FIRST_RELEASE_ROLLOUT), {"rollout_id": rollout_id, "state": state})
                await connection.execute(text(FIRST_RELEASE_EVIDENCE), {"rollout_id": rollout_id})
        await asyncio.to_thread(upgrade, url)
        async with database.engine.connect() as connection:
            contracts = await connection.execute(
                text("SELECT run_no, contract_hash FROM contracts ORDER BY run_no"),
            )
            assert [tuple(row) for row in contracts] == [(1, "hash"), (2, "hash")]
            named = await connection.execute(
                text("SELECT count(*) FROM rollouts r JOIN groups g USING (run_no, group_id)"
                     " JOIN contracts c ON c.run_no = r.run_no AND c.contract_no = r.contract_no"
                     " WHERE g.contract_no = r.contract_no")
            )  # fmt: skip
            assert named.scalar_one() == 3
            counted = await connection.execute(text("SELECT name, n FROM counts WHERE run_no = 1 ORDER BY name"))
            assert dict(tuple(row) for row in counted) == {"evidence_bytes": 27, "generated": 2, "quarantined": 1}
            kept = await connection.execute(
                text("SELECT count(*) FROM rollout_evidence e JOIN rollouts r USING (run_no, rollout_id)"
                     " WHERE e.tokens = 1 AND e.arrived_at = r.arrived_at")
            )  # fmt: skip
            assert kept.scalar_one() == 3
    finally:
        await database.close()


FIRST_RELEASE_RUN = """
    INSERT INTO runs (run_id, settings, contract, contract_hash, vocab_size, active_version)
    VALUES (:run_id, '{}', '{"top_k": 0}', 'hash', 10, 0)
"""
FIRST_RELEASE_GROUP = "INSERT INTO groups (run_no, group_id, deadline_at) VALUES (1, :group_id, now())"
FIRST_RELEASE_ROLLOUT = """
    INSERT INTO rollouts (run_no, rollout_id, group_id, sample_index, attempt, state, revision, reason, worker_id,
                          incarnation, versions, content_hash)
    VALUES (1, :rollout_id, :rollout_id, 0, 0, :state, 0, 'x', 'w', 'w-1', '{0}', '\\x00')
"""
FIRST_RELEASE_EVIDENCE = """
    INSERT INTO rollout_evidence (run_no, rollout_id, task_id, task_source, span_versions, span_hashes, span_starts,
                                  span_ends, span_source, generation, flags, action_tokens, token_ids, action_mask,
                                  behavior_log_probs)
    VALUES (1, :rollout_id, 't', 's', '{0}', '{h}', '{0}', '{1}', 'dispatch', '{}', '{}', 1, '\\x00000000', '\\x01',
            '\\x00000000')
"""
