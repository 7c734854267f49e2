"""A result as text, read from its files alone."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from worker_agent.closure.result import ArmResult, Comparison, CoordinatorResult

_YES, _NO = "[green]passed[/green]", "[bold red]did not pass[/bold red]"


def show_arm(console: Console, arm: ArmResult) -> None:
    """One arm: what was measured, what was judged, and each rollout's admission."""
    console.rule(f"{arm.run_label}: {arm.arm} arm, {arm.status}")
    if arm.reason:
        console.print(arm.reason, highlight=False)
    if arm.initialization is not None:
        console.print(f"adapter before   {arm.initialization.adapter_sha256}", highlight=False)
    update, decision = arm.update, arm.decision
    if update is None or decision is None:
        return
    sync = decision.sync_rpc_and_version
    console.print(f"adapter after    {update.after_sha256}", highlight=False)
    console.print(
        f"one step on {update.supervised_tokens} tokens: loss {_number(update.loss)}, gradient norm "
        f"{_number(update.grad_norm)}, change {_number(update.delta_l2)}, "
        f"{update.changed_tensors} of {update.tensors} tensors changed",
        highlight=False,
    )
    table = Table("check", "largest error", "limit", "mean error", "limit", "")
    for name in ("same_version_before", "same_version_after", "change"):
        part: Comparison = getattr(decision.comparisons, name)
        table.add_row(name, _number(part.max_abs_error), f"{part.max_limit:g}", _number(part.mean_abs_error),
                      f"{part.mean_limit:g}", _YES if part.passed else _NO)  # fmt: skip
    versions = f"version {sync.version_before} to {sync.version_after}"
    table.add_row(f"sync_rpc_and_version ({versions})", "", "", "", "", _YES if sync.passed else _NO)
    table.add_row("finite gradient", "", "", "", "", _YES if decision.finite_gradient else _NO)
    table.add_row("changed tensors", "", "", "", "", _YES if decision.changed else _NO)
    console.print(table)
    console.print(f"weights in the engine after: {sync.engine_digest_after}", highlight=False)
    _admission(console, arm)
    seconds = sum(stage.seconds for stage in arm.stages)
    peak = max(stage.peak_rss_mib for stage in arm.stages)
    console.print(f"{seconds:.0f} s in {len(arm.stages)} stages, at most {peak:.0f} MiB", highlight=False)


def show_coordinator(console: Console, part: CoordinatorResult) -> None:
    """What the coordinator did with version 1 and the rollouts."""
    console.rule(f"{part.run_label}: through a coordinator with two workers, {part.status}")
    if part.reason:
        console.print(part.reason, highlight=False)
    if part.status != "done":
        return
    console.print(
        f"version {part.active_version} active, activation {part.activation_state} in "
        f"{part.activation_seconds:.1f} s, acks of version 1 by "
        + ", ".join(ack.worker_id for ack in part.acks if ack.version == 1 and ack.matching),
        highlight=False,
    )
    table = Table("rollout", "worker", "verdict", "state", "lag", "drift", "as the arm")
    for row in part.rollouts:
        table.add_row(row.rollout_id, row.worker_id, row.verdict, row.state, str(row.lag), _number(row.drift),
                      "yes" if row.agrees_with_arm else "[bold red]no[/bold red]")  # fmt: skip
    console.print(table)
    console.print(_YES if part.passed else _NO)


def _admission(console: Console, arm: ArmResult) -> None:
    assert arm.decision is not None
    before = {answer.task_id: answer.text for answer in arm.generation_before}
    after = {answer.task_id: answer.text for answer in arm.generation_after}
    table = Table("rollout", "drift", "limit", "admission", "answer before", "answer after")
    for row in arm.decision.admission:
        table.add_row(row.rollout_id, _number(row.drift), f"{row.max_drift:g}",
                      "admitted" if row.accepted else f"refused: {row.reason}",
                      before[row.task_id], after[row.task_id])  # fmt: skip
    console.print(table)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"
