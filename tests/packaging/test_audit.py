"""What can be held of the dependencies without a network: exact pins, no pre-release without a reason, known licences.

`make audit` asks the vulnerability service, where there is one.
"""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("server.lock", "cpu.lock")

PRE_RELEASES = {
    "cwevals": "of cpu.lock only; nothing requires it any more, and it goes with the next renewal",
    "opentelemetry-exporter-http-transport": "OpenTelemetry numbers all that is not its API or SDK as a beta",
    "opentelemetry-exporter-otlp-common": "as above",
    "opentelemetry-exporter-prometheus": "as above",
    "opentelemetry-instrumentation": "as above",
    "opentelemetry-instrumentation-asgi": "as above",
    "opentelemetry-instrumentation-fastapi": "as above",
    "opentelemetry-semantic-conventions": "as above",
    "opentelemetry-util-http": "as above",
}

ALLOWED = {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MPL-2.0", "PSF-2.0"}
"""Licences, by SPDX, of what the server's image may be made of. MPL-2.0 binds its own files only."""

SPELLINGS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}


def pins(lock: str) -> dict[str, str]:
    """Name and version of each line that is no comment."""
    found = {}
    for line in (ROOT / "requirements" / lock).read_text().splitlines():
        if line and not line.startswith("#"):
            exact = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.+!]+)", line)
            assert exact, f"{lock}: {line!r} does not name one version"
            assert canonicalize_name(exact[1]) not in found, f"{lock} pins {exact[1]} twice"
            found[canonicalize_name(exact[1])] = exact[2]
    return found


def licences(name: str) -> set[str]:
    """What a distribution says of its licence, by SPDX where the spelling is known."""
    told = metadata(name)
    if expression := told.get("License-Expression"):
        return set(re.split(r"\s+(?:AND|OR)\s+|[()]", expression)) - {""}
    classifiers = [c.split(" :: ")[-1] for c in told.get_all("Classifier") or [] if c.startswith("License ::")]
    return {SPELLINGS.get(each, each) for each in classifiers or [told.get("License") or "none stated"]}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_names_one_release(lock: str) -> None:
    early = {name for name, version in pins(lock).items() if Version(version).is_prerelease}
    assert early <= PRE_RELEASES.keys()


def test_every_exception_is_still_one() -> None:
    early = {n for lock in LOCKS for n, version in pins(lock).items() if Version(version).is_prerelease}
    assert early == PRE_RELEASES.keys()


def test_the_server_is_made_of_what_may_be_passed_on() -> None:
    foreign = {name: licences(name) - ALLOWED for name in pins("server.lock")}
    assert {name: found for name, found in foreign.items() if found} == {}


def test_a_licence_that_is_not_on_the_list_is_found() -> None:
    assert not {"GPL-3.0-or-later", "none stated"} & ALLOWED
    assert licences("orjson") == {"MPL-2.0", "Apache-2.0", "MIT"}
