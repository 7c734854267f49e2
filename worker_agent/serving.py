"""Which policies the engine serves: taken up whole, confirmed to the coordinator, and dropped when out of
use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from coordinator.client import ArtifactCorrupt, CoordinatorError, Refused, Run, Worker
from coordinator.wire.policies import PolicyRef, PolicyView, Watch
from worker_agent.artifacts import ArtifactCache
from worker_agent.engines.engine import Engine, EngineError, Policy
from worker_agent.logs import event
from worker_agent.passing import passes
from worker_agent.status.vitals import Vitals

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0

Key = tuple[int, str]


class _NotThereYet(Exception):
    """The version's files are still being uploaded."""


class Serving:
    """The engine's policies. What concerns the engine runs on the engine's thread, which calls `follow`; files come
    on a thread of their own, so that the engine goes on meanwhile.

    `quiet` is called before the engine is touched and must end or put off all that is in flight; `wake` when `follow`
    should be called soon.
    """

    def __init__(
        self,
        run: Run,
        worker: Worker,
        engine: Engine,
        cache: ArtifactCache,
        quiet: Callable[[], None],
        wake: Callable[[], None],
        vitals: Vitals,
    ) -> None:
        self._run = run
        self._worker = worker
        self._engine = engine
        self._cache = cache
        self._quiet = quiet
        self._wake = wake
        self._vitals = vitals
        self._held: dict[Key, Policy] = {}  # what the engine holds, or may hold of a load that failed
        self._confirmed: set[Key] = set()
        self._attempts: dict[Key, tuple[int, float]] = {}  # failed attempts, and when the next may begin
        self._fetching: dict[Key, Future[Policy]] = {}
        self._began: dict[Key, float] = {}  # attempts under way, on the monotonic clock

    def follow(self, watch: Watch) -> None:
        """Drop what is neither active nor the candidate; load and confirm what is and was not yet."""
        wanted = {_key(watch.active): watch.active}
        if watch.candidate is not None:
            candidate = PolicyRef(version=watch.candidate.version, artifact_hash=watch.candidate.artifact_hash)
            wanted[_key(candidate)] = candidate
        self._attempts = {key: attempt for key, attempt in self._attempts.items() if key in wanted}
        self._confirmed &= wanted.keys()
        for key in [key for key in self._held if key not in wanted]:
            self._quiet()
            self._engine.unload(self._held.pop(key))
            event("policy_dropped", version=key[0], artifact_hash=key[1])
        for key, ref in wanted.items():
            if key not in self._confirmed and time.monotonic() >= self._attempts.get(key, (0, 0.0))[1]:
                self._take_up(ref)
        self._fetching = {key: f for key, f in self._fetching.items() if key in wanted or not f.done()}
        if not self._fetching:  # else its files would go
            self._cache.keep_only({artifact_hash for _, artifact_hash in wanted})

    def policy(self, ref: PolicyRef) -> Policy | None:
        """The policy to generate under, None while it is not loaded and confirmed: then nothing may be
        made."""
        return self._held.get(_key(ref)) if _key(ref) in self._confirmed else None

    def confirm_again(self) -> None:
        """Load and confirm everything anew, as after this worker was fenced."""
        self._confirmed.clear()

    def _take_up(self, ref: PolicyRef) -> None:
        if _key(ref) not in self._fetching and ref.artifact_hash not in (of for _, of in self._fetching):
            self._began[_key(ref)] = time.monotonic()
            self._fetching[_key(ref)] = _in_background(lambda: self._fetch(ref), self._wake)
        fetching = self._fetching.get(_key(ref))
        if fetching is None or not fetching.done():
            return
        del self._fetching[_key(ref)]
        try:
            policy = self._fetched(ref, fetching)
            if policy is None:
                return
            self._tell(ref, "loading")
            self._quiet()
            try:
                # Whole, from its files: what an earlier attempt may have left half done is not built upon.
                self._engine.unload(policy)
                self._held[_key(ref)] = policy
                report = self._engine.load(policy)
            except EngineError as error:
                self._failed(ref, "load", error)
                return
            if (report.served_version, report.served_hash) != _key(ref):
                self._failed(
                    ref,
                    "load",
                    EngineError(f"the engine serves version {report.served_version} ({report.served_hash})"),
                )
                return
            event("policy_loaded", version=ref.version, artifact_hash=ref.artifact_hash,
                  digest=report.digest and report.digest.model_dump(), seconds=round(report.seconds, 3))  # fmt: skip
            verdict = self._worker.ack(
                ref.version, ref.artifact_hash, digest=report.digest, caches_reset=report.caches_reset
            )
        except CoordinatorError as error:
            if not passes(error):
                raise
            self._later(ref, "coordinator_unreachable", error)
            return
        if verdict.matching:
            self._confirmed.add(_key(ref))
            self._vitals.load_ended("confirmed", time.monotonic() - self._began.pop(_key(ref)))
            self._attempts.pop(_key(ref), None)
            event("policy_confirmed", version=ref.version, artifact_hash=ref.artifact_hash)
        else:
            # A mismatching ack fences this worker altogether: the others have to be confirmed again too.
            self._confirmed.clear()
            self._later(ref, "ack_mismatched", CoordinatorError(f"{verdict.reason}: {verdict.detail}"))

    def _fetched(self, ref: PolicyRef, fetching: Future[Policy]) -> Policy | None:
        """The policy with its verified files; None: not now, and why was said."""
        try:
            return fetching.result()
        except _NotThereYet as error:
            self._later(ref, "artifact_not_there_yet", error)
        except EngineError as error:
            self._failed(ref, "load", error)
        except ArtifactCorrupt as error:
            self._failed(ref, "verify", error)
        except (Refused, OSError) as error:
            self._failed(ref, "download", error)
        return None

    def _fetch(self, ref: PolicyRef) -> Policy:
        view = self._run.policy(ref.version)
        if view.artifact_hash != ref.artifact_hash:
            raise ArtifactCorrupt(f"version {ref.version} has hash {view.artifact_hash}, not {ref.artifact_hash}")
        if view.kind not in self._engine.kinds:
            raise self._cannot_load(view)
        folder = None if view.kind == "base" else self._files(ref, view)
        return Policy(self._run.id, ref.version, ref.artifact_hash, view.kind, folder)

    def _files(self, ref: PolicyRef, view: PolicyView) -> Path:
        if not self._cache.holds(view):
            self._tell(ref, "downloading")
            try:
                self._cache.download(self._run, view)
            except Refused as refused:
                if refused.code == "artifact_file_missing" and view.state == "prepared":
                    # The activation was opened while the upload still runs.
                    raise _NotThereYet(str(refused)) from refused
                raise
        self._tell(ref, "verifying")
        return self._cache.verified(view)

    def _cannot_load(self, view: PolicyView) -> EngineError:
        return EngineError(
            f"version {view.version} is of kind {view.kind}; the engine {self._engine.name} takes "
            f"{' and '.join(self._engine.kinds)}: publish one of these, or have an engine that can load it"
        )

    def _tell(self, ref: PolicyRef, stage: Literal["downloading", "verifying", "loading"]) -> None:
        """For those who watch: the load goes on whether or not they hear it."""
        try:
            self._worker.stage(ref.version, stage, retry_seconds=0.0)
        except CoordinatorError as error:
            event("stage_not_told", level=logging.WARNING, version=ref.version, stage=stage, error=str(error))

    def _failed(self, ref: PolicyRef, stage: Literal["download", "verify", "load"], error: Exception) -> None:
        # The report fences this worker until it confirms a version that it loaded whole: the active one.
        self._confirmed.clear()
        self._later(ref, f"policy_{stage}_failed", error)
        try:
            self._worker.fail(ref.version, stage, str(error))
        except CoordinatorError as unheard:
            if not passes(unheard):
                raise
            event("failure_not_told", level=logging.WARNING, version=ref.version, stage=stage, error=str(unheard))

    def _later(self, ref: PolicyRef, name: str, error: Exception) -> None:
        self._vitals.load_ended(name, time.monotonic() - self._began.pop(_key(ref)))
        count = self._attempts.get(_key(ref), (0, 0.0))[0] + 1
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(count - 1, 10))
        self._attempts[_key(ref)] = (count, time.monotonic() + pause)
        event(
            name,
            level=logging.WARNING,
            version=ref.version,
            attempt=count,
            again_in_seconds=pause,
            error=str(error),
        )


def _in_background(work: Callable[[], Policy], ended: Callable[[], None]) -> Future[Policy]:
    future: Future[Policy] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
            future.set_exception(error)
        ended()

    threading.Thread(target=run, name="artifact", daemon=True).start()  # the process's end does not wait for it
    return future


def _key(ref: PolicyRef) -> Key:
    return ref.version, ref.artifact_hash
