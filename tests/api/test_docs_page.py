"""The page /docs works on a machine without a way out."""

from __future__ import annotations

import re
from urllib.parse import urljoin

from coordinator.openapi.page import ASSETS
from tests.api.ledger import Api, refused

ROOT = "http://test"


async def test_the_page_names_no_other_host_and_all_that_it_names_is_there(api: Api) -> None:
    response = await api.http.get("/docs")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "//" not in re.sub(r"<!--.*?-->|^\s*//.*$", "", response.text, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"(?:src|href)=\"([^\"]+)\"", response.text)) | set(
        re.findall(r"url: '([^']+)'", response.text)
    )
    kinds = {}
    for address in named:
        asset = await api.http.get(urljoin(f"{ROOT}/docs", address))
        assert (asset.status_code, asset.url.host) == (200, "test"), address
        kinds[address] = asset.headers["content-type"].split(";")[0]
    assert kinds == {
        "docs/assets/favicon.png": "image/png",
        "docs/assets/swagger-ui.css": "text/css",
        "docs/assets/swagger-ui-bundle.js": "text/javascript",
        "openapi.json": "application/json",
    }


async def test_a_browser_may_ask_no_other_host(api: Api) -> None:
    policy = (await api.http.get("/docs")).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("default-src") == "'none'"
    sources = {source for rule in rules.values() for source in rule.split()}
    assert sources == {"'self'", "'none'", "'unsafe-inline'", "data:"}
    assert '"validatorUrl": null' in (await api.http.get("/docs")).text


async def test_what_is_no_asset_is_refused_like_any_address(api: Api) -> None:
    for path in ("/docs/assets/none.js", "/docs/assets/../core.py", "/docs/assets/%2e%2e/core.py", "/redoc"):
        refused(await api.http.get(path), 404, "not_found")


def test_the_assets_read_openapi_3_1() -> None:
    """As Swagger UI does from 5 on; earlier ones show an error in place of the page."""
    assert re.search(rb'"5\.\d+\.\d+"', (ASSETS / "swagger-ui-bundle.js").read_bytes())
