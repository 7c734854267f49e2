"""Groups of rollouts in flight: begun under one policy, put off when the engine is needed, gone on with under
another."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.wire.rollouts import Generation, Rollout, Span
from coordinator.wire.runs import GenerationContract
from worker_agent.engines.engine import Completion, Engine, EngineError, Policy, Request, Sampling, sample_seed
from worker_agent.settings import AcrossVersions
from worker_agent.tasks import Task


@dataclass(frozen=True)
class Origin:
    """What every rollout of one agent says of where it comes from."""

    run_id: str
    worker_id: str
    incarnation: str
    group_size: int
    sampling: Sampling
    contract: GenerationContract


@dataclass(frozen=True)
class Ended:
    """A group that is in flight no more: with its rollouts, or with the error that made an end of it."""

    task: Task
    rollouts: Sequence[Rollout] = ()
    error: EngineError | None = None


@dataclass
class _Sample:
    """One rollout in the making. `parts` are the policies that it was made under and how many tokens each drew."""

    task: Task
    index: int
    prompt: tuple[int, ...]
    seed: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    parts: list[tuple[Policy, int]] = field(default_factory=list)
    cut: bool = False
    finish_reason: str | None = None

    @property
    def rollout_id(self) -> str:
        return f"{self.task.group_id}:{self.index}.0"

    def request(self, max_tokens: int) -> Request:
        """For what is missing: the prompt and what was drawn so far, to be completed."""
        made = len(self.tokens)
        seed = self.seed if made == 0 else sample_seed(self.seed, made)
        return Request(self.rollout_id, (*self.prompt, *self.tokens), seed, max_tokens - made)

    def add(self, policy: Policy, completion: Completion, max_tokens: int) -> None:
        self.tokens += completion.token_ids
        self.log_probs += completion.log_probs
        if completion.token_ids:
            self.parts.append((policy, len(completion.token_ids)))
        if completion.finish_reason != "abort":
            self.finish_reason = completion.finish_reason
        elif len(self.tokens) == max_tokens:
            self.finish_reason = "length"
        else:
            self.cut = True


class Groups:
    """What one agent generates at the moment. `len` is the number of groups.

    With `across_versions` "continue" a group in flight is cut when the engine is needed for something else, and goes
    on from there: tokens that are drawn under another policy are a span of their own. With "finish" the engine is
    waited for. A stop text is looked for within a span. All of it runs on the engine's thread.
    """

    def __init__(self, engine: Engine, origin: Origin, across_versions: AcrossVersions) -> None:
        self._engine = engine
        self._origin = origin
        self._across_versions = across_versions
        self._policy: Policy | None = None  # that everything in flight is under
        self._in_flight: dict[str, tuple[_Sample, Policy]] = {}
        self._put_off: list[_Sample] = []
        self._groups: dict[str, list[_Sample]] = {}
        self._ended: list[Ended] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def in_flight(self) -> bool:
        """Whether the engine has something to do."""
        return bool(self._in_flight)

    def start(self, policy: Policy, task: Task) -> None:
        """Begin the group of `task`. What is in flight under another policy is put off or finished before."""
        self.go_on(policy)
        try:
            prompt = tuple(self._engine.render([message.model_dump() for message in task.messages]))
        except EngineError as error:
            self._ended.append(Ended(task, error=error))
            return
        seed = self._seed(task)
        samples = [_Sample(task, index, prompt, sample_seed(seed, index)) for index in range(self._origin.group_size)]
        self._groups[task.group_id] = samples
        self._begin(policy, samples)

    def go_on(self, policy: Policy) -> None:
        """From here on everything is generated under `policy`."""
        if self._policy is not None and self._policy.key != policy.key:
            self.quiet()
        self._policy = policy
        waiting, self._put_off = self._put_off, []
        by_group: dict[str, list[_Sample]] = {}
        for sample in waiting:
            by_group.setdefault(sample.task.group_id, []).append(sample)
        for samples in by_group.values():
            self._begin(policy, samples)

    def quiet(self) -> None:
        """Leave nothing in flight in the engine."""
        if self._across_versions == "continue":
            self._take(self._engine.interrupt())
        while self._in_flight:
            self._take(self._engine.finished(1.0))

    def ended(self, wait_seconds: float) -> list[Ended]:
        """The groups that have ended since the last call; waits for one, for at most so long."""
        if self._in_flight and not self._ended:
            self._take(self._engine.finished(wait_seconds))
        ended, self._ended = self._ended, []
        return ended

    def _begin(self, policy: Policy, samples: Sequence[_Sample]) -> None:
        """Of one group."""
        max_tokens = self._origin.sampling.max_tokens
        try:
            self._engine.begin(policy, [sample.request(max_tokens) for sample in samples], self._origin.sampling)
        except EngineError as error:
            self._give_up(samples[0].task, error)
        else:
            self._in_flight |= {sample.rollout_id: (sample, policy) for sample in samples}

    def _take(self, answers: dict[str, Completion | EngineError]) -> None:
        for rollout_id, answer in answers.items():
            sample, policy = self._in_flight.pop(rollout_id)
            group = self._groups.get(sample.task.group_id)
            if group is None:  # given up meanwhile
                continue
            if isinstance(answer, EngineError):
                self._give_up(sample.task, answer)
                continue
            sample.add(policy, answer, self._origin.sampling.max_tokens)
            if sample.finish_reason is None:
                self._put_off.append(sample)
            elif all(one.finish_reason is not None for one in group):
                del self._groups[sample.task.group_id]
                self._ended.append(Ended(sample.task, [self._rollout(one) for one in group]))

    def _give_up(self, task: Task, error: EngineError) -> None:
        self._groups.pop(task.group_id, None)
        self._put_off = [sample for sample in self._put_off if sample.task.group_id != task.group_id]
        self._ended.append(Ended(task, error=error))

    def _rollout(self, sample: _Sample) -> Rollout:
        sampling, before = self._origin.sampling, len(sample.prompt)
        spans: list[Span] = []
        end = before
        for policy, count in sample.parts:
            start, end = end, end + count
            if spans and (spans[-1].version, spans[-1].artifact_hash) == (policy.version, policy.artifact_hash):
                spans[-1] = spans[-1].model_copy(update={"end": end})
            else:
                spans.append(Span(version=policy.version, artifact_hash=policy.artifact_hash, start=start, end=end))
        return Rollout(
            rollout_id=sample.rollout_id,
            task_id=sample.task.task_id,
            task_source=sample.task.task_source,
            group_id=sample.task.group_id,
            sample_index=sample.index,
            attempt=0,
            spans=tuple(spans),
            span_source="segmented" if sample.cut else "dispatch",
            worker_id=self._origin.worker_id,
            incarnation=self._origin.incarnation,
            contract=self._origin.contract,
            generation=Generation(
                seed=sample.seed,
                max_tokens=sampling.max_tokens,
                stop=sampling.stop,
                finish_reason=sample.finish_reason,
                engine=self._engine.name,
                engine_version=self._engine.version,
            ),
            token_ids=[*sample.prompt, *sample.tokens],
            action_mask=[False] * before + [True] * len(sample.tokens),
            behavior_log_probs=[*([None] * before), *sample.log_probs],
        )

    def _seed(self, task: Task) -> int:
        """63 bits from run, group and attempt."""
        digest = hashlib.sha256(f"{self._origin.run_id}\n{task.group_id}\n0".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1
