"""What the demonstration in docker-compose.yml needs before it can begin; run again, it keeps what is there.

    COORDINATOR_URL=... COORDINATOR_TOKEN=... python setup.py RUN MODEL TOKENS

A tiny model in the folder MODEL, a run that fits it, and a token for each holder: in the file `token` of the folder
that is called as the holder is, below the folder TOKENS.
"""

import secrets
import sys
from pathlib import Path

from coordinator.client import Coordinator, Refused
from coordinator.wire.runs import CreateRun, RunSettings
from coordinator.wire.tokens import Role
from worker_agent.contract import run_of
from worker_agent.models import identify, tiny_qwen2

DAY = 24 * 3600
SETTINGS = RunSettings(
    group_size=4,
    groups_per_update=4,
    max_lag=2,
    heartbeat_seconds=5,
    lost_after_seconds=30,
    on_lost="drop",  # a worker that is stopped for good holds no activation back
    rewind_commits=20,
    evidence_retention_seconds=DAY,
    rollout_retention_seconds=7 * DAY,
    artifact_retention_seconds=DAY,
)
HOLDERS: dict[str, Role] = {
    "trainer": "trainer",
    "reward": "reward",
    "worker-1": "worker",
    "worker-2": "worker",
    "worker-gpu": "worker",
}


def create_run(coordinator: Coordinator, run_id: str, model: Path) -> None:
    """The run of the model in this folder, which is made where it is missing."""
    identity = identify(tiny_qwen2(model))
    coordinator.create_run(CreateRun(run_id=run_id, settings=SETTINGS, **run_of(identity)))


def still_counts(url: str, file: Path, run_id: str) -> bool:
    """Whether the file holds a token that the coordinator takes for this run."""
    if not file.exists():
        return False
    with Coordinator(url, file.read_text().strip()) as holder:
        try:
            holder.run(run_id).view()
        except Refused:
            return False
    return True


def main() -> None:
    run_id, model, tokens = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    with Coordinator() as coordinator:
        create_run(coordinator, run_id, model)
        for holder, role in HOLDERS.items():
            file = tokens / holder / "token"
            if still_counts(coordinator.url, file, run_id):
                print(f"{holder}: its token is there", flush=True)
                continue
            made = coordinator.create_token(
                f"{holder}-{secrets.token_hex(4)}",
                role,
                run_id=run_id,
                worker_id=holder if role == "worker" else None,
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            file.touch(mode=0o600)
            file.write_text(made.token + "\n")
            print(f"{holder}: a token of role {role} is made", flush=True)


if __name__ == "__main__":
    main()
