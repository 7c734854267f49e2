"""The phases as a coordinator's users see them: over HTTP, by the public client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from benchmarks.processes import Times
from benchmarks.workload import Share, current_log_probs, require
from coordinator.client import Coordinator


@dataclass(frozen=True)
class Address:
    """A coordinator's address and token, and a run in it."""

    url: str
    token: str
    run_id: str


@dataclass(frozen=True)
class SubmitArrow:
    """Rollouts in, as Arrow streams that were encoded before the clock starts."""

    at: Address
    size: int

    @contextlib.contextmanager
    def prepared(self, share: Share) -> Iterator[Callable[[Times], None]]:
        streams = share.arrow(self.size)
        with Coordinator(self.at.url, self.at.token) as coordinator:
            run = coordinator.run(self.at.run_id)
            run.view()

            def submit(times: Times) -> None:
                for numbers, stream in zip(share.batches(self.size), streams, strict=True):
                    began = time.perf_counter()
                    answer = run.submit_stream(stream)
                    times.call(began, len(numbers))
                    require((v.verdict for v in answer.verdicts), "accepted")

            yield submit


@dataclass(frozen=True)
class SubmitJson:
    """Rollouts in, as JSON bodies that were encoded before the clock starts. Only the first `most` of the share."""

    at: Address
    size: int
    most: int

    @contextlib.contextmanager
    def prepared(self, share: Share) -> Iterator[Callable[[Times], None]]:
        part = Share(share.numbers[: self.most], share.tokens)
        bodies = part.json(self.size)
        headers = {"authorization": f"Bearer {self.at.token}", "content-type": "application/json"}
        path = f"/v1/runs/{self.at.run_id}"
        with httpx.Client(base_url=self.at.url, headers=headers, timeout=60) as http:
            http.get(path).raise_for_status()

            def submit(times: Times) -> None:
                for numbers, body in zip(part.batches(self.size), bodies, strict=True):
                    began = time.perf_counter()
                    answer = http.post(f"{path}/rollouts", content=body).raise_for_status().json()
                    times.call(began, len(numbers))
                    require((v["verdict"] for v in answer["verdicts"]), "accepted")

            yield submit


@dataclass(frozen=True)
class SubmitRewards:
    """Rewards for all rollouts of the share."""

    at: Address
    size: int

    @contextlib.contextmanager
    def prepared(self, share: Share) -> Iterator[Callable[[Times], None]]:
        batches = share.rewards(self.size)
        with Coordinator(self.at.url, self.at.token) as coordinator:
            run = coordinator.run(self.at.run_id)
            run.view()

            def submit(times: Times) -> None:
                for rewards in batches:
                    began = time.perf_counter()
                    answer = run.reward(rewards)
                    times.call(began, len(rewards))
                    require((v.verdict for v in answer.verdicts), "stored")

            yield submit


@dataclass(frozen=True)
class Consume:
    """One trainer takes whole groups until there are none: candidates, reserve with log-probs, commit."""

    at: Address
    groups: int

    @contextlib.contextmanager
    def prepared(self, share: Share) -> Iterator[Callable[[Times], None]]:
        with Coordinator(self.at.url, self.at.token) as coordinator:
            run = coordinator.run(self.at.run_id)
            run.view()

            def consume(times: Times) -> None:
                while True:
                    began = time.perf_counter()
                    with times.stage("open"):
                        update = run.update().__enter__()
                    with times.stage("candidates"):
                        candidates = update.candidates(self.groups)
                    if not candidates:
                        update.abort("the buffer is empty")
                        return
                    current = current_log_probs(candidates.behavior_log_probs)
                    with times.stage("reserve"):
                        reserved = update.reserve(candidates, current)
                    with times.stage("commit"):
                        update.commit()
                    times.call(began, len(candidates))
                    require((v.verdict for v in reserved.verdicts), "reserved")

            yield consume
