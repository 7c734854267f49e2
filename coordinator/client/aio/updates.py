"""An update as a trainer runs it: open, candidates, reserve, commit, with the lease renewed meanwhile."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

import numpy as np
import numpy.typing as npt

from coordinator.client.aio.connection import AsyncConnection, read
from coordinator.client.aio.pace import Renewal, run_blocking, to_the_end
from coordinator.client.errors import CoordinatorError, Refused, UnexpectedAnswer
from coordinator.client.rollouts import TAKEN, Candidates, Reserved, candidates
from coordinator.wire.columns import (
    ARROW_MEDIA_TYPE,
    ArrowError,
    CandidateColumns,
    ReserveColumns,
    decode_candidates,
    encode_reserve,
    ragged,
)
from coordinator.wire.policies import PolicyRef
from coordinator.wire.updates import (
    AbortUpdate,
    CandidatesRequest,
    CommitUpdate,
    Discard,
    OpenUpdate,
    Renew,
    ReserveAnswer,
    UpdateView,
)

# One long poll; longer waits are several, so that a dead connection is noticed and proxies do not cut in.
_POLL_SECONDS = 30.0
# While an exception is on its way out the abort may not hold it up; the lease ends the update in any case.
_LAST_WORD_SECONDS = 5.0

_log = logging.getLogger("coordinator.client")


class AsyncUpdate:
    """One update, as a context manager made by `AsyncRun.update`. Entering opens it; see the package's example.

    A background task renews the lease at a third of its length. When the coordinator says that the lease
    is lost, the next call raises `LeaseExpired` or `UpdateFenced`: the step is to be discarded. An
    exception in the block aborts the update with it as the reason and goes on; leaving without a commit
    aborts too.

    The renewal needs the event loop: it goes on while the block awaits, and code that blocks the event loop
    for longer than two thirds of the lease loses it. Put such work, as a forward pass or an optimizer step,
    into `asyncio.to_thread`. A cancellation aborts the update as an exception does and is raised again; no
    task is left on the event loop.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        run_id: str,
        update_id: str,
        owner: str,
        policy: PolicyRef | None,
    ) -> None:
        self.id = update_id
        self.owner = owner
        self._policy = policy
        self._connection = connection
        self._path = ("runs", run_id, "updates", update_id)
        self._lease_seconds = 0.0
        self._view: UpdateView | None = None
        self._after_commit_no: int | None = None
        self._lost: Refused | None = None
        self._renewal: Renewal | None = None
        self._ended = False

    @property
    def policy(self) -> PolicyRef:
        """The version that it was opened for. RuntimeError before it was opened for the active one."""
        if self._policy is None:
            raise RuntimeError(f"update {self.id} is not open: use it as 'async with run.update() as update'")
        return self._policy

    @property
    def view(self) -> UpdateView:
        """The update as the coordinator last described it. RuntimeError before it was opened."""
        if self._view is None:
            raise RuntimeError(f"update {self.id} is not open: use it as 'async with run.update() as update'")
        return self._view

    async def __aenter__(self) -> AsyncUpdate:
        if self._view is not None:
            raise RuntimeError(f"update {self.id} was entered before: make another with run.update()")
        body = OpenUpdate(
            owner=self.owner,
            policy_version=None if self._policy is None else self._policy.version,
            artifact_hash=None if self._policy is None else self._policy.artifact_hash,
        )
        async with self._aborted_when_cut_off():
            self._view = await self._connection.call("PUT", self._path, UpdateView, body=body)
        self._policy = PolicyRef(version=self._view.policy_version, artifact_hash=self._view.artifact_hash)
        self._lease_seconds = self._view.lease_seconds
        self._after_commit_no = self._view.after_commit_no  # of a reservation before a restart
        if self._view.state == "open":
            self._renewal = Renewal(self._renew, self._lease_seconds / 3, f"renew {self.id}")
        else:  # the same id again, after its end: its outcome is in the view
            self._ended = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        try:
            if error is not None:
                await self._last_word(error)
                return
            async with self._aborted_when_cut_off():
                await self.abort("left without commit")
        finally:
            await self._end()

    async def candidates(
        self, groups: int | None = None, wait_seconds: float = 0.0, *, rollouts: int | None = None
    ) -> Candidates:
        """Up to `groups` whole groups, held for this update; waits up to `wait_seconds` for that many.

        `rollouts`, in place of groups: whole groups until this many rollouts are reached. Asking again returns what
        is held already first. An empty answer says why in `empty`.
        """
        columns = await self._ask(CandidatesRequest(owner=self.owner, groups=groups, rollouts=rollouts), wait_seconds)
        return await run_blocking(candidates, columns)

    async def take(
        self,
        groups: int | None = None,
        wait_seconds: float = 0.0,
        *,
        rollouts: int | None = None,
        after_commit_no: int | None = None,
    ) -> Candidates:
        """`candidates` and `reserve` in one call, for runs whose drift gate is off: what it answers is bound.

        What the update holds already comes first and counts, so that the call may be repeated. `after_commit_no` is
        as for `reserve`.
        """
        self._after_commit_no = self.view.last_commit_no if after_commit_no is None else after_commit_no
        body = CandidatesRequest(
            owner=self.owner, groups=groups, rollouts=rollouts, reserve=True, after_commit_no=self._after_commit_no
        )
        columns = await self._ask(body, wait_seconds)
        offered = await run_blocking(candidates, columns)
        bound = [verdict.verdict in TAKEN for verdict in columns.reserved or ()]
        taken = tuple(trajectory for trajectory, held in zip(offered, bound, strict=True) if held)
        return Candidates(taken, offered.empty, offered.contract_hash)

    async def _ask(self, asked: CandidatesRequest, wait_seconds: float) -> CandidateColumns:
        until = time.monotonic() + wait_seconds
        while True:
            self._check()
            wait = max(0.0, min(until - time.monotonic(), _POLL_SECONDS))
            content = asked.model_copy(update={"wait_seconds": wait}).request_body()
            received = await self._connection.send(
                "POST",
                (*self._path, "candidates"),
                content=functools.partial(bytes, content),
                accept=ARROW_MEDIA_TYPE,
                wait_seconds=wait,
            )
            try:
                columns = await run_blocking(decode_candidates, received.content)
            except ArrowError as fault:
                raise UnexpectedAnswer(f"candidates did not answer a readable Arrow stream: {fault}") from fault
            enough = len(columns) >= asked.rollouts if asked.rollouts else len(columns.groups) >= (asked.groups or 0)
            if enough or time.monotonic() >= until:
                return columns

    async def reserve(
        self,
        candidates: Candidates,
        current_log_probs: Sequence[npt.ArrayLike] | None,
        *,
        after_commit_no: int | None = None,
        use: Sequence[str | None] | None = None,
        confirm_drift: bool = False,
    ) -> Reserved:
        """Bind candidates to this update, after the forward pass and before the first optimizer step.

        `current_log_probs[i]` has the shape [tokens] of `candidates[i].token_ids` and scores the same
        tokens with the weights that the learner now holds; masked positions may hold anything. None is for
        runs whose drift gate is off. `after_commit_no` is the last commit that the weights contain: left
        out, the run's last at the time this update was opened; name it when the weights may be older than
        that, as after a restored checkpoint, or newer, as when this update was opened while another still
        stepped. `use` labels each trajectory for lineage. `confirm_drift` says that the log-probs were
        checked after a `DriftSuspect`.

        Raises ValueError where there are no candidates or the log-probs do not match them, `LineConflict`,
        `DriftSuspect`.
        """
        self._check()
        if not candidates:
            raise ValueError(f"there are no candidates to reserve: {candidates.empty or 'none were given'}")
        rows = await run_blocking(_rows, candidates, current_log_probs)
        if use is not None and len(use) != len(candidates):
            raise ValueError(f"{len(use)} labels for {len(candidates)} candidates")
        self._after_commit_no = self.view.last_commit_no if after_commit_no is None else after_commit_no
        content = await run_blocking(_encoded, self.owner, self._after_commit_no, confirm_drift, candidates, rows, use)
        received = await self._connection.send(
            "POST", (*self._path, "reserve"), content=lambda: content, content_type=ARROW_MEDIA_TYPE
        )
        answer = read(received, ReserveAnswer)
        taken = [i for i, verdict in enumerate(answer.verdicts) if verdict.verdict in TAKEN]
        return Reserved(
            verdicts=tuple(answer.verdicts),
            admitted=Candidates(tuple(candidates[i] for i in taken), contract_hash=candidates.contract_hash),
            current_log_probs=None if rows is None else [rows[i] for i in taken],
            groups={verdict.group_id: verdict for verdict in answer.groups},
        )

    async def commit(self, discards: Sequence[Discard] = ()) -> UpdateView:
        """Consume what the update holds, after its last optimizer step and before the new version is
        prepared.

        `discards` names reserved rollouts that were not trained on. The answer's `commit_no` belongs into
        the checkpoint. Raises `LeaseExpired`, `UpdateFenced` or `LineConflict`: nothing was consumed,
        discard the step.
        """
        self._check()
        after = self.view.last_commit_no if self._after_commit_no is None else self._after_commit_no
        body = CommitUpdate(owner=self.owner, after_commit_no=after, discards=list(discards))
        self._view = await self._connection.call("POST", (*self._path, "commit"), UpdateView, body=body)
        await self._end()
        return self._view

    async def abort(self, reason: str, quarantine: bool = False) -> UpdateView:
        """Give everything back (or quarantine it) and end the update."""
        self._check()
        return await self._abort(reason, quarantine, None)

    async def _abort(self, reason: str, quarantine: bool, bound_seconds: float | None) -> UpdateView:
        body = AbortUpdate(owner=self.owner, reason=reason, quarantine=quarantine)
        self._view = await self._connection.call(
            "POST",
            (*self._path, "abort"),
            UpdateView,
            body=body,
            timeout_seconds=bound_seconds,
            retry_seconds=bound_seconds,
        )
        await self._end()
        return self._view

    async def _last_word(self, error: BaseException) -> None:
        """Abort with `error`, which is on its way out, as the reason; add a note to it where that fails."""
        reason = ": ".join(filter(None, (type(error).__name__, str(error))))[:500]
        try:
            await to_the_end(self._abort, reason, False, _LAST_WORD_SECONDS)
        except CoordinatorError as second:
            error.add_note(f"Update {self.id} could not be aborted either, its lease will end it: {second}")

    @asynccontextmanager
    async def _aborted_when_cut_off(self) -> AsyncIterator[None]:
        """Around a call that Ctrl-C or a cancellation may cut off: nobody knows then whether it took effect."""
        try:
            yield
        except Exception:
            raise
        except BaseException as cut:
            await self._last_word(cut)
            raise

    async def _end(self) -> None:
        self._ended = True
        if self._renewal is not None:
            await self._renewal.stop()

    def _check(self) -> None:
        if self.view.state != "open":
            raise RuntimeError(f"update {self.id} has ended: it is {self.view.state}")
        if self._lost is not None:
            raise self._lost

    async def _renew(self) -> bool:
        """Renew once; False when that is over. Only the coordinator decides that a lease is lost, never this
        side's clock."""
        try:
            await self._connection.call(
                "POST",
                (*self._path, "renew"),
                UpdateView,
                body=Renew(owner=self.owner),
                retry_seconds=self._lease_seconds / 6,
            )
        except CoordinatorError as error:
            if self._ended:
                return False
            if isinstance(error, Refused) and error.status in (404, 409):
                _log.error("update %s: the lease is lost: %s", self.id, error)
                self._lost = error
                return False
            _log.warning("update %s: the lease could not be renewed yet: %s", self.id, error)
        except RuntimeError:
            if not self._connection.closed:
                raise
            _log.warning("update %s: its coordinator was closed before it ended: the lease runs out", self.id)
            return False
        return True


def _rows(
    candidates: Candidates, current_log_probs: Sequence[npt.ArrayLike] | None
) -> list[npt.NDArray[np.float64]] | None:
    """Current log-probs as float64, checked against the shapes of the candidates."""
    if current_log_probs is None:
        return None
    rows = [np.asarray(row, dtype=np.float64) for row in current_log_probs]
    if len(rows) != len(candidates):
        raise ValueError(f"current log-probs of {len(rows)} rollouts for {len(candidates)} candidates")
    for trajectory, row in zip(candidates, rows, strict=True):
        if row.shape != trajectory.token_ids.shape:
            raise ValueError(
                f"current log-probs of {trajectory.rollout_id} have shape {row.shape}, "
                f"its token_ids {trajectory.token_ids.shape}"
            )
    return rows


def _encoded(
    owner: str,
    after_commit_no: int,
    confirm_drift: bool,
    candidates: Candidates,
    rows: list[npt.NDArray[np.float64]] | None,
    use: Sequence[str | None] | None,
) -> bytes:
    return encode_reserve(
        ReserveColumns(
            owner=owner,
            after_commit_no=after_commit_no,
            confirm_drift=confirm_drift,
            rollout_id=[trajectory.rollout_id for trajectory in candidates],
            revision=[trajectory.revision for trajectory in candidates],
            use=list(use) if use is not None else [None] * len(candidates),
            given=[rows is not None] * len(candidates),
            current_log_probs=ragged(rows if rows is not None else [()] * len(candidates), np.float64),
        )
    )
