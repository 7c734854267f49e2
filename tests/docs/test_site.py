"""The documentation as a site: built strictly, and read in a browser that may ask nobody for anything."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, sync_playwright

from tests.docs.blocks import BLOCKS
from tests.docs.pages import DOCS

pytestmark = pytest.mark.xdist_group("site")

DIAGRAMS = [block for block in BLOCKS if block.language == "mermaid"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A link or an anchor that leads nowhere is an error, and so is a page that is in no menu."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=DOCS.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def asked() -> list[str]:
    """What the browser asked other hosts for."""
    return []


@pytest.fixture(scope="module")
def page(site: Path, asked: list[str]) -> Iterator[Page]:
    chromium = shutil.which("chromium")
    assert chromium is not None, "install the package chromium"

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.abort()

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(color_scheme="dark")
        context.route(re.compile(r"^(?!file:|data:|blob:)"), refuse)
        yield context.new_page()
        browser.close()


def test_every_diagram_can_be_drawn(page: Page, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    assert len(DIAGRAMS) > 4
    for block in DIAGRAMS:
        fault = page.evaluate("text => mermaid.parse(text).then(() => '', error => String(error))", block.text)
        assert fault == "", f"{block}: {fault}"


def test_the_pages_come_whole_from_the_folder(page: Page, site: Path, asked: list[str]) -> None:
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    for file in ("index.html", "concepts.html", "guarantees.html", "zh/quick-start.html"):
        page.goto((site / file).as_uri())
        diagrams = DOCS.joinpath(file).with_suffix(".md").read_text(encoding="utf-8").count("```mermaid")
        # The theme draws each into an element of its own, in place of the text.
        page.wait_for_function(f"document.querySelectorAll('div.mermaid').length === {diagrams}")
        assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    assert page.evaluate("[document.documentElement.lang, typeof mermaid]") == ["zh", "undefined"]
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").press_sequentially("retention")
    page.wait_for_selector(".md-search-result__link")
    assert (asked, faults) == ([], [])


def test_no_page_names_another_host(site: Path) -> None:
    """What a browser would load; the texts may name addresses. Namespaces are no addresses."""
    for file in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(\S+?)[\">\s]", file.read_text("utf-8")
        )
        assert not [url for url in loaded if re.match(r"(?:[a-z]+:)?//", url)], file


def test_what_came_from_elsewhere_is_what_the_list_says() -> None:
    rows = re.findall(r"^\| `(\S+)` \|.*\| `([0-9a-f]{64})` \|$", (DOCS / "assets/README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == {
        str(file.relative_to(DOCS / "assets")) for file in (DOCS / "assets").rglob("*.js")
    }
    for name, sha256 in rows:
        assert hashlib.sha256((DOCS / "assets" / name).read_bytes()).hexdigest() == sha256, name
        assert (DOCS / "assets" / name).with_name("LICENSE").exists(), name
