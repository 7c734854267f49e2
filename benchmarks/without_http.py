"""The same phases without HTTP: the functions behind the endpoints, called one after another on the same database."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.processes import Times
from benchmarks.workload import ARTIFACT_HASH, Share, current_log_probs, require
from coordinator.operations.access import Caller
from coordinator.rollouts import arrival
from coordinator.rollouts.rewards import take_rewards
from coordinator.runs.service import get_run
from coordinator.storage.database import Database, connect
from coordinator.updates import candidates, reservation, service
from coordinator.wire.columns import (
    Ragged,
    ReserveColumns,
    decode_candidates,
    decode_reserve,
    encode_candidates,
    encode_reserve,
    ragged,
)
from coordinator.wire.rollouts import RewardBatch
from coordinator.wire.updates import CandidatesRequest, CommitUpdate, OpenUpdate

CALLER = Caller("bench", "bench", "admin", None, None)
OWNER = "bench-trainer"


@dataclass(frozen=True)
class Address:
    """A database, and a run in it."""

    database_url: str
    run_id: str


@contextlib.contextmanager
def _connected(at: Address) -> Iterator[tuple[asyncio.Runner, Database]]:
    """An event loop and one connection that has been used."""
    with asyncio.Runner() as runner:
        database = connect(at.database_url, pool_size=1)
        runner.run(database.transaction(get_run, at.run_id))
        try:
            yield runner, database
        finally:
            runner.run(database.close())


@dataclass(frozen=True)
class Submit:
    """Rollouts in. With `decoding` from Arrow streams, as they come over the network; else decoded and checked before
    the clock starts, so that the statements alone are timed."""

    at: Address
    size: int
    decoding: bool

    @contextlib.contextmanager
    def prepared(self, share: Share) -> Iterator[Callable[[Times], None]]:
        streams = share.arrow(self.size)
        with _connected(self.at) as (runner, database):
            known = runner.run(database.read(get_run, self.at.run_id))
            examined = (
                []
                if self.decoding
                else [arrival.arrive(arrival.decode_arrow, stream, known, CALLER) for stream in streams]
            )

            async def submit(times: Times) -> None:
                for place, stream in enumerate(streams):
                    began = time.perf_counter()
                    if self.decoding:
                        with times.stage("find run"):
                            run = await database.read(get_run, self.at.run_id)
                        with times.stage("decode"):
                            columns = arrival.decode_arrow(stream)
                        with times.stage("examine"):
                            arrived = arrival.examine(columns, run, CALLER)
                    else:
                        run, arrived = known, examined[place]
                    with times.stage("take in"):
                        answer = await database.transaction(arrival.take_in, run, arrived, CALLER)
                    times.call(began, len(arrived.columns))
                    require((v.verdict for v in answer.verdicts), "accepted")

            yield lambda times: runner.run(submit(times))


@dataclass(frozen=True)
class SubmitRewards:
    """Rewards for all rollouts of the share."""

    at: Address
    size: int

    @contextlib.contextmanager
    def prepared(self, share: Share) -> Iterator[Callable[[Times], None]]:
        bodies = [RewardBatch(rewards=rewards) for rewards in share.rewards(self.size)]
        with _connected(self.at) as (runner, database):

            async def submit(times: Times) -> None:
                for body in bodies:
                    began = time.perf_counter()
                    answer = await database.transaction(take_rewards, self.at.run_id, body, CALLER)
                    times.call(began, len(body.rewards))
                    require((v.verdict for v in answer.verdicts), "stored")

            yield lambda times: runner.run(submit(times))


@dataclass(frozen=True)
class Consume:
    """One trainer takes whole groups until there are none. With `decoding`, candidates and reservations are encoded
    and decoded as for the network; else columns are handed on as they are."""

    at: Address
    groups: int
    decoding: bool

    @contextlib.contextmanager
    def prepared(self, share: Share) -> Iterator[Callable[[Times], None]]:
        with _connected(self.at) as (runner, database):
            yield lambda times: runner.run(self._consume(database, times))

    async def _consume(self, database: Database, times: Times) -> None:
        transaction, run_id = database.transaction, self.at.run_id
        commit_no = 0
        while True:
            began = time.perf_counter()
            update_id = f"update-{commit_no + 1}"
            opening = OpenUpdate(owner=OWNER, policy_version=0, artifact_hash=ARTIFACT_HASH)
            with times.stage("open"):
                await transaction(service.open_update, run_id, update_id, opening, CALLER)
            asking = CandidatesRequest(owner=OWNER, groups=self.groups)
            with times.stage("hold"):
                offer = await transaction(candidates.hold, run_id, update_id, asking, CALLER, True)
            if offer is None or not offer.rows:
                return
            with times.stage("columns"):
                found = candidates.columns(offer)
            if self.decoding:
                with times.stage("encode candidates"):
                    stream = encode_candidates(found)
                with times.stage("decode candidates"):
                    found = decode_candidates(stream)
            size = len(found)
            behavior: Ragged = found.behavior_log_probs
            columns = ReserveColumns(
                OWNER,
                commit_no,
                False,
                found.rollout_id,
                found.revision,
                [None] * size,
                [True] * size,
                ragged(current_log_probs([behavior[i] for i in range(size)]), "f8"),
            )
            if self.decoding:
                with times.stage("encode reserve"):
                    stream = encode_reserve(columns)
                with times.stage("decode reserve"):
                    columns = decode_reserve(stream)
            with times.stage("read evidence"):
                run, evidence = await database.read(reservation.read_evidence, run_id, columns)
            with times.stage("drift"):
                drift = reservation.measure(run, columns, evidence)
            with times.stage("reserve"):
                answer = await transaction(reservation.reserve, run_id, update_id, columns, drift, CALLER)
            closing = CommitUpdate(owner=OWNER, after_commit_no=commit_no)
            with times.stage("commit"):
                await transaction(service.commit, run_id, update_id, closing, CALLER)
            times.call(began, size)
            require((v.verdict for v in answer.verdicts), "reserved")
            commit_no += 1
