"""One run: its rollouts, rewards, updates, policies, workers and records."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Literal

from coordinator.client.aio.connection import AsyncConnection, Progress, read, read_text
from coordinator.client.aio.pace import run_blocking, sleep
from coordinator.client.aio.policies import described, download, upload
from coordinator.client.aio.updates import AsyncUpdate
from coordinator.client.aio.workers import AsyncWorker
from coordinator.client.artifacts import file_names
from coordinator.client.errors import ArtifactCorrupt, NotActivated, Refused, UnexpectedAnswer
from coordinator.client.slow import Slow
from coordinator.client.waiting import Waiting
from coordinator.wire.arrow_stream import ArrowError
from coordinator.wire.columns import (
    ARROW_MEDIA_TYPE,
    EvidenceColumns,
    RolloutColumns,
    decode_evidence,
    encode_rollouts,
    rollout_columns,
)
from coordinator.wire.diagnosis import Diagnosis
from coordinator.wire.policies import (
    ActivationList,
    ActivationVerdict,
    ActivationView,
    BaseModelIdentity,
    GiveUp,
    OpenActivation,
    PolicyList,
    PolicyRef,
    PolicyView,
    PreparePolicy,
    Watch,
)
from coordinator.wire.problems import ProblemDocument, problem_document
from coordinator.wire.rewinds import (
    Rewind,
    RewindList,
    RewindView,
    Rollback,
    RollbackList,
    RollbackView,
    WithdrawPolicy,
    WithdrawView,
)
from coordinator.wire.rollouts import (
    ArrivalAnswer,
    Audit,
    AuditEntry,
    EvidenceRequest,
    GenerationFailure,
    GenerationFailureBatch,
    Quarantine,
    QuarantineEntry,
    Release,
    ReleaseAnswer,
    Rescore,
    RescoreAnswer,
    RescoredReward,
    Reward,
    RewardAnswer,
    RewardBatch,
    Rollout,
    RolloutDifferences,
    RolloutEvidence,
    RolloutHistory,
    RolloutList,
    RolloutView,
    State,
)
from coordinator.wire.runs import FailureList, FailureView, Journal, JournalEntry, RunCounts, RunView, Stage
from coordinator.wire.statistics import Statistics
from coordinator.wire.timelines import ActivationTimeline
from coordinator.wire.updates import Lineage, LineageUse, LineageUses, UpdateList, UpdateState, UpdateView
from coordinator.wire.workers import FenceWorker, WorkerList, WorkerView

_POLL_SECONDS = 20.0
_LARGEST_PAGE = 1000
_VERIFICATION_POLL_SECONDS = 0.25
_SMALL_ARTIFACT_SECONDS = 60.0


class AsyncRun:
    """One run of a coordinator. Made by `AsyncCoordinator.run` and `AsyncCoordinator.create_run`; asks nothing by
    itself.

    Every method raises `Refused` (or one of its kinds) when the coordinator says no and `Unreachable` when it
    gives no answer; see `coordinator.client.errors`.
    """

    def __init__(self, connection: AsyncConnection, run_id: str, owner: str) -> None:
        self.id = run_id
        self._connection = connection
        self._owner = owner
        self._path = ("runs", run_id)

    # the run itself

    async def view(self) -> RunView:
        """The run as it stands: settings, contract, active version, last commit."""
        return await self._connection.call("GET", self._path, RunView)

    async def counts(self) -> RunCounts:
        """How many rollouts are in each state."""
        return await self._connection.call("GET", (*self._path, "counts"), RunCounts)

    async def watch(self, after: int = 0, wait_seconds: float = 0.0, *, retry_seconds: float | None = None) -> Watch:
        """The active version and its candidate, as soon as the run's event number exceeds `after`, else after
        `wait_seconds` (which the run's `longest_wait_seconds` bounds)."""
        return await self._connection.call(
            "GET",
            (*self._path, "watch"),
            Watch,
            params={"after": after, "wait_seconds": wait_seconds},
            wait_seconds=wait_seconds,
            retry_seconds=retry_seconds,
        )

    async def journal(self, after: int = 0) -> AsyncIterator[JournalEntry]:
        """Every change of the run after event number `after` that is not a rollout's, oldest first."""
        while True:
            page = await self._connection.call("GET", (*self._path, "journal"), Journal, params={"after": after})
            for entry in page.entries:
                yield entry
            if not page.entries:
                return
            after = page.next_after

    async def events(self, after: int | None = None, *, only: Sequence[str] = ()) -> AsyncGenerator[JournalEntry, None]:
        """The journal's entries after number `after` and then each new one as it is recorded, without end.

        Without `after` it begins with what comes once the first one is asked for. `only` names beginnings of event
        names, such as `policy.`. A broken connection is taken up where it was, from the next address, so that every
        entry comes once and in order. Raises `Refused` when the token ends, and `Unreachable` when no replica answers
        within the time for retries; go on then after the last `event_no`.
        """
        params: dict[str, str | int | float] = {"events": ",".join(only)} if only else {}
        path = (*self._path, "events", "stream")
        async with aclosing(self._connection.events(path, after=after, params=params)) as events:
            async for event in events:
                if event.event != "watch":
                    yield read_text(event.data, JournalEntry)

    async def failures(
        self, after: int = 0, stage: Stage | None = None, *, newest_first: bool = False
    ) -> AsyncIterator[FailureView]:
        """Every recorded failure after number `after`, all or those of one stage. Newest first, those before it."""
        params: dict[str, str | int | float] = {"after": after}
        if stage is not None:
            params["stage"] = stage
        if newest_first:
            params["newest_first"] = "true"
        while True:
            page = await self._connection.call("GET", (*self._path, "failures"), FailureList, params=params)
            for failure in page.failures:
                yield failure
            if not page.failures:
                return
            params["after"] = page.next_after

    async def diagnosis(self) -> Diagnosis:
        """Why training is not moving: `blockers` in the order in which to look at them, and how everything stands."""
        return await self._connection.call("GET", (*self._path, "diagnosis"), Diagnosis)

    async def statistics(self, window_seconds: int = 900, buckets: int = 60) -> Statistics:
        """How the run moved over the last `window_seconds` (60 to 86400), cut into so many `buckets` (1 to 240)."""
        params: dict[str, str | int | float] = {"window_seconds": window_seconds, "buckets": buckets}
        return await self._connection.call("GET", (*self._path, "statistics"), Statistics, params=params)

    async def audit(
        self,
        *,
        rollout_id: str | None = None,
        update_id: str | None = None,
        at_from: datetime | None = None,
        at_before: datetime | None = None,
    ) -> AsyncIterator[AuditEntry]:
        """Every change of rollouts in the order of time, all or those of one rollout, update or span of time."""
        params = _given(rollout_id=rollout_id, update_id=update_id, at_from=at_from, at_before=at_before)
        while True:
            page = await self._connection.call("GET", (*self._path, "audit"), Audit, params=params)
            for entry in page.entries:
                yield entry
            if not page.entries:
                return
            params["after"] = page.next_after

    async def rewind(
        self,
        to_commit_no: int,
        reason: str,
        *,
        consumed: Literal["release", "spent"] = "release",
        rewind_id: str | None = None,
        restoring_version: int | None = None,
    ) -> RewindView:
        """Go back to the commit that a restored checkpoint contains; 0: to before the first one.

        Later commits are undone once: what they consumed is released, or stays spent. Where the active version was
        withdrawn, the answer's `restoring` is the version to activate next. A `rewind_id` of the caller's own makes
        a retry after a lost answer find the same rewind.
        """
        body = Rewind(to_commit_no=to_commit_no, consumed=consumed, reason=reason, restoring_version=restoring_version)
        name = f"rewind-{uuid.uuid4().hex}" if rewind_id is None else rewind_id
        return await self._connection.call("PUT", (*self._path, "rewinds", name), RewindView, body=body)

    async def rewinds(self) -> list[RewindView]:
        """All rewinds, oldest first."""
        answer = await self._connection.call("GET", (*self._path, "rewinds"), RewindList)
        return answer.rewinds

    async def roll_back(
        self,
        to_version: int | None,
        reason: str,
        *,
        rollback_id: str | None = None,
        version: int | None = None,
        activation_id: str | None = None,
    ) -> RollbackView:
        """Bring the artifact of an earlier version back under a new number; takes an admin's token.

        None: the version that the active one names as its `rollback_version`, or its nearest durable ancestor.
        Every version that is no ancestor of the restored one is withdrawn. The answer's `restoring` is the version to
        activate; `activation_id` opens its activation at once, in place of any that is open. A `rollback_id` of the
        caller's own makes a retry after a lost answer find the same rollback.
        """
        body = Rollback(to_version=to_version, version=version, reason=reason, activation_id=activation_id)
        name = f"rollback-{uuid.uuid4().hex}" if rollback_id is None else rollback_id
        return await self._connection.call("PUT", (*self._path, "rollbacks", name), RollbackView, body=body)

    async def rollbacks(self) -> list[RollbackView]:
        """All rollbacks, oldest first."""
        answer = await self._connection.call("GET", (*self._path, "rollbacks"), RollbackList)
        return answer.rollbacks

    async def withdraw(self, version: int, reason: str, *, restoring_version: int | None = None) -> WithdrawView:
        """Take a version, and those made from it, out of use; takes an admin's token.

        Where the active version is among them, the answer's `restoring` is the version to activate next.
        """
        body = WithdrawPolicy(reason=reason, restoring_version=restoring_version)
        return await self._connection.call(
            "POST", (*self._path, "policies", str(version), "withdraw"), WithdrawView, body=body
        )

    # rollouts and rewards

    async def submit(self, rollouts: Sequence[Rollout] | RolloutColumns) -> ArrivalAnswer:
        """Hand in rollouts, up to 4096 in one call; each has a verdict of its own, in the order sent.

        Sending the same again is answered `duplicate` and changes nothing.
        """
        return await self.submit_stream(await run_blocking(_encoded, rollouts))

    async def submit_stream(self, stream: bytes, *, retry_seconds: float | None = None) -> ArrivalAnswer:
        """`submit` for an Arrow IPC stream that is encoded already, as `coordinator.wire.columns` has it."""
        received = await self._connection.send(
            "POST",
            (*self._path, "rollouts"),
            content=lambda: stream,
            content_type=ARROW_MEDIA_TYPE,
            retry_seconds=retry_seconds,
        )
        return read(received, ArrivalAnswer)

    async def reward(self, rewards: Sequence[Reward]) -> RewardAnswer:
        """Hand in rewards, up to 4096 in one call. A timeout or an error is a reward without a value, never
        0.0."""
        return await self._connection.call(
            "POST", (*self._path, "rewards"), RewardAnswer, body=RewardBatch(rewards=list(rewards))
        )

    async def rescore(
        self, group_id: str, ruleset_id: str, ruleset_hash: str, rewards: Sequence[RescoredReward]
    ) -> RescoreAnswer:
        """Replace the rewards of a whole group that no update holds; names every rewarded member."""
        body = Rescore(group_id=group_id, ruleset_id=ruleset_id, ruleset_hash=ruleset_hash, rewards=list(rewards))
        return await self._connection.call("POST", (*self._path, "rewards", "rescore"), RescoreAnswer, body=body)

    async def report_generation_failures(self, failures: Sequence[GenerationFailure]) -> ArrivalAnswer:
        """Report attempts that gave no tokens, up to 4096 in one call; each has a verdict of its own."""
        body = GenerationFailureBatch(failures=list(failures))
        return await self._connection.call("POST", (*self._path, "rollouts", "failures"), ArrivalAnswer, body=body)

    async def quarantine(self, limit: int = 100) -> list[QuarantineEntry]:
        """What is in quarantine, counted by reason and by the update that put it there: the `limit` latest entries."""
        answer = await self._connection.call("GET", (*self._path, "quarantine"), Quarantine, params={"limit": limit})
        return answer.entries

    async def release(self, rollout_ids: Sequence[str]) -> ReleaseAnswer:
        """Release rollouts from quarantine; what the arrival checks still refuse stays."""
        body = Release(rollout_ids=list(rollout_ids))
        return await self._connection.call("POST", (*self._path, "rollouts", "release"), ReleaseAnswer, body=body)

    async def release_quarantined_by(self, update_id: str, reason: str) -> ReleaseAnswer:
        """Release all that one update quarantined for one reason."""
        body = Release(update_id=update_id, reason=reason)
        return await self._connection.call("POST", (*self._path, "rollouts", "release"), ReleaseAnswer, body=body)

    async def rollouts(
        self,
        state: State | None = None,
        group_id: str | None = None,
        *,
        version: int | None = None,
        task_source: str | None = None,
        worker_id: str | None = None,
        reason: str | None = None,
        arrived_from: datetime | None = None,
        arrived_before: datetime | None = None,
        after: str | None = None,
    ) -> AsyncIterator[RolloutView]:
        """Rollouts by id, those that meet every filter that is given; with `after` those beyond that id."""
        params = _given(
            state=state,
            group_id=group_id,
            version=version,
            task_source=task_source,
            worker_id=worker_id,
            reason=reason,
            arrived_from=arrived_from,
            arrived_before=arrived_before,
            after=after,
        )
        while True:
            page = await self._connection.call("GET", (*self._path, "rollouts"), RolloutList, params=params)
            for rollout in page.rollouts:
                yield rollout
            if page.next_after is None:
                return
            params["after"] = page.next_after

    async def rollout(self, rollout_id: str) -> RolloutView:
        """One rollout as it stands, without its tokens."""
        return await self._connection.call("GET", (*self._path, "rollouts", rollout_id), RolloutView)

    async def history(self, rollout_id: str) -> RolloutHistory:
        """Every change of a rollout's state, oldest first."""
        return await self._connection.call("GET", (*self._path, "rollouts", rollout_id, "history"), RolloutHistory)

    async def evidence(self, rollout_id: str) -> RolloutEvidence:
        """The tokens, mask and log-probs of a rollout."""
        return await self._connection.call("GET", (*self._path, "rollouts", rollout_id, "evidence"), RolloutEvidence)

    async def differences(self, rollout_id: str) -> RolloutDifferences:
        """By how much the log-prob of each token differed, for every update that measured the rollout.

        `measured[i].differences[k]` is d = log pi_current - log pi_behaviour of token k, None where it is masked.
        """
        return await self._connection.call(
            "GET", (*self._path, "rollouts", rollout_id, "differences"), RolloutDifferences
        )

    async def evidence_of(self, rollout_ids: Sequence[str]) -> EvidenceColumns:
        """The tokens of many rollouts, up to 4096, as columns; `missing` names those that have none here.

        `columns.token_ids[i]` is int64, `action_mask[i]` bool and `behavior_log_probs[i]` float32, all of shape
        [tokens], for `columns.rollout_id[i]`.
        """
        content = EvidenceRequest(rollout_ids=list(rollout_ids)).request_body()
        received = await self._connection.send(
            "POST", (*self._path, "rollouts", "evidence"), content=lambda: content, accept=ARROW_MEDIA_TYPE
        )
        try:
            return await run_blocking(decode_evidence, received.content)
        except ArrowError as fault:
            raise UnexpectedAnswer(f"evidence did not answer a readable Arrow stream: {fault}") from fault

    # updates

    def update(self, update_id: str | None = None, policy: PolicyRef | None = None) -> AsyncUpdate:
        """One training step, to be entered with `async with`.

        `policy` is the newest version that the learner's weights come from: left out, the active one. An
        update id of the caller's own makes a retry after a lost answer find the same update, and so does a
        restarted process that is the same owner (`AsyncCoordinator(owner=...)`); left out, a random one.
        """
        return AsyncUpdate(
            self._connection,
            self.id,
            f"update-{uuid.uuid4().hex}" if update_id is None else update_id,
            self._owner,
            policy,
        )

    async def updates(
        self, state: UpdateState | None = None, *, newest_first: bool = False, limit: int | None = None
    ) -> list[UpdateView]:
        """All updates in the order of their opening, or the `limit` first of them; those in one state, if it is
        given."""
        params = _given(state=state)
        if newest_first:
            params["newest_first"] = "true"
        updates: list[UpdateView] = []
        while limit is None or len(updates) < limit:
            if limit is not None:
                params["limit"] = min(limit - len(updates), _LARGEST_PAGE)
            page = await self._connection.call("GET", (*self._path, "updates"), UpdateList, params=params)
            updates += page.updates
            if page.next_after is None:
                break
            params["after"] = page.next_after
        return updates

    async def update_view(self, update_id: str) -> UpdateView:
        """An update's state, and its commit number once it is committed."""
        return await self._connection.call("GET", (*self._path, "updates", update_id), UpdateView)

    async def lineage(self, update_id: str) -> Lineage:
        """What an update consumed and refused, the policies that made it, and the versions it led to."""
        return await self._connection.call("GET", (*self._path, "updates", update_id, "lineage"), Lineage)

    async def uses_of_version(self, version: int) -> list[LineageUse]:
        """The updates that bound rollouts with tokens of this policy version, oldest first."""
        params: dict[str, str | int | float] = {"version": version}
        answer = await self._connection.call("GET", (*self._path, "lineage"), LineageUses, params=params)
        return answer.uses

    async def uses_of_ruleset(self, ruleset_id: str, ruleset_hash: str | None = None) -> list[LineageUse]:
        """The updates that bound rollouts with rewards of this ruleset, oldest first."""
        params = _given(ruleset_id=ruleset_id, ruleset_hash=ruleset_hash)
        answer = await self._connection.call("GET", (*self._path, "lineage"), LineageUses, params=params)
        return answer.uses

    # policies

    async def policies(self) -> list[PolicyView]:
        """All policy versions, lowest number first."""
        answer = await self._connection.call("GET", (*self._path, "policies"), PolicyList)
        return answer.policies

    async def policy(self, version: int) -> PolicyView:
        """One policy version with its manifest."""
        return await self._connection.call("GET", (*self._path, "policies", str(version)), PolicyView)

    async def publish(
        self,
        *,
        version: int,
        parent_version: int | None,
        folder: str | Path,
        base_model: BaseModelIdentity,
        rollback_version: int | None = None,
        updates: Sequence[str] = (),
        kind: str = "lora",
        digests: Mapping[str, str] | None = None,
        uri: str | None = None,
        progress: Progress | None = None,
    ) -> PolicyView:
        """Make the files below `folder` policy `version`: hash, prepare, upload and commit them, and wait until the
        coordinator has verified them.

        `updates` names the committed updates that made it, `parent_version` the version they began from (None: it
        begins a line of its own), `rollback_version` the one to go back to should it go bad. Bytes that the coordinator
        has are not sent again, and an upload that was broken off goes on where it was. `progress` is called with a
        file's name, the bytes of it that are over so far and its size; what takes more than two seconds is logged, too.
        With `uri` nothing is uploaded: the same files lie there, where coordinator and workers read them, and the
        coordinator's COORDINATOR_ARTIFACT_URIS must allow it.

        `digests` states, by the layout of an engine's weights, what the engine must report once it holds them.
        Safe to repeat after a crash: the same content is a success. Raises ValueError for a folder that is no
        artifact, and `Refused` with `artifact_incomplete` where files are missing or changed.
        """
        folder = Path(folder)
        files = await described(folder, await run_blocking(file_names, folder))
        body = PreparePolicy.model_validate(
            {
                "version": version,
                "parent_version": parent_version,
                "rollback_version": rollback_version,
                "updates": tuple(updates),
                "kind": kind,
                "base_model": base_model,
                "files": files,
                "digests": dict(digests or {}),
                "uri": uri,
            }
        )
        view = await self._connection.call("POST", (*self._path, "policies"), PolicyView, body=body)
        if view.state != "prepared":
            return view
        try:
            return await self._commit_files(body, folder, progress)
        except Refused as refused:
            if refused.code != "artifact_incomplete" or uri is not None:
                raise
        # What was damaged at the coordinator is taken out there when it is found: it can be sent again.
        return await self._commit_files(body, folder, progress)

    async def _commit_files(self, body: PreparePolicy, folder: Path, progress: Progress | None) -> PolicyView:
        if body.uri is None:
            for file in body.files:
                await upload(self._connection, self.id, body.version, folder, file, progress)
        path = (*self._path, "policies", str(body.version), "commit")
        total = sum(file.size for file in body.files)
        # Small ones are read in the call.
        view = await self._connection.call("POST", path, PolicyView, wait_seconds=_SMALL_ARTIFACT_SECONDS)
        slow = Slow(f"version {body.version} is verified", total)
        while view.state == "prepared" and view.verification is not None and view.verification.state == "running":
            slow.at(view.verification.bytes_done)
            await sleep(_VERIFICATION_POLL_SECONDS)
            view = await self.policy(body.version)
        if view.state == "prepared":
            faulty = () if view.verification is None else view.verification.faulty
            document = problem_document(
                "artifact_incomplete", f"missing or changed: {', '.join(faulty)}", files=list(faulty)
            )
            raise Refused(ProblemDocument.model_validate(document))
        return view

    async def announce_stream(
        self,
        *,
        version: int,
        parent_version: int | None,
        artifact_hash: str,
        base_model: BaseModelIdentity,
        updates: Sequence[str] = (),
        digests: Mapping[str, str] | None = None,
    ) -> PolicyView:
        """Make weights that are pushed to the engines policy `version`, which leaves no files.

        `artifact_hash` is `coordinator.rules.manifest.stream_hash` of its tensors. Nothing can be rolled back to it,
        and a worker that restarts waits for the next version.
        """
        body = PreparePolicy(
            version=version,
            parent_version=parent_version,
            updates=tuple(updates),
            kind="stream",
            base_model=base_model,
            artifact_hash=artifact_hash,
            digests=dict(digests or {}),
        )
        view = await self._connection.call("POST", (*self._path, "policies"), PolicyView, body=body)
        if view.state != "prepared":
            return view
        return await self._connection.call("POST", (*self._path, "policies", str(version), "commit"), PolicyView)

    async def download(
        self,
        version: int,
        folder: str | Path,
        *,
        artifact_hash: str | None = None,
        progress: Progress | None = None,
    ) -> PolicyView:
        """Fetch the files of a version into `folder`, a path that must not exist yet; its parents are made.

        Size and sha256 of every file, while it arrives, and the artifact's hash are checked; the folder appears whole
        or not at all. A file that breaks off goes on where it was. Files that lie at a URI are read there. Raises
        FileExistsError where the folder exists, and `ArtifactCorrupt`, naming the file, for other bytes, also when the
        version's hash is not the `artifact_hash` that was asked for.
        """
        view = await self.policy(version)
        if artifact_hash is not None and view.artifact_hash != artifact_hash:
            raise ArtifactCorrupt(f"version {version} has hash {view.artifact_hash}, not {artifact_hash}")
        await download(self._connection, self.id, view, Path(folder), progress)
        return view

    # activations

    async def activate(
        self,
        version: int,
        activation_id: str | None = None,
        wait_seconds: float | None = None,
        *,
        supersede: bool = False,
        progress: Callable[[ActivationView], None] | None = None,
    ) -> ActivationView:
        """Have every required worker confirm `version`, and wait until it is active.

        While the activation of an older version is open this one waits for its turn; `supersede` ends that one.

        Without an id, an activation of this version that still runs or succeeded is taken up, else a new
        one opened. Waits for the end, at the latest the run's `activation_deadline_seconds`, or for
        `wait_seconds`; what it waits for is logged meanwhile (logger `coordinator.client`, INFO), and `progress` is
        called with the activation at first and whenever it may have changed. Raises
        `NotActivated`, which says the same, when it failed, was given up or superseded, or did not end in time.
        """
        if activation_id is None:
            running = [
                activation.activation_id
                for activation in await self.activations()
                if activation.version == version and activation.state in ("waiting", "open", "succeeded")
            ]
            activation_id = running[-1] if running else f"activate-{version}-{uuid.uuid4().hex[:12]}"
        view = await self.view()
        by_hand = view.settings.activation == "by_hand"
        until = None if wait_seconds is None else time.monotonic() + wait_seconds
        activation = await self.open_activation(version, activation_id, supersede=supersede)
        waiting = Waiting(time.monotonic())
        seen = 0
        while activation.state in ("waiting", "open"):
            # The event number is read before the state, so that no change between the two is slept through.
            now = time.monotonic()
            if until is not None and now >= until:
                raise NotActivated(activation)
            waiting.look(activation, now)
            if progress is not None:
                progress(activation)
            watch = await self.watch(seen, min(_POLL_SECONDS, waiting.next_at - now, (until or math.inf) - now))
            seen = watch.event_no
            if (
                by_hand
                and activation.state == "open"
                and all(worker.ack == "matching" for worker in activation.required)
            ):
                await self.switch(version)
            activation = await self.activation(activation_id)
        if activation.state != "succeeded":
            raise NotActivated(activation)
        return activation

    async def open_activation(
        self,
        version: int,
        activation_id: str,
        required_workers: Sequence[str] | None = None,
        *,
        supersede: bool = False,
    ) -> ActivationView:
        """Freeze the workers that must confirm `version`, and return at once. The same id again is a
        success. While another activation is open it waits, unless it is to `supersede` that one."""
        body = OpenActivation(
            activation_id=activation_id,
            required_workers=None if required_workers is None else tuple(required_workers),
            supersede=supersede,
        )
        path = (*self._path, "policies", str(version), "activations")
        return await self._connection.call("POST", path, ActivationView, body=body)

    async def switch(self, version: int) -> ActivationVerdict:
        """Make the switch by hand, if it may be made; the verdict says what holds it back."""
        return await self._connection.call(
            "POST", (*self._path, "policies", str(version), "activate"), ActivationVerdict
        )

    async def activation(self, activation_id: str) -> ActivationView:
        """One activation with what each required worker said."""
        return await self._connection.call("GET", (*self._path, "activations", activation_id), ActivationView)

    async def activations(self) -> list[ActivationView]:
        """All activations, oldest first."""
        answer = await self._connection.call("GET", (*self._path, "activations"), ActivationList)
        return answer.activations

    async def activation_timeline(self, activation_id: str) -> ActivationTimeline:
        """How an activation went, step by step and worker by worker. `print` it for a table."""
        return await self._connection.call(
            "GET", (*self._path, "activations", activation_id, "timeline"), ActivationTimeline
        )

    async def give_up(self, activation_id: str, reason: str) -> ActivationView:
        """End an activation; its version is abandoned."""
        return await self._connection.call(
            "POST",
            (*self._path, "activations", activation_id, "give-up"),
            ActivationView,
            body=GiveUp(reason=reason),
        )

    # workers

    def worker(self, worker_id: str, incarnation: str) -> AsyncWorker:
        """A worker as this process: `incarnation` is one life of it, chosen anew at each start."""
        return AsyncWorker(self._connection, self.id, worker_id, incarnation)

    async def workers(self) -> list[WorkerView]:
        """All workers, by id."""
        answer = await self._connection.call("GET", (*self._path, "workers"), WorkerList)
        return answer.workers

    async def fence(self, worker_id: str, reason: str) -> WorkerView:
        """Take a worker out until it loads and acks a version whole."""
        return await self._connection.call(
            "POST", (*self._path, "workers", worker_id, "fence"), WorkerView, body=FenceWorker(reason=reason)
        )


def _encoded(rollouts: Sequence[Rollout] | RolloutColumns) -> bytes:
    return encode_rollouts(rollouts if isinstance(rollouts, RolloutColumns) else rollout_columns(rollouts))


def _given(**values: str | int | datetime | None) -> dict[str, str | int | float]:
    """The parameters that are there, times as RFC 3339 has them."""
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in values.items()
        if value is not None
    }
