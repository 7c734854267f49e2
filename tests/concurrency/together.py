"""Calls let loose at the same moment, and what each came to."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import numpy as np

from coordinator.client import Coordinator, Refused, Run
from coordinator.client.rollouts import Candidates
from coordinator.policies import removal
from coordinator.rollouts import retention
from coordinator.storage.artifacts import ArtifactStore
from coordinator.storage.database import connect
from tests.client.runs import LOG_PROB, new_run

T = TypeVar("T")


_turns = itertools.count()


def at_once(*calls: Callable[[], T]) -> list[T | Refused]:
    """What each call came to, all of them started together; but in turns one of them a moment late.

    On a machine where the same one always wins, each order is seen so nevertheless.
    """
    barrier = threading.Barrier(len(calls))
    late = calls[turn] if (turn := next(_turns) % (len(calls) + 1)) < len(calls) else None

    def wait_and(call: Callable[[], T]) -> T | Refused:
        barrier.wait()
        if call is late:
            time.sleep(random.uniform(0.005, 0.03))
        try:
            return call()
        except Refused as refused:
            return refused

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(wait_and, call) for call in calls]]


def codes(outcomes: Sequence[object]) -> Counter[str]:
    """How often each came: `ok`, or the code of the refusal."""
    return Counter(outcome.code if isinstance(outcome, Refused) else "ok" for outcome in outcomes)


def everywhere(coordinators: list[Coordinator], **settings: object) -> list[Run]:
    """A new run, as each replica has it."""
    run = new_run(coordinators[0], **settings)
    return [coordinator.run(run.id) for coordinator in coordinators]


def log_probs(candidates: Candidates) -> list[np.ndarray]:
    """Current log-probs without any drift."""
    return [np.full(len(trajectory.token_ids), LOG_PROB) for trajectory in candidates]


class Retention:
    """Retention of one database, done when it is called, as the clock of one more replica would."""

    def __init__(self, database_url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="retention", daemon=True)
        self._database = connect(database_url, pool_size=2)

    def __enter__(self) -> Self:
        self._thread.start()
        self()  # connects
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._database.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __call__(self) -> dict[str, int]:
        """Drops what is over in every run. Answers how many rollouts lost tokens or row, by run."""
        return asyncio.run_coroutine_threadsafe(retention.sweep(self._database), self._loop).result()

    def removal(self, store: ArtifactStore) -> removal.Removed:
        """Removes the files of policy versions that are over, in every run."""
        return asyncio.run_coroutine_threadsafe(removal.sweep(self._database, store), self._loop).result()

    def rows(self, run_id: str) -> int:
        """Drops one batch of rows that are over. Answers how many."""
        work = self._database.transaction(retention.drop_rollouts, run_id)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
