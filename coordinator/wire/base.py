"""What every model on the wire has in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

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
Real = Annotated[float, Field(strict=True)]
"""A number. Neither a text that spells one nor true or false."""

Flag = Annotated[bool, Field(strict=True)]
"""true or false, and nothing that is taken for one of them."""

Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
"""Any text but a NUL, which Postgres cannot store. Each use sets its limits."""

Message = Annotated[Text, StringConstraints(max_length=2000)]
Label = Annotated[Text, StringConstraints(max_length=200)]
"""A short text. Every string that a caller sends has a limit: pydantic lets half a surrogate pair into one without."""

LARGEST_BATCH = 4096
"""Rollouts or rewards in one call."""

LARGEST_RESERVATION = 16_384
"""Rollouts that one call reserves."""


class WireModel(BaseModel):
    """A model whose unknown fields are refused and whose numbers are finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown_fields(cls, data: Any) -> Any:
        # Each becomes an error of about 1.4 kB: 5 MB of them took 700 MB.
        # The first comparison is for speed: this is called for every verdict of an answer, too.
        if isinstance(data, dict) and len(data) > 100 and len(data) > len(cls.model_fields) + 100:
            raise ValueError(f"{len(data)} fields, of which {len(cls.model_fields)} are known")
        return data

    def request_body(self) -> bytes:
        """The JSON to send. What is as it would be if it were left out is left out: an older server, which would
        refuse a field that it does not know, takes the request as long as nobody uses what is new."""
        return self.model_dump_json(exclude_defaults=True).encode()
