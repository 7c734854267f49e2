"""Tasks without end for the workers of docker-compose.yml: one-digit sums, each in a group of its own."""

import os
import random
import time
from collections.abc import Iterator


def sums() -> Iterator[dict[str, object]]:
    """A task as a line of `worker-agent run --tasks` has it. The group is named by worker and time: no other is it."""
    worker, started = os.environ["WORKER_ID"], time.time_ns() // 1_000_000
    number = 0
    while True:
        left, right = random.randint(1, 9), random.randint(1, 9)
        yield {
            "task_id": f"{left}+{right}",
            "group_id": f"{worker}-{started}-{number}",
            "task_source": "sums",
            "messages": [{"role": "user", "content": f"{left} + {right} ="}],
        }
        number += 1
