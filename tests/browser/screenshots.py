"""Takes the pictures of docs/dashboard.md from a running coordinator: `python tests/browser/screenshots.py RUN`.

The address and a token come from COORDINATOR_URL and COORDINATOR_TOKEN. Start it while the run trains: it waits for an
activation that is under way, and takes the others as the run stands.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import httpx
from playwright.sync_api import Browser, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as NotInTime

DOCS = Path(__file__).parents[2] / "docs" / "dashboard"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
WIDE, PHONE = {"width": 1280, "height": 1150}, {"width": 360, "height": 1500}


def opened(browser: Browser, url: str, token: str, place: str, *, dark: bool = False, phone: bool = False) -> Page:
    """A page that has read everything it shows."""
    context = browser.new_context(
        viewport=PHONE if phone else WIDE, color_scheme="dark" if dark else "light", device_scale_factor=1
    )
    page = context.new_page()
    page.add_init_script(f"sessionStorage.setItem('coordinator.token', {token!r})")
    page.goto(f"{url}/dashboard/{place}")
    page.locator("main .panel").first.wait_for()
    expect(page.locator("main [aria-busy]")).to_have_count(0)
    page.wait_for_timeout(500)  # the charts are drawn in the next frames
    return page


def of_most_drift(url: str, token: str, run: str) -> str:
    """The rollout that the newest updates bound at the greatest drift, which has most to tell."""
    with httpx.Client(
        base_url=f"{url}/v1/runs/{run}", headers={"authorization": f"Bearer {token}"}, timeout=30, trust_env=False
    ) as http:
        updates = http.get("/updates", params={"newest_first": True, "limit": 5}).json()["updates"]
        members = [
            member
            for update in updates
            for member in http.get(f"/updates/{quote(update['update_id'])}/lineage").json()["members"]
        ]
    if not members:
        raise SystemExit(f"run {run} has no update with rollouts yet")
    rollout_id: str = max(members, key=lambda member: member["drift"] or 0.0)["rollout_id"]
    return rollout_id


def take(url: str, token: str, run: str, into: Path, activation_seconds: float) -> None:
    """Writes overview, activation, rollout, dark and phone as PNG."""
    into.mkdir(parents=True, exist_ok=True)
    home = f"#/runs/{run}"
    rollout = f"{home}/rollouts/{quote(of_most_drift(url, token, run), safe='')}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = opened(browser, url, token, home)
        try:
            # A worker is at work on the new version: its stage is neither the first nor done.
            page.locator(".rungs .now").first.wait_for(timeout=activation_seconds * 1000)
        except NotInTime:
            raise SystemExit(f"no activation was under way within {activation_seconds:.0f} s") from None
        page.screenshot(path=into / "activation.png")
        for name, place, how in (
            ("overview", home, {}),
            ("rollout", rollout, {}),
            ("dark", home, {"dark": True}),
            ("phone", home, {"phone": True}),
        ):
            page = opened(browser, url, token, place, **how)
            page.screenshot(path=into / f"{name}.png", full_page=name in ("overview", "rollout"))
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="the run to show")
    parser.add_argument("--url", default=os.environ.get("COORDINATOR_URL"), help="of the coordinator")
    parser.add_argument("--into", type=Path, default=DOCS, help="the folder of the pictures")
    parser.add_argument("--activation-seconds", type=float, default=300, help="how long to wait for an activation")
    given = parser.parse_args()
    if not given.url or "COORDINATOR_TOKEN" not in os.environ:
        parser.error("set COORDINATOR_URL and COORDINATOR_TOKEN")
    take(given.url.rstrip("/"), os.environ["COORDINATOR_TOKEN"], given.run, given.into, given.activation_seconds)
