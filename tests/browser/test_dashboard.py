"""The dashboard in a real browser: it shows what the API says, as it changes, to everybody, and nothing runs in it that
was not put there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from coordinator.client import Coordinator
from coordinator.wire.runs import CreateRun, FirstPolicy
from tests.browser.scene import HOSTILE, RUN, Scene
from tests.browser.watching import Watched, watched
from tests.client.runs import BASE, CONTRACT
from tests.client.server_process import ServerProcess

# One browser and one run: what one test changes, a later one sees.
pytestmark = pytest.mark.xdist_group("browser")

HOME = f"#/runs/{RUN}"
VIEWS = [
    "#/runs",
    HOME,
    *(f"{HOME}/{page}" for page in ("workers", "policies", "activations", "updates", "rollouts", "events", "failures")),
    f"{HOME}/policies/1",
    f"{HOME}/activations/to-3",
    f"{HOME}/updates/step-2",
    f"{HOME}/rollouts/mixed:1.0",
]
AXE = (Path(__file__).parent / "vendor" / "axe-core-4.14.1" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def night(browser: Browser, server: ServerProcess, viewer: str, scene: Scene) -> Iterator[Watched]:
    """A page of a viewer who has signed in."""
    with watched(browser, server.url, viewer) as found:
        yield found


def row(page: Page, table: str, name: str) -> Locator:
    """The row of a table whose heading is `name`."""
    heading = page.get_by_role("rowheader", name=name, exact=True)
    return page.get_by_role("region", name=table, exact=True).get_by_role("row").filter(has=heading)


def shown(page: Page, place: str) -> None:
    """Waits until the view at this place has been read."""
    expect(page.locator("main h1").first).to_be_visible()
    expect(page.locator("main [aria-busy]")).to_have_count(0)
    expect(page.locator("main .panel").first).to_be_visible()


def test_the_address_leads_to_it_and_its_files_are_guarded(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for path in ("/", "/dashboard"):
            assert http.get(path).headers["location"] == "dashboard/"
        page = http.get("/dashboard/")
        policy = page.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert (page.headers["cache-control"], page.headers["x-content-type-options"]) == ("no-cache", "nosniff")
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page.text)
        again = http.get("/dashboard/app.js", headers={"If-None-Match": http.get("/dashboard/app.js").headers["etag"]})
        assert (again.status_code, again.headers["cache-control"]) == (304, "no-cache")
        library = http.get("/dashboard/vendor/htm-3.1.1/standalone.module.js")
        assert "immutable" in library.headers["cache-control"]
        for path in ("/dashboard/none.js", "/dashboard/..%2fpages.py", "/dashboard/%2e%2e/pages.py"):
            assert http.get(path).status_code == 404, path


def test_signing_in_and_out(browser: Browser, server: ServerProcess, viewer: str, scene: Scene) -> None:
    with watched(browser, server.url, None, may_refuse=frozenset({401})) as night:
        page = night.open(f"{HOME}/rollouts/mixed:1.0")
        field = page.get_by_label("Token")
        field.fill("rct_000000000000_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown, has expired or was revoked")
        field.fill(viewer)
        field.press("Enter")
        # A colleague's address is kept while one signs in.
        expect(page.get_by_role("heading", name="Rollout mixed:1.0")).to_be_visible()
        assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
        assert not [url for url in night.requests if viewer in url]
        assert viewer not in page.content() + page.url
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_focused()
        assert page.evaluate("sessionStorage.getItem('coordinator.token')") is None


def test_a_token_for_one_run_opens_it(
    browser: Browser, server: ServerProcess, coordinator: Coordinator, scene: Scene
) -> None:
    bound = coordinator.create_token("bound", "reward", run_id=RUN).token
    with watched(browser, server.url, None) as night:
        page = night.open()
        page.get_by_label("Token").fill(bound)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name=RUN, exact=True)).to_be_visible()
        assert page.url.endswith(HOME)
        night.may_refuse = frozenset({403})
        night.open("#/runs/another")
        expect(page.locator("main")).to_contain_text("or the token is bound to another one")


def test_a_token_that_is_revoked_leads_back_to_signing_in(
    browser: Browser, server: ServerProcess, coordinator: Coordinator, scene: Scene
) -> None:
    created = coordinator.create_token("leaver", "viewer")
    with watched(browser, server.url, created.token, may_refuse=frozenset({401})) as night:
        page = night.open(f"{HOME}/workers")
        expect(page.get_by_role("status")).to_have_text("Live")
        coordinator.revoke_token(created.token_id)
        expect(page.get_by_role("alert")).to_contain_text("it has expired or was revoked")
        expect(page.get_by_label("Token")).to_be_focused()


def test_the_overview_shows_what_the_api_says(night: Watched, scene: Scene) -> None:
    page = night.open(HOME)
    shown(page, HOME)
    counts = scene.run.counts().rollouts
    for stage in ("generated", "rewarded", "reserved", "consumed"):
        expect(page.locator(".flow li").filter(has_text=re.compile(stage, re.IGNORECASE)).locator(".big")).to_have_text(
            str(counts[stage])
        )
    diagnosis = page.locator(".diagnosis")
    (blocker,) = scene.run.diagnosis().blockers
    expect(diagnosis).to_contain_text("Activation open")
    expect(diagnosis).to_contain_text(blocker.next_step)
    expect(diagnosis).to_contain_text("gpu-3 (fenced: verify of version 3 failed)")
    expect(diagnosis).to_contain_text("suspect gpu-1")
    expect(page.locator(".pointer")).to_contain_text("v2")

    statistics = scene.run.statistics()
    for each in statistics.refused:
        name = each.reason.replace("_", " ")
        expect(row(page, "Refusals by reason", name).get_by_role("cell").last).to_have_text(str(each.rollouts))
    (rejected,) = statistics.rejected
    expect(row(page, "Rejected arrivals", rejected.worker_id)).to_contain_text(rejected.last_detail)
    for version in statistics.versions:
        cells = row(page, "By version", f"v{version.version}").get_by_role("cell")
        expect(cells.nth(0)).to_have_text(str(version.arrived))
        expect(cells.nth(7)).to_have_text(str(version.judged))
    expect(page.locator(".plot canvas")).to_have_count(3)

    page.get_by_text("Drift, mean |d log-prob| as a table").click()
    drifts = page.get_by_role("region", name="Drift, mean |d log-prob|", exact=True).get_by_role("row")
    expect(drifts.filter(has_text=re.compile("^0.3 ?8$"))).to_have_count(1)
    page.get_by_label("Made by").select_option("v2")
    expect(drifts.filter(has_text=re.compile("^0.3 ?0$"))).to_have_count(1)
    assert page.url.endswith("version=2")


def test_the_list_of_runs_says_how_each_stands(night: Watched, scene: Scene) -> None:
    page = night.open()
    expect(row(page, "Runs", RUN)).to_contain_text("Activation open")
    page.get_by_role("link", name=RUN).click()
    expect(page.get_by_role("heading", name=RUN, exact=True)).to_be_visible()


def test_workers_updates_and_failures(night: Watched, scene: Scene) -> None:
    page = night.open(f"{HOME}/workers")
    for worker in scene.run.workers():
        line = row(page, "Workers", worker.worker_id)
        expect(line).to_contain_text(worker.state)
        expect(line.get_by_role("cell").nth(2)).to_have_text(
            re.compile(r"^\W$" if worker.version is None else f"^v{worker.version}$")
        )
        if worker.drift is not None:
            expect(line.get_by_role("cell").nth(3)).to_contain_text(f"{float(f'{worker.drift:.3g}')} of")
        for told in filter(None, (worker.fenced_reason, worker.suspect_reason)):
            expect(line).to_contain_text(told)
    night.open(f"{HOME}/updates")
    for update in scene.run.updates():
        expect(row(page, "Updates", update.update_id)).to_contain_text(update.state)
    expect(row(page, "Updates", "step-3").locator("time").first).to_contain_text("in ")
    night.open(f"{HOME}/failures")
    expect(page.get_by_role("region", name="Failures").get_by_role("row")).to_have_count(
        1 + len([*scene.run.failures()])
    )
    page.get_by_label("Stage").select_option("reward")
    expect(page.get_by_role("region", name="Failures").get_by_role("row")).to_have_count(2)


def test_lineage_leads_from_an_update_to_rollouts_to_a_version_and_on(night: Watched, scene: Scene) -> None:
    page = night.open(f"{HOME}/updates/step-2")
    lineage = scene.run.lineage("step-2")
    members = page.get_by_role("region", name="Rollouts of the update").get_by_role("row")
    expect(members).to_have_count(1 + len(lineage.members))
    expect(page.get_by_role("region", name="Refused rollouts").get_by_role("row")).to_have_count(
        1 + len(lineage.refusals)
    )
    page.get_by_role("link", name="mixed:1.0").click()
    expect(page.get_by_role("heading", name="Rollout mixed:1.0")).to_be_visible()
    page.get_by_role("region", name="Spans").get_by_role("link", name="v1").click()
    expect(page.get_by_role("heading", name="Version 1")).to_be_visible()
    expect(page.get_by_role("region", name="Updates that used its rollouts")).to_contain_text("step-2")
    page.get_by_role("list", name="Lineage").get_by_role("link", name="step-1").click()
    expect(page.get_by_role("heading", name="Update step-1")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Version 1")).to_be_visible()


def test_a_rollout_is_opened_down_to_its_tokens(night: Watched, scene: Scene) -> None:
    page = night.open(f"{HOME}/rollouts")
    page.get_by_label("Open by id").fill("mixed:1.0")
    page.get_by_label("Open by id").press("Enter")
    evidence, history = scene.run.evidence("mixed:1.0"), scene.run.history("mixed:1.0").transitions
    tokens = page.locator(".tokens > li")
    expect(tokens).to_have_count(len(evidence.token_ids))
    assert tokens.locator("> span").all_inner_texts() == [str(token) for token in evidence.token_ids]
    assert [
        ("masked" not in (each or "")) for each in (token.get_attribute("class") for token in tokens.all())
    ] == evidence.action_mask
    action = evidence.action_mask.index(True)
    expect(tokens.nth(action)).to_have_attribute("title", re.compile(rf"position {action}, .*version 0"))
    expect(tokens.nth(32)).to_contain_text("v1")
    expect(page.get_by_role("region", name="History").get_by_role("row")).to_have_count(1 + len(history))
    judged = page.locator("section", has=page.get_by_role("heading", name="Lag and drift"))
    (drift,) = [step.drift for step in history if step.drift is not None]
    expect(judged).to_contain_text(f"{float(f'{drift:.3g}')} of 0.2")
    expect(judged).to_contain_text("Effective sample size")
    [measured] = scene.run.differences("mixed:1.0").measured
    difference = measured.differences[action]
    assert difference is not None
    expect(tokens.nth(action).locator("small")).to_have_text(f"{difference:+.2g}")
    expect(page.get_by_text("Largest differences:")).to_be_visible()
    page.get_by_label("Coloured by").select_option("behaviour log-prob")
    expect(page.get_by_text("Least expected:")).to_be_visible()
    expect(tokens.nth(action).locator("small")).to_have_text(f"{evidence.behavior_log_probs[action]:.2g}")


def test_rollouts_are_found_by_state_and_reason(night: Watched, scene: Scene) -> None:
    page = night.open(f"{HOME}/rollouts?state=quarantined&reason=worker_not_acked")
    rows = page.get_by_role("region", name="Rollouts", exact=True).get_by_role("row")
    expect(rows).to_have_count(5)
    page.get_by_label("State").select_option("reward failed")
    expect(page.get_by_text("No rollout meets these filters.")).to_be_visible()
    page.get_by_label("Reason").fill("")
    page.get_by_role("button", name="Show").click()
    expect(rows).to_have_count(2)


def test_what_is_empty_says_what_to_do_next(night: Watched, coordinator: Coordinator) -> None:
    coordinator.create_run(
        CreateRun(run_id="quiet", contract=CONTRACT, vocab_size=100, policy=FirstPolicy(base_model=BASE))
    )
    page = night.open("#/runs/quiet")
    expect(page.locator("main")).to_contain_text("worker-agent run --run quiet")
    expect(page.locator(".diagnosis")).to_contain_text("No workers")
    expect(page.locator(".diagnosis")).to_contain_text("Start a worker agent.")
    for place, told in {
        "updates": "No update was opened yet",
        "rollouts": "No rollout has arrived yet",
        "activations": "No version was to be activated yet",
        "failures": "No failure is recorded",
    }.items():
        night.open(f"#/runs/quiet/{place}")
        expect(page.locator("main")).to_contain_text(told)


def test_a_change_appears_without_a_reload(night: Watched, scene: Scene) -> None:
    page = night.open(HOME)
    stages = page.get_by_role("region", name="Workers of the activation")
    expect(row(page, "Workers of the activation", "gpu-2")).to_contain_text("downloading")
    page.evaluate("window.stayed = true")
    scene.workers[2].stage(3, "verifying")
    expect(row(page, "Workers of the activation", "gpu-2")).to_contain_text("verifying")
    expect(page.get_by_role("region", name="Events").get_by_role("row").nth(1)).to_contain_text("verifying")
    for worker in scene.workers[1:]:
        worker.ack(3, scene.refs[3].artifact_hash)
    expect(page.locator(".pointer")).to_contain_text("v3")
    expect(stages).to_have_count(0)
    expect(page.locator(".diagnosis")).to_contain_text("Nothing is in the way")
    assert page.evaluate("window.stayed")


def test_a_hidden_tab_asks_for_nothing(night: Watched) -> None:
    night.page.clock.install()
    page = night.open(f"{HOME}/workers")
    expect(page.get_by_role("status")).to_have_text("Live")
    hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
    page.evaluate(hide.format("true") + "document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.get_by_role("status")).to_have_text("Paused while this tab is hidden")
    asked = len(night.requests)
    page.clock.fast_forward(60_000)  # longer than heartbeats are read after one another
    assert len(night.requests) == asked
    page.evaluate(hide.format("false") + "document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.get_by_role("status")).to_have_text("Live")
    assert len(night.requests) > asked


def test_a_lost_connection_is_told_and_taken_up_where_it_was(
    night: Watched, server: ServerProcess, scene: Scene, viewer: str
) -> None:
    begun_after: list[str | None] = []
    night.page.on(
        "request",
        lambda asked: begun_after.append(asked.headers.get("last-event-id")) if "/events/stream" in asked.url else None,
    )
    page = night.open(f"{HOME}/events")
    expect(page.get_by_role("status")).to_have_text("Live")
    newest = scene.run.view().event_no
    night.may_be_away = True
    night.may_refuse = frozenset({503})
    server.kill()
    expect(page.get_by_role("status")).to_contain_text("Connection lost at")
    server.start()
    expect(page.get_by_role("status")).to_have_text("Live", timeout=30_000)
    assert (begun_after[0], begun_after[-1]) == (None, str(newest))
    scene.run.fence("gpu-0", "looked at after the restart")
    numbers = page.get_by_role("region", name="Events").locator("tbody td:first-child")
    expect(numbers.first).to_have_text(str(scene.run.view().event_no))
    told = [int(number) for number in numbers.all_inner_texts()]
    assert told == list(range(told[0], told[-1] - 1, -1))
    assert len(told) > 50


def test_with_the_keyboard_alone(night: Watched) -> None:
    page = night.open(HOME)
    shown(page, HOME)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Window")).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_have_count(0)  # one who is in a field types
    page.locator("main").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    for keys, heading in (("gw", "Workers"), ("gr", "Rollouts"), ("gl", "Runs")):
        for key in keys:
            page.keyboard.press(key)
        expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        expect(page.locator("main")).to_be_focused()
    page.get_by_role("region", name="Runs", exact=True).focus()  # a table that is too wide is scrolled with the arrows
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('tbody') !== null")
    page.keyboard.press("Enter")
    expect(page.get_by_role("navigation")).to_be_visible()


def test_on_a_phone_nothing_is_wider_than_the_screen(
    browser: Browser, server: ServerProcess, viewer: str, scene: Scene
) -> None:
    with watched(browser, server.url, viewer, viewport={"width": 360, "height": 740}, has_touch=True) as night:
        for place in VIEWS:
            page = night.open(place)
            shown(page, place)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, place


def test_dark_and_light(browser: Browser, server: ServerProcess, viewer: str, scene: Scene) -> None:
    def brightness(page: Page) -> int:
        colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    with watched(browser, server.url, viewer, color_scheme="dark") as night:
        page = night.open(HOME)
        shown(page, HOME)
        assert brightness(page) < 120
        page.get_by_role("button", name="Light").click()
        assert brightness(page) > 600
        page.reload()
        shown(page, HOME)
        assert brightness(page) > 600


def test_what_came_from_outside_is_text(night: Watched, scene: Scene) -> None:
    for place in VIEWS:
        page = night.open(place)
        shown(page, place)
        assert page.locator("main img, main script, main iframe").count() == 0, place
    for place, table in (("workers", "Workers"), ("failures", "Failures"), ("events", "Events")):
        page = night.open(f"{HOME}/{place}")
        expect(page.get_by_role("region", name=table, exact=True)).to_contain_text(HOSTILE)
    # As a filter of an address that somebody sends, too.
    page = night.open(f"{HOME}/rollouts?reason=%22%3E%3Cimg%20src%3Dx%20onerror%3Dalert(3)%3E&state=offline")
    expect(page.get_by_text("No rollout meets these filters.")).to_be_visible()
    night.may_refuse = frozenset({404, 422})
    for place in (
        "#/runs/%3Cimg%20src=x%20onerror=alert(4)%3E",
        "#/runs/%",
        f"{HOME}/rollouts/%3Cscript%3E",
        "#/a/b/c/d",
    ):
        page = night.open(place)
        expect(page.locator("main h1")).to_be_visible()
        assert page.locator("main img, main script").count() == 0, place


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    browser: Browser, server: ServerProcess, viewer: str, scene: Scene, scheme: Any
) -> None:
    # The policy lets no script in but the page's own: axe is put in by the browser's tools.
    with watched(browser, server.url, viewer, color_scheme=scheme, reduced_motion="reduce") as night:
        for place in VIEWS if scheme == "light" else (HOME, f"{HOME}/rollouts/mixed:1.0", f"{HOME}/activations/to-3"):
            page = night.open(place)
            shown(page, place)
            page.evaluate(AXE)
            found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            faults = {
                f"{fault['id']}: {node['html'][:150]} {node['failureSummary']}"
                for fault in found["violations"]
                if fault["impact"] in ("serious", "critical")
                for node in fault["nodes"]
            }
            assert not faults, f"{place}: {faults}"
