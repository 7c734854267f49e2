"""The HTTP application: every noun's router, errors as problem documents, health, and the sweeping clock."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Collection
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from coordinator import clocks, errors
from coordinator.body import BodyLimit
from coordinator.dashboard import pages
from coordinator.diagnosis import router as diagnosis
from coordinator.errors import refusals
from coordinator.metrics.collector import Standings, watch_space
from coordinator.metrics.endpoint import Readers, metrics_route
from coordinator.metrics.standing import Standing
from coordinator.openapi import document, page
from coordinator.operations.access import still_valid, valid_hashes
from coordinator.operations.good_tokens import GoodTokens
from coordinator.operations.limits import Limits
from coordinator.operations.numbers import Numbers
from coordinator.operations.readiness import Readiness
from coordinator.operations.requests import Requests
from coordinator.operations.token_uses import TokenUses
from coordinator.policies import reading
from coordinator.policies.endpoints import router as policies
from coordinator.policies.file_endpoints import router as files
from coordinator.policies.verification import Verifier
from coordinator.rewinds.endpoints import router as rewinds
from coordinator.rollouts.endpoints import router as rollouts
from coordinator.runs.endpoints import router as runs
from coordinator.statistics import service as statistics
from coordinator.statistics.endpoints import router as statistics_router
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.changes import Changes
from coordinator.storage.database import Database, check_durability
from coordinator.storage.locations import Locations
from coordinator.storage.migrations import check_schema
from coordinator.storage.notices import Notices
from coordinator.storage.watchers import Watchers
from coordinator.tokens.endpoints import router as tokens
from coordinator.updates.endpoints import line
from coordinator.updates.endpoints import router as updates
from coordinator.watching.endpoints import router as watching
from coordinator.watching.feeds import Entry, Feeds
from coordinator.watching.stream import entries_after
from coordinator.wire.policies import Watch
from coordinator.wire.statistics import Statistics
from coordinator.workers.endpoints import router as workers

DESCRIPTION = """
The coordinator keeps every trajectory of online RL post-training with its whole identity, admits it to an update
only when it is fresh, binds it to exactly one update, and switches the active policy only when every required
worker has confirmed the same version and hash.

Every call that changes something may be sent again; each says what it answers then. Every refusal is an
`application/problem+json` document with a stable `code` and a `next_step`. Fields may be added to answers, and codes
to refusals: pass over those that you do not know.

The operation ids are verb and noun in snake case, the names of methods for a generated client: `submit_rollouts`, or
`submitRollouts` where that is the custom. The examples of all calls tell one story, in the order of their numbers.
"""


def _operation_id(route: APIRoute) -> str:
    return route.name


@functools.cache
def _routes_of_nouns() -> tuple[BaseRoute, ...]:
    """What is served on each noun: slow to make, and the same in every app of a process."""
    every = APIRouter(generate_unique_id_function=_operation_id, strict_content_type=False)
    nouns = (runs, workers, policies, files, rollouts, updates, line, rewinds)
    for router in (*nouns, watching, diagnosis, statistics_router, tokens):
        every.include_router(router)
    return tuple(every.routes)


def create_app(
    database: Database,
    artifacts: Path,
    max_body_bytes: int = 64 * 2**20,
    artifact_uris: str = "",
    *,
    limits: Limits | None = None,
    metrics_open: bool = False,
) -> FastAPI:
    """The application over this database and artifact folder. It closes the database when it ends.

    `artifact_uris` are prefixes below which artifacts may lie, with blanks or commas between them. Without `limits` a
    token may call as often as it likes. `metrics_open` shows the metrics to whoever asks.
    """
    store, changes = ArtifactStore(artifacts), Changes()
    locations = Locations.parse(artifact_uris)
    uses = TokenUses(database)
    verifier = Verifier(database, changes, store, locations)
    numbers, sweeps = Numbers(), clocks.Sweeps()
    standing = Standing(database, numbers)
    readiness = Readiness(database, artifacts)

    async def watch(run_id: str) -> Watch:
        return await database.transaction(reading.watch, run_id)

    async def entries(run_id: str, after: int, limit: int) -> list[Entry]:
        return await database.read(entries_after, run_id, after, limit)

    async def valid(token_ids: Collection[str]) -> frozenset[str]:
        found = await database.read(still_valid, token_ids)
        uses.note(found)
        return found

    async def measured(run_id: str, window_seconds: int, buckets: int) -> Statistics:
        return await database.transaction(statistics.measure, run_id, window_seconds, buckets)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await check_durability(database)
        await check_schema(database)
        app.state.watchers = Watchers(changes, watch)
        app.state.feeds = Feeds(changes, entries, valid)
        app.state.statistics = statistics.Recent(measured)
        standings = Standings(database, changes, app.state.feeds, standing, sweeps)
        numbers.registry.register(standings)
        tasks = [
            asyncio.create_task(work)
            for work in (
                clocks.run(database, changes, store, verifier, sweeps),
                Notices(database, changes).run(),
                uses.run(),
                standing.run(),
                watch_space(store, standings),
            )
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            numbers.registry.unregister(standings)
            await verifier.close()
            store.close()
            await database.close()

    app = FastAPI(
        title="Rollout coordinator",
        version=version("rollout-coordinator"),
        description=DESCRIPTION,
        lifespan=lifespan,
        generate_unique_id_function=_operation_id,
        redirect_slashes=False,
        strict_content_type=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.database = database
    app.state.changes = changes
    app.state.artifacts = store
    app.state.locations = locations
    app.state.verifier = verifier
    app.state.limits = limits or Limits()
    app.state.good_tokens = GoodTokens(lambda: database.read(valid_hashes))
    app.state.numbers = numbers
    app.state.readiness = readiness
    app.state.standing = standing
    app.state.token_uses = uses
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(Requests, numbers=numbers)
    errors.install(app)
    app.router.routes.extend(_routes_of_nouns())

    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """Say whether the process answers at all.

        For a liveness probe: it touches no database.
        """
        return {"status": "ok"}

    @app.get(
        "/readyz",
        tags=["health"],
        responses=refusals("internal_error", "unavailable", "not_ready", "shutting_down", among=()),
    )
    async def readyz() -> dict[str, str]:
        """Say whether requests may be sent here: database, schema and store are well, and it is not about to end.

        For a readiness probe, and for a proxy that chooses among replicas: 503 while it must get nothing new.
        """
        await readiness.check()
        return {"status": "ready"}

    app.router.routes.append(metrics_route(None if metrics_open else Readers()))
    document.install(app)
    page.install(app)
    pages.install(app)
    return app
