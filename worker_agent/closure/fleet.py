"""The last stage: version 1 and the eight rollouts through a coordinator with two workers, all real processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from coordinator.client import Candidates, Run
from coordinator.wire.rollouts import Reward
from coordinator.wire.runs import CreateRun, RunSettings
from worker_agent.closure.fixture import Fixture
from worker_agent.closure.profile import MAX_DRIFT, MAX_LAG, ClosureError
from worker_agent.closure.result import ArmResult, CoordinatorResult, Verdict, WorkerAck, now
from worker_agent.contract import run_of
from worker_agent.demo.production import WORKERS, Plot, Production
from worker_agent.demo.task import exact_sum, source_hash
from worker_agent.learner.publishing import publish_adapter
from worker_agent.models import identify

RULESET = "exact-sum"
_WAIT_SECONDS = 180.0
_LOOK_SECONDS = 0.3


class Fleet:
    """A coordinator on `folder` and two workers around `model`. `say` gets a line for each thing done."""

    def __init__(
        self, folder: Path, run_id: str, model: Path, dtype: str, fixture: Path, say: Callable[[str], None]
    ) -> None:
        self._production = Production(folder, run_id, Plot(model, exercise=""))
        self._dtype = dtype
        self._fixture = fixture
        self._say = say

    def play(self, label: str, arm: ArmResult, adapter: Path, fixture: Fixture) -> CoordinatorResult:
        """Carry the arm's adapter through. Raises `DemoError` if a process ends early, and what the client raises."""
        production, started = self._production, time.monotonic()
        try:
            self._say("coordinator: starts, with an embedded Postgres")
            production.start_coordinator()
            run = self._create_run()
            self._start_workers()
            self._wait("the 8 rollouts", lambda: len(list(run.rollouts(state="generated"))) == len(fixture.rollouts))
            self._say("coordinator: has the 8 rollouts of version 0, from two workers that acked it")
            rewards = _reward(run, fixture)
            return self._carry(run, label, arm, adapter, fixture, rewards, started)
        finally:
            production.cast.stop(list(WORKERS), 30.0)
            production.stop()

    def _create_run(self) -> Run:
        production = self._production
        return production.coordinator.create_run(
            CreateRun(
                run_id=production.run_id,
                settings=RunSettings(max_lag=MAX_LAG, max_drift=MAX_DRIFT, group_size=1),
                **run_of(identify(production.plot.model), self._dtype),
            )
        )

    def _start_workers(self) -> None:
        production = self._production
        for index, name in enumerate(WORKERS):
            production.create_token(name, "worker", name)
            production.start(
                name,
                "worker_agent.closure.replaying",
                *("--run", production.run_id, "--worker-id", name, "--model", str(production.plot.model)),
                *(
                    "--dtype",
                    self._dtype,
                    "--fixture",
                    str(self._fixture),
                    "--data",
                    str(production.folder / "workers"),
                ),
                *("--share", f"{index}/{len(WORKERS)}"),
            )

    def _wait(self, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + _WAIT_SECONDS
        while not holds():
            self._production.cast.check()
            if time.monotonic() > until:
                raise ClosureError(
                    f"{what} did not come in {_WAIT_SECONDS:g} s: see {self._production.folder / 'logs'}"
                )
            time.sleep(_LOOK_SECONDS)

    def _carry(
        self,
        run: Run,
        label: str,
        arm: ArmResult,
        adapter: Path,
        fixture: Fixture,
        rewards: dict[str, float],
        started: float,
    ) -> CoordinatorResult:
        base = run.policies()[0].base_model
        assert base is not None and arm.update is not None and arm.decision is not None
        # The step was made on other samples than the run's rollouts: a commit that consumes none.
        with run.update("supervised-step") as step:
            step.commit()
        published = publish_adapter(
            run, version=1, parent_version=0, folder=adapter, base_model=base, updates=["supervised-step"]
        )
        self._say("coordinator: version 1 is published; waits for both acks")
        activation = run.activate(1)
        assert activation.opened_at is not None and activation.ended_at is not None
        seconds = (activation.ended_at - activation.opened_at).total_seconds()
        self._say(f"coordinator: both acked, version 1 is active {seconds:.1f} s after the activation opened")
        with run.update("admission") as update:
            candidates = update.candidates(len(fixture.rollouts), wait_seconds=_WAIT_SECONDS)
            # Drift is what is to be seen here, so a call in which most rollouts drift is no mistake.
            reserved = update.reserve(candidates, _current(candidates, arm), confirm_drift=True)
            update.abort("measured, not trained on")
        expected = {verdict.rollout_id: verdict for verdict in arm.decision.admission}
        workers = {rollout.rollout_id: rollout.worker_id for rollout in run.rollouts()}
        verdicts = tuple(
            Verdict(
                rollout_id=verdict.rollout_id,
                worker_id=workers[verdict.rollout_id],
                reward=rewards[verdict.rollout_id],
                verdict=verdict.verdict,
                state=str(verdict.state),
                lag=verdict.lag,
                drift=verdict.drift,
                agrees_with_arm=(verdict.verdict == "reserved") == expected[verdict.rollout_id].accepted,
            )
            for verdict in sorted(reserved.verdicts, key=lambda verdict: verdict.rollout_id)
        )
        acks = _acks(run)
        digest = arm.decision.sync_rpc_and_version.engine_digest_after
        active = run.view().active
        return CoordinatorResult(
            run_label=label,
            status="done",
            created_at=now(),
            adapter_sha256=arm.update.after_sha256,
            acks=acks,
            activation_state=activation.state,
            activation_seconds=seconds,
            active_version=active.version,
            active_artifact_hash=active.artifact_hash,
            rollouts=verdicts,
            passed=activation.state == "succeeded"
            and (active.version, active.artifact_hash) == (1, published.artifact_hash)
            and {ack.worker_id for ack in acks if ack.version == 1 and ack.matching and ack.digest == digest}
            == set(WORKERS)
            and len(verdicts) == len(fixture.rollouts)
            and all(verdict.agrees_with_arm for verdict in verdicts),
            seconds=round(time.monotonic() - started, 1),
        )


def _reward(run: Run, fixture: Fixture) -> dict[str, float]:
    """Reward every rollout by exact result; the rewards by rollout."""
    values = {rollout.rollout_id: exact_sum(rollout.task_id, rollout.text) for rollout in fixture.rollouts}
    rule = source_hash(exact_sum)
    run.reward(
        [
            Reward(rollout_id=rollout_id, status="ok", value=value, ruleset_id=RULESET, ruleset_hash=rule)
            for rollout_id, value in values.items()
        ]
    )
    return values


def _current(candidates: Candidates, arm: ArmResult) -> Sequence[np.ndarray]:
    """The learner's log-probs under version 1, per candidate and as long as its tokens."""
    answers = {row.rollout_id: row.learner_after for row in arm.log_probs}
    rows = []
    for candidate in candidates:
        row = np.zeros(len(candidate.token_ids))
        row[candidate.action_mask] = answers[candidate.rollout_id]
        rows.append(row)
    return rows


def _acks(run: Run) -> tuple[WorkerAck, ...]:
    return tuple(
        WorkerAck(
            worker_id=entry.subject,
            version=entry.detail["version"],
            artifact_hash=entry.detail["artifact_hash"],
            matching=entry.detail["matching"],
            digest=entry.detail["digest"] and entry.detail["digest"]["registered"],
        )
        for entry in run.journal()
        if entry.event == "worker.acked"
    )
