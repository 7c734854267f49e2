"""Bearer tokens and the roles that they carry."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from coordinator.wire.base import Name, WireModel

Role = Literal["admin", "trainer", "worker", "reward", "viewer"]


class CreateToken(WireModel):
    """A token of one role. Without a run it counts for every run; a worker's is bound to one worker id."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"role": {"const": "worker"}}},
            "then": {"required": ["worker_id"], "properties": {"worker_id": {"type": "string"}}},
            "else": {"properties": {"worker_id": {"type": "null"}}},
            "allOf": [
                {
                    "if": {"properties": {"role": {"const": "admin"}}},
                    "then": {"properties": {"run_id": {"type": "null"}}},
                }
            ],
        }
    )

    name: Name
    role: Role
    run_id: Name | None = Field(None, description="the only run that it counts for, which may be created later")
    worker_id: Name | None = Field(None, description="the only worker id that a worker's token counts for")
    expires_at: datetime | None = Field(None, description="left out: never")

    @field_validator("expires_at", mode="before")
    @classmethod
    def _expiry_is_a_time(cls, value: object) -> object:
        # A bare number would be taken for seconds or milliseconds since 1970, whichever seems likelier.
        if isinstance(value, datetime | None) or (isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d[Tt ]", value)):
            return value
        raise ValueError("expires_at is an RFC 3339 time, such as 2030-01-31T12:00:00Z")

    @model_validator(mode="after")
    def _worker_is_bound(self) -> CreateToken:
        if (self.role == "worker") != (self.worker_id is not None):
            raise ValueError("a worker's token, and only a worker's, names its worker_id")
        if self.role == "admin" and self.run_id is not None:
            raise ValueError("an admin's token is not bound to a run")
        if self.expires_at is not None and self.expires_at.tzinfo is None:
            raise ValueError("expires_at needs a time zone")
        return self


class TokenView(WireModel):
    """A token without its secret."""

    token_id: str
    name: str
    role: Role
    run_id: str | None
    worker_id: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = Field(None, description="to the minute; none: never, or before this was recorded")


class CreatedToken(TokenView):
    """A new token; the secret is shown this once and kept nowhere."""

    token: str = Field(description="send it as 'Authorization: Bearer <token>'")


class TokenList(WireModel):
    """Tokens in the order of their creation."""

    tokens: list[TokenView]
