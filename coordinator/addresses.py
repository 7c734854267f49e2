"""What stands in an address: ids in paths, filters and cursors in queries.

An id that no call could have made is refused as such, before anything is looked up.
"""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Path, Query
from pydantic import AwareDatetime, BeforeValidator

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_IDENTIFIER = r"^[A-Za-z0-9][A-Za-z0-9._:@+=-]*$"
_FILE = r"^[^\x00-\x1f\x7f\\/]+(/[^\x00-\x1f\x7f\\/]+)*$"

RunId = Annotated[str, Path(min_length=1, max_length=100, pattern=_NAME, description="the run's id")]
WorkerId = Annotated[str, Path(min_length=1, max_length=100, pattern=_NAME, description="the worker's id")]
TokenId = Annotated[
    str,
    Path(min_length=1, max_length=100, pattern=_NAME, description="the token's id; its secret is no part of it"),
]
RolloutId = Annotated[str, Path(min_length=1, max_length=200, pattern=_IDENTIFIER, description="the rollout's id")]
UpdateId = Annotated[
    str,
    Path(min_length=1, max_length=200, pattern=_IDENTIFIER, description="the update's id, of the trainer's choice"),
]
ActivationId = Annotated[
    str, Path(min_length=1, max_length=200, pattern=_IDENTIFIER, description="the activation's id")
]
RewindId = Annotated[
    str,
    Path(min_length=1, max_length=200, pattern=_IDENTIFIER, description="the rewind's id, of the caller's choice"),
]
RollbackId = Annotated[
    str,
    Path(min_length=1, max_length=200, pattern=_IDENTIFIER, description="the rollback's id, of the caller's choice"),
]
VersionNumber = Annotated[int, Path(ge=0, le=2**31 - 1, description="the policy version's number")]
FileName = Annotated[
    str,
    Path(
        min_length=1,
        max_length=255,
        pattern=_FILE,
        description="the file's name in the manifest, with its folders; a slash may stand as it is or as %2F",
    ),
]


def _rfc3339(value: object) -> object:
    # A bare number would be taken for seconds or milliseconds since 1970, whichever seems likelier.
    if isinstance(value, str) and not re.match(r"\d{4}-\d\d-\d\d[Tt ]", value):
        raise ValueError("send an RFC 3339 time, such as 2030-01-31T12:00:00Z")
    return value


VersionFilter = Annotated[
    int | None, Query(ge=0, le=2**31 - 1, description="with tokens of this policy version", examples=[17])
]
NameFilter = Annotated[
    str | None, Query(min_length=1, max_length=100, pattern=_NAME, description="of this id", examples=["gpu-0"])
]
IdFilter = Annotated[
    str | None,
    Query(min_length=1, max_length=200, pattern=_IDENTIFIER, description="of this id", examples=["gsm8k-17"]),
]
HashFilter = Annotated[
    str | None,
    Query(pattern=r"^[0-9a-f]{64}$", description="of this sha256", examples=["5e" * 32]),
]
TextFilter = Annotated[
    str | None, Query(max_length=200, pattern=r"^[^\x00]*$", description="just this text", examples=["policy_drift"])
]
_NOON = "2026-03-02T12:00:00Z"
From = Annotated[
    AwareDatetime | None,
    BeforeValidator(_rfc3339),
    Query(description="at this time or later, RFC 3339", examples=[_NOON]),
]
Before = Annotated[
    AwareDatetime | None,
    BeforeValidator(_rfc3339),
    Query(description="before this time, RFC 3339", examples=[_NOON]),
]
AfterNumber = Annotated[int, Query(ge=0, le=2**53, description="continue after this number", examples=[0])]
AfterText = Annotated[
    str,
    Query(
        max_length=300,
        pattern=r"^[^\x00]*$",
        description="next_after of the answer to be continued",
        examples=["gsm8k-17:1:1"],
    ),
]
AfterUpdate = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=200,
        pattern=_IDENTIFIER,
        description="next_after of the answer to be continued",
        examples=["update-17"],
    ),
]
NewestFirst = Annotated[bool, Query(description="true: the newest comes first", examples=[True])]
Limit = Annotated[int, Query(ge=1, le=1000, description="how many at most", examples=[100])]
