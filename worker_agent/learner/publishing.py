"""An adapter folder becomes a policy version, together with what an engine must report once it holds it.

For any trainer: nothing here asks for verl.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from coordinator.client import Refused, Run
from coordinator.wire.policies import BaseModelIdentity, PolicyView
from coordinator.wire.workers import WorkerView
from worker_agent.engines.lora_digest import digest_of_folder, lora_layout


def publish_adapter(
    run: Run,
    *,
    version: int,
    parent_version: int,
    folder: Path,
    base_model: BaseModelIdentity,
    updates: Sequence[str] = (),
) -> PolicyView:
    """Make the adapter in `folder` (PEFT's layout) policy `version`, and state the digests that its weights have.

    An ack with another digest is then a mismatch, so an engine that set the label and kept the old weights cannot
    become active. The digests are stated for the engines of the run's workers, in the dtype of its contract. Safe to
    repeat, also after workers came or went. Raises `AdapterError` for a folder that no engine should serve, and what
    `Run.publish` raises.
    """
    try:
        # They belong to the version as it was prepared; computed anew, they could name other engines.
        digests = dict(run.policy(version).digests)
    except Refused as refused:
        if refused.code != "policy_version_unknown":
            raise
        digests = expected_digests(folder, run.workers(), run.view().contract.dtype)
    return run.publish(
        version=version,
        parent_version=parent_version,
        folder=folder,
        base_model=base_model,
        updates=updates,
        digests=digests,
    )


def expected_digests(folder: Path, workers: Iterable[WorkerView], dtype: str) -> dict[str, str]:
    """By layout, the digest of the adapter in `folder` in each of these workers' engines that gives one.

    Raises `AdapterError`.
    """
    layouts = {
        layout
        for worker in workers
        if worker.state != "deregistered" and (layout := lora_layout(worker.engine, worker.engine_version, dtype))
    }
    # Another engine's version may lie otherwise in memory, but not hold another adapter.
    digest = digest_of_folder(folder, dtype)
    return dict.fromkeys(sorted(layouts), digest)
