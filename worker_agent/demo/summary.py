"""The demo's last page: what happened in each update, who confirmed which weights, and one update's lineage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from coordinator.wire.updates import Lineage
from worker_agent.demo.record import Claim, Record, acks, activated_at, reason_of

STAGES = ("wait", "score", "reserve", "step", "commit", "publish", "activate")
Seconds = dict[tuple[int, str], float]
"""How long the trainer spent, by the update's number and the stage."""


def show(console: Console, record: Record, seconds: Seconds, promised: list[Claim], on_purpose: list[Claim]) -> bool:
    """Print everything; whether every claim holds."""
    console.print()
    console.print(_updates(record))
    console.print(_versions(record))
    console.print(_stages(record, seconds))
    # An update with more than one behaviour version shows most; else the last one.
    mixed = [line for line in record.lineages if len({m.lag for m in line.members}) > 1]
    if record.lineages:
        console.print(_lineage(record, (mixed or record.lineages)[-1]))
    console.print(_claims("What holds of the whole run", promised))
    console.print(_claims("What was done on purpose, and what became of it", on_purpose))
    claims = [*promised, *on_purpose]
    failed = sum(not claim.holds for claim in claims)
    verdict = "[green]all of it happened[/green]" if not failed else f"[red]{failed} of it did not happen[/red]"
    console.print(f"{len(claims)} claims, each looked up over the API afterwards: {verdict}.")
    console.print("[dim]Whether the model got better at sums was not measured, so nothing is said about it.[/dim]")
    return not failed


def _updates(record: Record) -> Table:
    table = Table(title="Updates", title_justify="left")
    for column in ("update", "weights", "commit", "groups", "consumed", "lag", "drift mean", "drift max"):
        table.add_column(column, justify="left" if column == "update" else "right")
    table.add_column("refused")
    table.add_column("discarded at commit")
    for line in record.lineages:
        consumed = [m for m in line.members if m.outcome == "consumed"]
        refused = [
            t.reason
            for history in record.histories.values()
            for t in history
            if t.update_id == line.update.update_id
            and t.event in ("quarantine", "set_aside")
            and t.reason not in (None, "group_spent")
        ]
        discarded = [reason_of(record, m.rollout_id) for m in line.members if m.outcome == "discarded"]
        lags = Counter(m.lag for m in consumed)
        first, *rest = sorted(lags) or [0]
        for lag in (first, *rest):
            drifts = [m.drift for m in consumed if m.lag == lag and m.drift is not None]
            whole = lag == first
            table.add_row(
                line.update.update_id if whole else "",
                f"v{line.update.policy_version}" if whole else "",
                str(line.update.commit_no) if whole else "",
                str(len({m.group_id for m in line.members})) if whole else "",
                str(lags[lag]),
                str(lag),
                f"{sum(drifts) / len(drifts):.1e}" if drifts else "",
                f"{max(drifts):.1e}" if drifts else "",
                _counted(refused) if whole else "",
                _counted(discarded) if whole else "",
            )
    return table


def _versions(record: Record) -> Table:
    table = Table(title="Policy versions", title_justify="left")
    for column in (
        "version",
        "artifact hash",
        "made by",
        "acked (seconds after the activation opened)",
        "engine digest",
    ):
        table.add_column(column)
    table.add_column("active after", justify="right")
    for policy in record.policies:
        opened = next((a.opened_at for a in record.activations if a.version == policy.version), None)
        switch = activated_at(record, policy.version)
        words = list(acks(record, policy.version)) if opened is not None else []
        digests = {str(word.detail["digest"]["registered"])[:12] for word in words if word.detail["digest"]}
        table.add_row(
            f"v{policy.version}",
            policy.artifact_hash[:12],
            ", ".join(policy.updates) or "the base model",
            "\n".join(
                f"{word.subject} {(word.at - opened).total_seconds():.1f}"
                + ("" if word.detail["matching"] else " [red]wrong hash[/red]")
                for word in words
                if opened is not None
            ),
            "\n".join(sorted(digests)),
            f"{(switch.at - opened).total_seconds():.1f} s" if switch and opened else "at once",
        )
    return table


def _stages(record: Record, seconds: Seconds) -> Table:
    table = Table(title="Seconds in each stage, by the trainer's clock", title_justify="left")
    table.add_column("update")
    for stage in (*STAGES, "together"):
        table.add_column(stage, justify="right")
    for number, line in enumerate(record.lineages, start=1):
        row = [seconds.get((number, stage), 0.0) for stage in STAGES]
        table.add_row(line.update.update_id, *(f"{value:.2f}" for value in (*row, sum(row))))
    return table


def _lineage(record: Record, line: Lineage) -> Tree:
    update = line.update
    tree = Tree(
        f"[bold]Lineage of {update.update_id}[/bold]: commit {update.commit_no} on weights v{update.policy_version}"
    )
    made = tree.add("made")
    for version in line.made_versions:
        artifact_hash = next(policy.artifact_hash for policy in record.policies if policy.version == version)
        made.add(f"v{version} {artifact_hash[:12]}")
    versions = sorted({(p.version, p.artifact_hash) for m in line.members for p in m.policies})
    for version, artifact_hash in versions:
        branch = tree.add(f"from v{version} {artifact_hash[:12]}")
        own = [m for m in line.members if any(p.version == version for p in m.policies)]
        for worker_id, incarnation in sorted({(m.worker_id, m.incarnation) for m in own}):
            twig = branch.add(f"{worker_id} [dim]({incarnation})[/dim]")
            for group_id in sorted({m.group_id for m in own if m.incarnation == incarnation}):
                group = [m for m in own if m.group_id == group_id and m.incarnation == incarnation]
                task = record.rollouts[group[0].rollout_id].task_id
                rewards = " ".join("-" if m.reward is None else f"{m.reward:g}" for m in group)
                outcomes = _counted(m.outcome for m in group)
                twig.add(
                    f"{group_id} [dim]task[/dim] {task} [dim]rewards[/dim] {rewards} {outcomes}",
                    highlight=False,
                )
    for ruleset in sorted({(m.ruleset_id, m.ruleset_hash) for m in line.members if m.ruleset_id and m.ruleset_hash}):
        tree.add(f"rewarded under {ruleset[0]} {str(ruleset[1])[:12]}")
    for refusal in line.refusals:
        tree.add(f"refused {refusal.rollout_id}: {refusal.verdict}")
    return tree


def _claims(title: str, claims: list[Claim]) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("")
    table.add_column("claim", ratio=1)
    table.add_column("what the record says", ratio=1)
    for claim in claims:
        table.add_row("[green]yes[/green]" if claim.holds else "[bold red]NO[/bold red]", claim.title, claim.facts)
    return table


def _counted(names: Iterable[str | None]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(map(str, names)).items())) or "none"
