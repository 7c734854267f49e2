"""The agent's loop: register, load and confirm what the coordinator names, generate, submit, leave in good
order.

Three things run beside the loop, none of them on the engine's thread: heartbeats and the watch
(`listening`), and the sending of what was generated (`spool`). The engine is used by the thread that calls
`Agent.run` alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from coordinator.client import CoordinatorError, Run, Unreachable
from coordinator.wire.rollouts import Generation, GenerationFailure, Rollout, Span
from coordinator.wire.runs import GenerationContract, RunView
from worker_agent.artifacts import ArtifactCache
from worker_agent.contract import check_contract, generation_contract, run_sampling
from worker_agent.engines.engine import Completion, Engine, EngineError, Policy, Prompt, Sampling, sample_seed
from worker_agent.listening import Listener
from worker_agent.logs import event
from worker_agent.models import ModelIdentity
from worker_agent.serving import Serving
from worker_agent.settings import WorkerSettings
from worker_agent.spool import Sender, Spool
from worker_agent.tasks import Task, TaskQueue

_IDLE_SECONDS = 0.5
_TICKET_PAUSE_SECONDS = 1.0
_TAKEN_PAUSE_SECONDS = 10.0
_FAREWELL_SECONDS = 60.0
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
        self, run: Run, engine: Engine, model: ModelIdentity, settings: WorkerSettings, tasks: Iterable[Task]
    ) -> None:
        self.incarnation = f"{settings.worker_id}-{uuid.uuid4().hex}"
        self._run = run
        self._engine = engine
        self._model = model
        self._settings = settings
        self._tasks = tasks
        self._worker = run.worker(settings.worker_id, self.incarnation)
        self._listener = Listener(run, self._worker)
        self._engine_in_use = threading.RLock()
        self._stopping = threading.Event()
        self._engine_faults = 0

    def stop(self) -> None:
        """Finish what is being generated, hand it in and leave. May be called by a signal handler."""
        self._stopping.set()

    def asleep(self, seconds: float) -> None:
        """The engine is to give its GPU away for so long: nothing is loaded or generated, and no ticket is taken.

        Returns when the engine has released its memory; the coordinator is told at once, and hears it with every
        heartbeat. After that time the engine takes its memory back by itself: be done by then, or call again. Raises
        ValueError for what is not above 0 and at most a day, and `EngineError` if the engine does not release.
        """
        self._listener.asleep(seconds)
        event("asleep", seconds=seconds)
        with self._engine_in_use:
            self._engine.release()

    def awake(self) -> None:
        """The engine takes its GPU back, before the time that `asleep` named. Raises `EngineError` if it cannot."""
        with self._engine_in_use:
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
        view, sampling, contract, heartbeat_seconds = begun
        spool = Spool(folder)
        finished = _Finished(folder / "finished.log")
        tasks = TaskQueue(
            (task for task in self._tasks if task.group_id not in finished),
            ahead=2 * self._settings.groups_at_once,
        )
        listener = self._listener
        serving = Serving(self._run, self._worker, self._engine, ArtifactCache(folder / "artifacts"))
        sender = Sender(spool, self._run)
        listener.start(heartbeat_seconds, view.settings.longest_wait_seconds)
        sender.start()
        looked_at = -1
        try:
            while not self._stopping.is_set():
                watch = listener.newest()
                if watch is None:
                    listener.wait(-1, _IDLE_SECONDS)
                    continue
                with self._engine_in_use:
                    if awake := self._awake():
                        serving.follow(watch)
                policy = serving.policy(watch.active)
                if not awake or policy is None:
                    listener.wait(watch.event_no, _IDLE_SECONDS)
                    continue
                waiting = tasks.first(self._settings.groups_at_once)
                if not waiting and tasks.ended:
                    event("tasks_ended")
                    break
                granted: list[Task] = []
                try:
                    if waiting:
                        granted = self._granted(waiting, tasks, finished)
                    # A worker that gets no ticket may be fenced. One without tasks looks when something happened.
                    if not granted and (waiting or watch.event_no != looked_at):
                        if self._fenced():
                            serving.confirm_again()
                        looked_at = watch.event_no
                except Unreachable as error:
                    event("coordinator_unreachable", level=logging.WARNING, error=str(error))
                    granted = []
                if not granted:
                    listener.wait(watch.event_no, _TICKET_PAUSE_SECONDS if waiting else _IDLE_SECONDS)
                    continue
                with self._engine_in_use:
                    if not self._awake():
                        continue
                    rollouts = self._generate(policy, granted, view.settings.group_size or 1, sampling, contract)
                if rollouts:
                    spool.add(rollouts)
                    sender.wake()
                # After the spool has it: a crash in between generates the group twice, never not at all.
                finished.add(granted)
                tasks.done(granted)
            self._leave(sender)
        finally:
            listener.stop()
            sender.finish(0.0)

    def _awake(self) -> bool:
        """Whether the engine may be used; it has its memory then. Holds only as long as it is in use."""
        if self._listener.asleep_seconds() is not None:
            return False
        self._engine.resume()
        return True

    def _begin(self) -> tuple[RunView, Sampling, GenerationContract, float] | None:
        """Look at the run and register, for as long as the coordinator takes to come; None when stopped
        meanwhile."""
        while not self._stopping.is_set():
            try:
                view = self._run.view()
                sampling = run_sampling(view, self._settings.max_tokens, self._settings.stop)
                contract = generation_contract(self._engine, self._model, sampling)
                check_contract(self._run, view, contract, self._model)
                worker = self._worker.register(self._engine.name, self._engine.version)
            except Unreachable as error:
                event("coordinator_unreachable", level=logging.WARNING, error=str(error))
                self._stopping.wait(_IDLE_SECONDS)
            else:
                event("registered", run_id=view.run_id, incarnation=self.incarnation)
                return view, sampling, contract, worker.heartbeat_seconds
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
                finished.add([task])
                tasks.done([task])
            else:
                event("group_taken", group_id=task.group_id, again_in_seconds=_TAKEN_PAUSE_SECONDS)
                tasks.postpone(task, _TAKEN_PAUSE_SECONDS)
        return granted

    def _fenced(self) -> bool:
        for worker in self._run.workers():
            if worker.worker_id == self._settings.worker_id and worker.fenced:
                event("fenced", level=logging.WARNING, reason=worker.fenced_reason)
                return True
        return False

    def _generate(
        self,
        policy: Policy,
        tasks: Sequence[Task],
        group_size: int,
        sampling: Sampling,
        contract: GenerationContract,
    ) -> list[Rollout]:
        """Whole groups under `policy`, bound here. A task that the engine cannot do is reported as failed and left
        out."""
        prompts: list[tuple[Task, Prompt]] = []
        for task in tasks:
            messages = [message.model_dump() for message in task.messages]
            try:
                prompt = Prompt(tuple(self._engine.render(messages)), self._seed(task), group_size)
            except EngineError as error:
                self._task_failed(task, group_size, error)
            else:
                prompts.append((task, prompt))
        if not prompts:
            return []
        started = time.monotonic()
        groups: list[tuple[Task, Prompt, list[Completion]]] = []
        try:
            answers = self._engine.generate(policy, [prompt for _, prompt in prompts], sampling)
            groups = [(task, prompt, answer) for (task, prompt), answer in zip(prompts, answers, strict=True)]
        except EngineError as error:
            event("generation_failed", level=logging.WARNING, groups=len(prompts), error=str(error))
            for task, prompt in prompts:  # one by one: a single bad prompt is not to cost the others
                try:
                    groups.append((task, prompt, self._engine.generate(policy, [prompt], sampling)[0]))
                except EngineError as single:
                    self._task_failed(task, group_size, single)
        if groups:
            self._engine_faults = 0
        rollouts = [
            self._rollout(policy, task, prompt, index, completion, sampling, contract)
            for task, prompt, completions in groups
            for index, completion in enumerate(completions)
        ]
        event("generated", version=policy.version, groups=len(groups), rollouts=len(rollouts),
              seconds=round(time.monotonic() - started, 3))  # fmt: skip
        return rollouts

    def _task_failed(self, task: Task, group_size: int, error: EngineError) -> None:
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
            for index in range(group_size)
        ]
        try:
            self._run.report_generation_failures(failures)
        except CoordinatorError as fault:  # the group's deadline settles it then
            event("failure_not_reported", level=logging.WARNING, group_id=task.group_id, error=str(fault))
        self._engine_faults += 1
        if self._engine_faults >= _ENGINE_FAULTS_IN_A_ROW:
            raise AgentError(
                f"the engine failed {self._engine_faults} tasks in a row, last {task.task_id}: {error}; "
                f"look at the engine, then start this worker again"
            ) from error

    def _rollout(
        self,
        policy: Policy,
        task: Task,
        prompt: Prompt,
        index: int,
        completion: Completion,
        sampling: Sampling,
        contract: GenerationContract,
    ) -> Rollout:
        before, made = len(prompt.token_ids), len(completion.token_ids)
        return Rollout(
            rollout_id=f"{task.group_id}:{index}.0",
            task_id=task.task_id,
            task_source=task.task_source,
            group_id=task.group_id,
            sample_index=index,
            attempt=0,
            spans=(
                Span(
                    version=policy.version,
                    artifact_hash=policy.artifact_hash,
                    start=before,
                    end=before + made,
                ),
            ),
            span_source="dispatch",
            worker_id=self._settings.worker_id,
            incarnation=self.incarnation,
            contract=contract,
            generation=Generation(
                seed=sample_seed(prompt.seed, index),
                max_tokens=sampling.max_tokens,
                stop=sampling.stop,
                finish_reason=completion.finish_reason,
                engine=self._engine.name,
                engine_version=self._engine.version,
            ),
            token_ids=[*prompt.token_ids, *completion.token_ids],
            action_mask=[False] * before + [True] * made,
            behavior_log_probs=[*([None] * before), *completion.log_probs],
        )

    def _seed(self, task: Task) -> int:
        """63 bits from run, group and attempt."""
        digest = hashlib.sha256(f"{self._run.id}\n{task.group_id}\n0".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def _leave(self, sender: Sender) -> None:
        """Drain, hand in what is left, deregister. A coordinator that is away is left to find out by
        itself."""
        try:
            self._worker.drain()
            event("draining")
            emptied = sender.finish(_FAREWELL_SECONDS)
            if not emptied:
                event("spool_kept", level=logging.WARNING, detail="sent when this worker starts again")
            self._worker.deregister()
            event("deregistered")
        except CoordinatorError as error:
            event("left_without_goodbye", level=logging.WARNING, error=str(error))


class _Finished:
    """The groups that were generated, so that a restart with the same tasks goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        # The last piece has no newline after it: empty, or torn by a crash.
        self._groups = set(lines[:-1])
        if lines and lines[-1]:
            path.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def add(self, tasks: Iterable[Task]) -> None:
        """Remember these groups; on disk when this returns."""
        new = [task.group_id for task in tasks]
        self._groups.update(new)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(f"{group_id}\n" for group_id in new)
            file.flush()
            os.fsync(file.fileno())
