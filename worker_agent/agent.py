"""The agent's loop: register, load and confirm what the coordinator names, generate, submit, leave in good
order.

Three things run beside the loop, none of them on the engine's thread: heartbeats and the watch
(`listening`), and the sending of what was generated (`spool`). The engine is used by the thread that calls
`Agent.run` alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from coordinator.client import CoordinatorError, Run, Unreachable
from coordinator.wire.policies import Watch
from coordinator.wire.rollouts import GenerationFailure
from coordinator.wire.runs import RunView
from worker_agent.artifacts import ArtifactCache
from worker_agent.contract import check_contract, generation_contract, run_sampling
from worker_agent.engines.engine import Engine, EngineError, Policy
from worker_agent.groups import Ended, Groups, Origin
from worker_agent.listening import Listener
from worker_agent.logs import event
from worker_agent.models import ModelIdentity
from worker_agent.passing import away, passes
from worker_agent.serving import Serving
from worker_agent.settings import WorkerSettings
from worker_agent.spool import Sender, Spool
from worker_agent.status.vitals import Vitals
from worker_agent.tasks import Task, TaskQueue

_IDLE_SECONDS = 0.5
_TURN_SECONDS = 0.2  # how long the engine works between two looks at everything else
_TICKET_PAUSE_SECONDS = 1.0
_TAKEN_PAUSE_SECONDS = 10.0
_FAREWELL_SECONDS = 60.0
_DISK_PAUSE_SECONDS = 1.0
_ENGINE_FAULTS_IN_A_ROW = 3


class AgentError(Exception):
    """The agent cannot go on; the message says why and what to do."""


class Agent:
    """One worker of one run around one engine.

    `run` calls with the worker's token, `model` identifies the folder that the engine was started on.
    Rollout ids are `group:sample.attempt` and seeds come from the group, so work done twice after a crash
    is recognised as such.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        model: ModelIdentity,
        settings: WorkerSettings,
        tasks: Iterable[Task],
        vitals: Vitals | None = None,
    ) -> None:
        self.incarnation = f"{settings.worker_id}-{uuid.uuid4().hex}"
        self._run = run
        self._engine = engine
        self._model = model
        self._settings = settings
        self._tasks = tasks
        self._worker = run.worker(settings.worker_id, self.incarnation)
        self._vitals = vitals or Vitals()
        self._listener = Listener(run, self._worker, self._vitals)
        self._engine_in_use = threading.RLock()
        self._stopping = threading.Event()
        self._engine_faults = 0
        self._groups: Groups | None = None
        self._group_size = 1
        self._tickets_after = 0.0
        self._looked_at = -1
        self._unkept: list[Ended] = []
        """What has ended and is not on disk, which was full."""
        self._keep_after = 0.0
        self._disk_full = False

    def stop(self) -> None:
        """Finish what is being generated, hand it in and leave. May be called by a signal handler."""
        self._stopping.set()
        self._vitals.leaving = True

    def asleep(self, seconds: float) -> None:
        """The engine is to give its GPU away for so long: nothing is loaded or generated, and no ticket is taken.

        Returns when the engine has released its memory; the coordinator is told at once, and hears it with every
        heartbeat. After that time the engine takes its memory back by itself: be done by then, or call again. Raises
        ValueError for what is not above 0 and at most a day, and `EngineError` if the engine does not release.
        """
        self._listener.asleep(seconds)
        event("asleep", seconds=seconds)
        with self._using_engine():
            if self._groups is not None:
                self._groups.quiet()
            self._engine.release()

    def awake(self) -> None:
        """The engine takes its GPU back, before the time that `asleep` named. Raises `EngineError` if it cannot."""
        with self._using_engine():
            self._engine.resume()
        self._listener.awake()
        event("awake")

    def run(self) -> None:
        """Work until the tasks end or `stop` is called; what could not be handed in stays in the spool.

        Raises `ContractMismatch` if this worker does not fit the run, `AgentError`, `TaskError`, and
        `Refused` when the coordinator will not have this process any more, as after another one registered
        as the same worker.
        """
        folder = self._settings.folder(self._run.id)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / "lock", timeout=0):
                self._run_in(folder)
        except Timeout as error:
            raise AgentError(
                f"another process works as {self._settings.worker_id} with {folder}: stop it, or choose "
                f"another worker id"
            ) from error

    def _run_in(self, folder: Path) -> None:
        begun = self._begin()
        if begun is None:
            return
        view, origin, heartbeat_seconds = begun
        spool = Spool(folder, self._vitals)
        sender = Sender(spool, self._run)
        finished = _Finished(folder / "finished.log")
        finished.add(spool.groups())  # a crash may have come between the one and the other
        tasks = TaskQueue(
            _once(self._tasks, finished),
            ahead=2 * self._settings.groups_at_once,
        )
        listener = self._listener
        groups = self._groups = Groups(self._engine, origin, self._settings.across_versions)
        cache = ArtifactCache(folder / "artifacts")
        serving = Serving(self._run, self._worker, self._engine, cache, groups.quiet, listener.wake, self._vitals)
        listener.start(heartbeat_seconds, view.settings.longest_wait_seconds)
        sender.start()
        try:
            while True:
                watch = listener.newest()
                policy = None
                if watch is not None:
                    with self._using_engine():
                        policy = self._ready(serving, groups, watch)
                self._vitals.turned(policy and policy.version)
                if self._stopping.is_set():
                    if policy is None or not groups:  # what cannot go on now the next life makes anew
                        break
                elif watch is not None and policy is not None and not self._disk_full:
                    if tasks.ended and not groups and not self._unkept:
                        event("tasks_ended")
                        break
                    self._start_groups(policy, watch, serving, groups, tasks, finished)
                self._vitals.groups_in_flight = len(groups)
                with self._using_engine():
                    ended = groups.ended(_TURN_SECONDS)
                self._unkept += ended
                self._hand_in(groups, spool, sender, finished)
                if not groups.in_flight and not ended:
                    listener.wait(-1 if watch is None else watch.event_no, _IDLE_SECONDS)
            self._keep(spool, sender, finished)  # the last try: what a full disk does not take is made again
            self._leave(sender)
        finally:
            listener.stop()
            sender.finish(0.0)

    @contextlib.contextmanager
    def _using_engine(self) -> Iterator[None]:
        with self._engine_in_use, self._vitals.in_engine():
            yield

    def _ready(self, serving: Serving, groups: Groups, watch: Watch) -> Policy | None:
        """Follow `watch`; the policy that everything is generated under now, None while nothing may be."""
        if not self._awake():
            return None
        serving.follow(watch)
        policy = serving.policy(watch.active)
        if policy is None:
            groups.quiet()
        else:
            groups.go_on(policy)
        return policy

    def _start_groups(
        self,
        policy: Policy,
        watch: Watch,
        serving: Serving,
        groups: Groups,
        tasks: TaskQueue,
        finished: _Finished,
    ) -> None:
        """Begin as many groups as there are tasks, tickets and room for."""
        waiting = tasks.first(self._settings.groups_at_once - len(groups))
        asking = bool(waiting) and time.monotonic() >= self._tickets_after
        granted: list[Task] = []
        try:
            if asking:
                granted = self._granted(waiting, tasks, finished)
                if len(granted) < len(waiting):
                    self._tickets_after = time.monotonic() + _TICKET_PAUSE_SECONDS
            # A worker that gets no ticket may be fenced. One without tasks looks when something happened.
            if not granted and not groups and (asking or watch.event_no != self._looked_at):
                if self._fenced():
                    serving.confirm_again()
                self._looked_at = watch.event_no
        except CoordinatorError as error:
            if not passes(error):
                raise
            event("coordinator_unreachable", level=logging.WARNING, error=str(error))
            self._tickets_after = time.monotonic() + _TICKET_PAUSE_SECONDS
            return
        with self._using_engine():
            if self._awake():
                for task in granted:
                    groups.start(policy, task)
                tasks.done(granted)

    def _hand_in(self, groups: Groups, spool: Spool, sender: Sender, finished: _Finished) -> None:
        """Put on disk what has ended, in batches; a disk that is full is asked again, and nothing new is begun
        meanwhile."""
        now = time.monotonic()
        is_due = now >= self._keep_after or (not groups.in_flight and not self._disk_full)
        if not self._unkept or not is_due:
            return
        try:
            self._keep(spool, sender, finished)
        except OSError as error:
            event("spool_not_written", level=logging.ERROR, groups=len(self._unkept), error=str(error))
            self._disk_full, self._keep_after = True, now + _DISK_PAUSE_SECONDS
        else:
            self._disk_full, self._keep_after = False, now + _TURN_SECONDS

    def _keep(self, spool: Spool, sender: Sender, finished: _Finished) -> None:
        ended = self._unkept
        rollouts = [rollout for group in ended for rollout in group.rollouts]
        if rollouts:
            spool.add(rollouts)
        self._unkept = []
        if rollouts:
            event(
                "generated",
                versions=sorted({span.version for rollout in rollouts for span in rollout.spans}),
                groups=sum(1 for group in ended if group.error is None),
                rollouts=len(rollouts),
            )
            sender.wake()
            self._engine_faults = 0
            self._vitals.engine_up = True
            self._vitals.generated(rollouts)
        finished.add(group.task.group_id for group in ended)
        failed = [(group.task, group.error) for group in ended if group.error is not None]
        for task, error in failed:
            self._task_failed(task, error)
        if failed and self._engine_faults >= _ENGINE_FAULTS_IN_A_ROW:  # once every one of them was reported
            task, error = failed[-1]
            raise AgentError(
                f"the engine failed {self._engine_faults} tasks in a row, last {task.task_id}: {error}; "
                f"look at the engine, then start this worker again"
            ) from error

    def _awake(self) -> bool:
        """Whether the engine may be used; it has its memory then. Holds only as long as it is in use."""
        if self._listener.asleep_seconds() is not None:
            return False
        self._engine.resume()
        return True

    def _begin(self) -> tuple[RunView, Origin, float] | None:
        """Look at the run and register, for as long as the coordinator takes to come; None when stopped
        meanwhile."""
        while not self._stopping.is_set():
            try:
                view = self._run.view()
                sampling = run_sampling(view, self._settings.max_tokens, self._settings.stop)
                contract = generation_contract(self._engine, self._model, sampling)
                check_contract(self._run, view, contract, self._model)
                worker = self._worker.register(self._engine.name, self._engine.version)
            except CoordinatorError as error:
                if not away(error):  # somebody else's answer means a wrong address, before the first of the right one
                    raise
                event("coordinator_unreachable", level=logging.WARNING, error=str(error))
                self._vitals.turned(None)
                self._stopping.wait(_IDLE_SECONDS)
            else:
                self._vitals.register(view.settings.lost_after_seconds)
                event("registered", run_id=view.run_id, incarnation=self.incarnation)
                self._group_size = view.settings.group_size or 1
                origin = Origin(
                    run_id=view.run_id,
                    worker_id=self._settings.worker_id,
                    incarnation=self.incarnation,
                    group_size=self._group_size,
                    sampling=sampling,
                    contract=contract,
                )
                return view, origin, worker.heartbeat_seconds
        return None

    def _granted(self, waiting: Sequence[Task], tasks: TaskQueue, finished: _Finished) -> list[Task]:
        """The tasks whose groups may be generated now; the others keep their place, wait a while, or are over."""
        answer = self._worker.tickets([task.group_id for task in waiting])
        granted = [task for task in waiting if task.group_id in answer.granted]
        if answer.capacity == 0:
            return granted
        # There was room, so what was not granted has arrived already or is another worker's (or was this one's,
        # before a crash). It must not keep the tasks behind it waiting.
        for task in waiting:
            if task.group_id in answer.granted:
                continue
            if next(self._run.rollouts(group_id=task.group_id), None) is not None:
                event("group_known", group_id=task.group_id)
                finished.add([task.group_id])
                tasks.done([task])
            else:
                event("group_taken", group_id=task.group_id, again_in_seconds=_TAKEN_PAUSE_SECONDS)
                tasks.postpone(task, _TAKEN_PAUSE_SECONDS)
        return granted

    def _fenced(self) -> bool:
        for worker in self._run.workers():
            if worker.worker_id == self._settings.worker_id and worker.fenced:
                event("fenced", level=logging.WARNING, reason=worker.fenced_reason)
                self._vitals.fenced = True
                return True
        self._vitals.fenced = False
        return False

    def _task_failed(self, task: Task, error: EngineError) -> None:
        """Reports each member of the task's group as failed, so that the group settles without them."""
        event("task_failed", level=logging.ERROR, group_id=task.group_id, error=str(error))
        failures = [
            GenerationFailure(
                rollout_id=f"{task.group_id}:{index}.0",
                task_id=task.task_id,
                task_source=task.task_source,
                group_id=task.group_id,
                sample_index=index,
                worker_id=self._settings.worker_id,
                incarnation=self.incarnation,
                message=str(error)[:2000],
            )
            for index in range(self._group_size)
        ]
        try:
            self._run.report_generation_failures(failures)
        except CoordinatorError as fault:  # the group's deadline settles it then
            event("failure_not_reported", level=logging.WARNING, group_id=task.group_id, error=str(fault))
        self._engine_faults += 1
        self._vitals.engine_up = False

    def _leave(self, sender: Sender) -> None:
        """Drain, hand in what is left, deregister. A coordinator that is away is left to find out by
        itself."""
        try:
            self._drain()
            emptied = sender.finish(_FAREWELL_SECONDS)
            if not emptied:
                event("spool_kept", level=logging.WARNING, detail="sent when this worker starts again")
            self._worker.deregister()
            event("deregistered")
        except CoordinatorError as error:
            event("left_without_goodbye", level=logging.WARNING, error=str(error))

    def _drain(self) -> None:
        try:
            self._worker.drain()
        except CoordinatorError as error:
            if isinstance(error, Unreachable) or not passes(error):
                raise
            event("not_drained", level=logging.WARNING, error=str(error))
        else:
            event("draining")


def _once(tasks: Iterable[Task], finished: _Finished) -> Iterator[Task]:
    """Each group once, and none that is finished: two of one name could not be told apart."""
    seen: set[str] = set()
    for task in tasks:
        if task.group_id not in seen and task.group_id not in finished:
            seen.add(task.group_id)
            yield task


class _Finished:
    """The groups that were generated, so that a restart with the same tasks goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content = path.read_bytes() if path.is_file() else b""
        # What has no newline after it was torn by a crash or a full disk.
        self._size = content.rfind(b"\n") + 1
        self._groups = set(content[: self._size].decode(errors="replace").split("\n")[:-1])
        self._unwritten: list[str] = []

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def add(self, group_ids: Iterable[str]) -> None:
        """Remember these groups; on disk when this returns, or with the next ones if the disk does not take them now:
        what was handed in, the coordinator knows as well."""
        new = [group_id for group_id in group_ids if group_id not in self._groups]
        self._groups.update(new)
        self._unwritten += new
        if not self._unwritten:
            return
        lines = "".join(f"{group_id}\n" for group_id in self._unwritten).encode()
        try:
            with self._path.open("ab") as file:
                file.truncate(self._size)
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            event("finished_not_written", level=logging.ERROR, groups=len(self._unwritten), error=str(error))
            return
        self._size += len(lines)
        self._unwritten = []
