"""What every model on the wire has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Identifier = Annotated[
    str,
    StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@+=-]*$"),
    Field(description="1 to 200 characters: letters, digits and . _ : @ + = -, the first a letter or a digit"),
]
"""An id that a caller chooses: rollout, group, task, worker, update, activation."""

Name = Annotated[
    str,
    StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    Field(description="1 to 100 characters: letters, digits and . _ -, the first a letter or a digit"),
]
"""An id that also appears as one segment of a path."""

Sha256 = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9a-f]{64}$"),
    Field(description="sha256 as 64 lower-case hexadecimal digits"),
]

Version = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1, description="a policy version's number")]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Message = Annotated[str, StringConstraints(max_length=2000)]
Label = Annotated[str, StringConstraints(max_length=200)]
"""A short text. Every string that a caller sends has a limit: pydantic lets half a surrogate pair into one without."""


class WireModel(BaseModel):
    """A model whose unknown fields are refused and whose numbers are finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)
