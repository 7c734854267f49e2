"""Artifacts that lie at a URI which everybody can read: where they may lie, and how they are opened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

_URI = re.compile(r"[a-z][a-z0-9+.-]*://[^\x00-\x20\x7f\\?#%*\[\]]+")


class LocationError(ValueError):
    """The URI is not one that the operator allows."""


class Locations:
    """The URIs below which artifacts may lie, as the operator has them. Names of folders, not beginnings of names."""

    def __init__(self, prefixes: Sequence[str] = ()) -> None:
        self.prefixes = tuple(_plain(prefix) for prefix in prefixes)

    @classmethod
    def parse(cls, setting: str) -> Locations:
        """From prefixes with blanks or commas between them. LocationError for one that is no plain URI."""
        return cls([prefix for prefix in re.split(r"[\s,]+", setting) if prefix])

    def check(self, uri: str) -> str:
        """The URI without a slash at its end; LocationError if it is not below an allowed one."""
        plain = _plain(uri)
        if not any(plain == prefix or plain.startswith(f"{prefix}/") for prefix in self.prefixes):
            allowed = ", ".join(self.prefixes) or "none"
            raise LocationError(f"{uri} is not below a prefix that is allowed here ({allowed})")
        return plain

    def open(self, uri: str, name: str) -> BinaryIO:
        """The file of this name in the folder that the URI names, for reading. Blocks.

        LocationError if it may not be read, also where a link leads out of what is allowed; else what fsspec raises.
        """
        plain = self.check(uri)
        if plain.startswith("file://"):
            self._check_links(plain, name)
        return open_at(plain, name)

    def _check_links(self, uri: str, name: str) -> None:
        real = Path(uri.removeprefix("file://"), name).resolve()
        roots = [Path(p.removeprefix("file://")).resolve() for p in self.prefixes if p.startswith("file://")]
        if not any(real.is_relative_to(root) for root in roots):
            raise LocationError(f"{uri}/{name} leads to {real}, which is not allowed here")
        if real.exists() and not real.is_file():  # a FIFO would never end
            raise LocationError(f"{uri}/{name} is no plain file")


def open_at(uri: str, name: str) -> BinaryIO:
    """A file in the folder that a URI names, for reading, whatever fsspec has a filesystem for. Blocks."""
    import fsspec  # on first use: most runs have no artifacts at a URI

    filesystem, root = fsspec.core.url_to_fs(uri)
    return cast(BinaryIO, filesystem.open(f"{root}/{name}", "rb"))


def _plain(uri: str) -> str:
    """A URI that names one folder and can be compared: no `..`, no escapes, no queries, no chains of filesystems."""
    if not _URI.fullmatch(uri) or "::" in uri:
        raise LocationError(f"{uri!r} is not a plain URI such as file:///mnt/policies or s3://bucket/policies")
    scheme, _, path = uri.rstrip("/").partition("://")
    if scheme == "local" or (scheme == "file" and not path.startswith("/")):
        raise LocationError(f"{uri!r} is no absolute path: write file:///...")
    if any(part in ("", ".", "..") for part in path.removeprefix("/").split("/")):
        raise LocationError(f"{uri!r} has a part that is empty, '.' or '..'")
    return f"{scheme}://{path}"
