"""The figure: log-probs of the fixture's tokens before and after the update, and each rollout's drift."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from worker_agent.closure.result import ArmResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#c8561b", "#8a8a8a"


def draw(arms: Sequence[ArmResult], path: Path) -> None:
    """Draw the arms that were made to the PNG `path`. Needs no display. Raises ValueError if none was made."""
    from matplotlib.figure import Figure

    made = [arm for arm in arms if arm.decision is not None]
    if not made:
        raise ValueError("there is no arm to draw")
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
    _tokens(upper, made[0])
    _drift(lower, made)
    model = made[0].model
    figure.suptitle(f"{made[0].run_label}: {model.name}, one supervised step, version 0 to 1", fontsize=12)
    figure.savefig(path, dpi=130)


def _tokens(axes: Axes, arm: ArmResult) -> None:
    """Every answer token in a row, rollout after rollout."""
    position = 0
    ticks, names = [], []
    for row, verdict in zip(arm.log_probs, arm.decision.admission if arm.decision else (), strict=True):
        xs = range(position, position + len(row.behavior))
        last = position == 0
        for values, color, marker, size, label in (
            (row.learner_before, _BLUE, "o", 46, "learner, version 0"),
            (row.engine_before, "white", ".", 12, "engine, version 0"),
            (row.learner_after, _ORANGE, "o", 46, "learner, version 1"),
            (row.engine_after, "black", ".", 12, "engine, version 1"),
        ):
            edge = _BLUE if color == "white" else None
            axes.scatter(xs, _plotted(values), c=color, edgecolors=edge, marker=marker, s=size, linewidths=0.6,
                         label=label if last else None, zorder=3)  # fmt: skip
        for x, before, after in zip(xs, row.learner_before, row.learner_after, strict=True):
            axes.plot([x, x], _plotted((before, after)), color=_GREY, linewidth=0.8, zorder=1)
        ticks.append(position + (len(row.behavior) - 1) / 2)
        names.append(verdict.task_id)
        position += len(row.behavior)
        axes.axvline(position - 0.5, color="#dddddd", linewidth=0.8, zorder=0)
    axes.set_xlim(-0.5, position - 0.5)
    axes.set_xticks(ticks, names)
    axes.set_ylabel("log-prob of the token (nats)")
    axes.set_title(f"Tokens of the 8 answers, {arm.arm} arm: before and after, in learner and engine", fontsize=10)
    axes.legend(loc="lower right", fontsize=8, ncols=2)


def _drift(axes: Axes, arms: Sequence[ArmResult]) -> None:
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        assert arm.decision is not None
        verdicts = arm.decision.admission
        offset = (number - (len(arms) - 1) / 2) * width
        xs = [index + offset for index in range(len(verdicts))]
        bars = axes.bar(
            xs,
            [verdict.drift or 0.0 for verdict in verdicts],
            width * 0.9,
            color=[_BLUE if verdict.accepted else _ORANGE for verdict in verdicts],
            alpha=1.0 if number == 0 else 0.55,
        )
        axes.bar_label(bars, [f"{verdict.drift:.3f}" if verdict.drift is not None else "none" for verdict in verdicts],
                       fontsize=7, padding=1)  # fmt: skip
    first = arms[0].decision
    assert first is not None
    limit = first.admission[0].max_drift
    axes.axhline(limit, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"limit {limit:g}", (0.005, limit), xycoords=("axes fraction", "data"), ha="left", va="bottom", fontsize=8
    )
    axes.set_xticks(range(len(first.admission)), [verdict.task_id for verdict in first.admission])
    axes.set_ylabel("drift (mean |d log-prob|, nats)")
    axes.margins(y=0.15)
    names = " and ".join(f"{arm.arm} ({'dark' if index == 0 else 'light'})" for index, arm in enumerate(arms))
    axes.set_title(f"Drift per rollout at lag 1: blue admitted, orange refused; arms {names}", fontsize=10)


def _plotted(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
