"""A rule that a model of random weights meets half of the time, so that most groups are mixed."""

from worker_agent.demo.task import source_hash
from worker_agent.tasks import Message, Task


def parity(text: str) -> float:
    """1.0 if the bytes of the text add up to an odd number."""
    return float(sum(text.encode()) % 2)


class Parity:
    source = "parity"
    ruleset_id = "parity"
    max_tokens = 8
    stop: tuple[str, ...] = ()

    @property
    def ruleset_hash(self) -> str:
        return source_hash(parity)

    def tasks(self, count: int) -> list[Task]:
        return [
            Task(
                task_id=f"count-{number}",
                group_id=f"count-{number:03d}",
                task_source=self.source,
                messages=(Message(role="user", content=f"{number} + 1 ="),),
            )
            for number in range(count)
        ]

    def reward(self, task_id: str, text: str) -> float:
        return parity(text)


PARITY = Parity()
