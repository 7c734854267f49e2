"""A browser that nothing escapes: errors, violations of the policy, requests that leave the server, dialogs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """This machine's Chromium, without a window."""
    path = shutil.which("chromium")
    assert path is not None, "install chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page of a context of its own, signed in if a token is given, and what went wrong in it."""

    page: Page
    url: str
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    may_refuse: frozenset[int] = frozenset()
    may_be_away: bool = False

    def open(self, place: str = "") -> Page:
        """Goes to the dashboard, at this place behind the '#'."""
        self.page.goto(f"{self.url}/dashboard/{place}")
        return self.page

    def _said(self, message: ConsoleMessage) -> None:
        # The browser says of each refused request that it was refused: `_answered` looks at those.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.faults.append(f"{message.type} on the console: {message.text}")

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)
        if not request.url.startswith(self.url):
            self.faults.append(f"a request to {request.url}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400 and response.status not in self.may_refuse:
            self.faults.append(f"{response.status} of {response.url}")

    def _cut(self, request: Request) -> None:
        if not self.may_be_away and request.failure != "net::ERR_ABORTED":
            self.faults.append(f"{request.failure} of {request.url}")

    def listen(self) -> None:
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.faults.append(f"an error that nobody caught: {error}"))
        self.page.on("dialog", lambda dialog: self.faults.append(f"a dialog: {dialog.message}"))
        self.page.on("request", self._asked)
        self.page.on("response", self._answered)
        self.page.on("requestfailed", self._cut)


@contextlib.contextmanager
def watched(
    browser: Browser, url: str, token: str | None, *, may_refuse: frozenset[int] = frozenset(), **context: Any
) -> Iterator[Watched]:
    """A fresh page; what went wrong in it is an AssertionError at the end."""
    fresh = browser.new_context(**context)
    try:
        page = fresh.new_page()
        page.set_default_timeout(15_000)
        if token is not None:
            page.add_init_script(
                f"sessionStorage.getItem('signed') ?? sessionStorage.setItem('coordinator.token', '{token}');"
                "sessionStorage.setItem('signed', 'once')"
            )
        found = Watched(page, url, may_refuse=may_refuse)
        found.listen()
        yield found
        assert not found.faults, found.faults
    finally:
        fresh.close()
