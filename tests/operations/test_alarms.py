"""The alert rules and the dashboard: what they ask for exists, and each alert fires when it should and only then."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.metrics.listing import every_metric

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
ALARMS = ROOT / "docs" / "alarms.md"
FOREIGN = {"up"}


def promtool(*arguments: str | Path, stdin: str | None = None) -> str:
    done = subprocess.run(
        [Path(sys.prefix) / "bin" / "promtool", *arguments], input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@functools.cache
def rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


@functools.cache
def known() -> frozenset[str]:
    return frozenset(name for metric in every_metric() for name in metric.samples()) | FOREIGN


def asked(expression: str) -> set[str]:
    """The metrics of an expression; everything of ours has our prefix."""
    return set(re.findall(r"\b(?:coordinator|worker_agent)_\w+|\bup\b(?=[{)])", expression))


def panels() -> list[tuple[str, str]]:
    """Title and expression of each query, with Grafana's variables filled in."""
    dashboard = json.loads(DASHBOARD.read_text())
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$run", ".*"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def test_prometheus_takes_the_files_as_they_are() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", ALERTS)
    assert "valid prometheus config" in promtool("check", "config", ROOT / "deploy" / "prometheus" / "prometheus.yml")


def test_every_metric_that_an_alert_asks_for_exists() -> None:
    for name, rule in rules().items():
        assert asked(rule["expr"]), name
        assert asked(rule["expr"]) <= known(), name


def test_every_panel_is_promql_over_metrics_that_exist(tmp_path: Path) -> None:
    recorded = [{"record": f"panel:{n}", "expr": expression} for n, (_, expression) in enumerate(panels())]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", tmp_path / "panels.yml")
    for title, expression in panels():
        assert asked(expression), title
        assert asked(expression) <= known(), title


def test_the_dashboard_shows_what_is_measured() -> None:
    """Nothing of the runs and their ways is measured for nobody."""
    shown = {name for _, expression in panels() for name in asked(expression)}
    shown |= {name for rule in rules().values() for name in asked(rule["expr"])}
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    left_out = {metric.name for metric in every_metric()} - stems
    assert left_out == {
        "coordinator_build_info",
        "coordinator_database_read_seconds",
        "coordinator_schema_info",
        "coordinator_start_timestamp_seconds",
    }


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    source = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert yaml.safe_load((folder / "dashboards" / "coordinator.yml").read_text())["providers"][0]["type"] == "file"
    dashboard = json.loads(DASHBOARD.read_text())
    used = {t["datasource"]["uid"] for panel in dashboard["panels"] for t in panel.get("targets", ())}
    assert used == {source["uid"]}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    page = ALARMS.read_text()
    sections = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert sections == list(rules())
    for name, rule in rules().items():
        assert rule["annotations"]["runbook"] == f"docs/alarms.md#{name.lower()}"
        text = page.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0]
        assert [part for part in ("**Means**", "**Look at**", "**Do**") if part in text] == [
            "**Means**", "**Look at**", "**Do**",
        ]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Series (by promtool's notation, one value a minute) under which an alert fires, and under which it does not."""

    alert: str
    fires: dict[str, str]
    quiet: tuple[dict[str, str], ...]
    labels: dict[str, str] = field(default_factory=dict)
    at: str = "45m"


ONE = {"instance": "c-1"}
RUN = {"run": "sums"}


def _events(event: str, values: str) -> dict[str, str]:
    return {f'coordinator_events_total{{run="sums",event="{event}",instance="{i}"}}': values for i in ("c-1", "c-2")}


def _workers(condition: str, values: str = "2x60") -> dict[str, str]:
    return {f'coordinator_workers{{run="sums",condition="{condition}",instance="{i}"}}': values for i in ("c-1", "c-2")}


ARRIVALS = 'coordinator_arrivals_total{run="sums",verdict="accepted",state="generated",reason="",instance="c-1"}'
DRIFT = 'coordinator_reserve_drift_nats_{}{{run="sums",instance="c-1"}}'
QUARANTINED = 'coordinator_rollouts{run="sums",state="quarantined",instance="c-1"}'
FREE, SIZE = (f'coordinator_artifact_disk_{n}bytes{{instance="c-1"}}' for n in ("free_", ""))
COMMITTED = 'coordinator_last_commit_timestamp_seconds{run="sums",instance="c-1"}'
SWEPT = 'coordinator_sweep_timestamp_seconds{instance="c-1"}'
READ = 'coordinator_database_read_timestamp_seconds{instance="c-1"}'
UP = 'coordinator_database_up{instance="c-1"}'
REQUESTS = 'coordinator_requests_total{{operation="x",status="{}",instance="c-1"}}'
OPEN = 'coordinator_activation_open_seconds{run="sums",instance="c-1"}'
CASES = [
    Case(
        "CoordinatorDown",
        {'up{job="coordinator",instance="c-1"}': "1x40 0x20"},
        ({'up{job="coordinator",instance="c-1"}': "1x43 0 1x20"}, {'up{job="other",instance="c-1"}': "0x60"}),
        ONE | {"job": "coordinator"},
    ),
    Case(
        "CoordinatorDatabaseUnreachable",
        {UP: "1x40 0x20", READ: "0+60x60"},
        ({UP: "1x60", READ: "0+60x60"},),
        ONE,
    ),
    Case("CoordinatorDatabaseUnreachable", {UP: "1x60", READ: "0+60x40 2400x20"}, (), ONE),
    Case(
        "CoordinatorFailing",
        {REQUESTS.format(200): "0+60x60", REQUESTS.format(503): "0+6x60"},
        (
            {REQUESTS.format(200): "0+60x60", REQUESTS.format(503): "0+1x60"},
            {REQUESTS.format(200): "0+60x60", REQUESTS.format(409): "0+60x60"},
        ),
    ),
    Case(
        "CoordinatorSweeperStopped",
        {SWEPT: "0+60x40 2400x20", UP: "1x60"},
        ({SWEPT: "0+60x60", UP: "1x60"}, {SWEPT: "0+60x40 2400x20", UP: "1x40 0x20"}),
        ONE,
    ),
    Case("CoordinatorDiskLow", {FREE: "9x60", SIZE: "100x60"}, ({FREE: "11x60", SIZE: "100x60"},), ONE),
    Case(
        "CoordinatorProducersStalled",
        _workers("live") | {ARRIVALS: "0+10x20 200x40"},
        (
            _workers("live") | {ARRIVALS: "0+10x60"},
            _workers("live", "0x60") | {ARRIVALS: "0+10x20 200x40"},
            _workers("live") | {ARRIVALS: "0+10x38 380x20"},
        ),
        RUN,
    ),
    Case("CoordinatorProducersStalled", _workers("lost"), (_workers("fenced"),), RUN),
    Case(
        "CoordinatorNoCommit",
        _workers("live", "2x120") | {COMMITTED: "0x120"},
        (_workers("live", "0x120") | {COMMITTED: "0x120"}, _workers("live", "2x120") | {COMMITTED: "0+60x120"}),
        RUN,
        "90m",
    ),
    Case("CoordinatorActivationStuck", {OPEN: "_x40 0+60x20"}, ({OPEN: "_x42 0+60x20"},), RUN),
    Case(
        "CoordinatorActivationStuck",
        _events("activation.failed", "0x40 1x20"),
        (_events("activation.failed", "1x60"), _events("policy.activated", "0+1x60")),
        RUN,
    ),
    *(
        Case(
            "CoordinatorWorkersOut",
            _workers(c),
            (_workers(c, "0x60"), _workers(c, "0x40 1x20")),
            RUN | {"condition": c},
        )
        for c in ("lost", "fenced", "suspect")
    ),
    Case(
        "CoordinatorDriftRising",
        {DRIFT.format("sum"): "0+15x60", DRIFT.format("count"): "0+100x60"},
        ({DRIFT.format("sum"): "0+4x60", DRIFT.format("count"): "0+100x60"},),
        RUN,
    ),
    Case(
        "CoordinatorLeasesExpiring",
        _events("update.expired", "0x20 1x10 2x30"),
        (_events("update.expired", "2x60"), _events("update.committed", "0+1x60")),
        RUN,
    ),
    Case(
        "CoordinatorQuarantineGrowing",
        {QUARANTINED: "0+5x60", ARRIVALS: "0+20x60"},
        (
            {QUARANTINED: "0+5x60", ARRIVALS: "0+100x60"},
            {QUARANTINED: "0+0.2x60", ARRIVALS: "0+1x60"},
            {QUARANTINED: "500x60", ARRIVALS: "0+20x60"},
        ),
        RUN,
    ),
]


def _test(case: Case, series: dict[str, str], fires: bool) -> dict[str, Any]:
    rule = rules()[case.alert]
    summary = re.sub(r"{{ \$labels\.(\w+) }}", lambda m: case.labels[m[1]], rule["annotations"]["summary"])
    alerts = [
        {"exp_labels": rule["labels"] | case.labels, "exp_annotations": rule["annotations"] | {"summary": summary}}
    ]
    return {
        "name": f"{case.alert} {'fires' if fires else 'is quiet'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": case.at, "alertname": case.alert, **({"exp_alerts": alerts} if fires else {})}
        ],
    }


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    tests = [
        test
        for case in CASES
        for test in (_test(case, case.fires, True), *(_test(case, series, False) for series in case.quiet))
    ]
    asked_for = {name: {c.alert for c in CASES if getattr(c, name)} for name in ("fires", "quiet")}
    assert asked_for == {"fires": set(rules()), "quiet": set(rules())}
    suite = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "alerts_test.yml").write_text(json.dumps(suite))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "alerts_test.yml")


def test_a_rule_that_is_wrong_would_be_found(tmp_path: Path) -> None:
    """The suite above is not a formality: with one limit moved it fails."""
    moved = ALERTS.read_text().replace("> 0.1\n", "> 0.2\n", 1)
    assert moved != ALERTS.read_text()
    (tmp_path / "alerts.yml").write_text(moved)
    case = next(case for case in CASES if case.alert == "CoordinatorDriftRising")
    suite = {"rule_files": [str(tmp_path / "alerts.yml")], "tests": [_test(case, case.fires, True)]}
    (tmp_path / "test.yml").write_text(json.dumps(suite))
    with pytest.raises(AssertionError, match="CoordinatorDriftRising"):
        promtool("test", "rules", tmp_path / "test.yml")
