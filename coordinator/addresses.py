"""Ids in a path that name something new."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

NewName = Annotated[
    str,
    Path(
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="a new id, or one in use",
    ),
]
NewIdentifier = Annotated[
    str,
    Path(
        min_length=1,
        max_length=200,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@+=-]*$",
        description="a new id, or one in use",
    ),
]
