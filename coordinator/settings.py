"""What the server reads from its environment. Each setting is one variable."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of `coordinator serve`, from the environment or from the command line."""

    model_config = SettingsConfigDict(env_prefix="COORDINATOR_", extra="ignore")

    database_url: SecretStr | None = Field(
        None,
        validation_alias="DATABASE_URL",
        description="postgresql://user:password@host/database; left out: an embedded Postgres in the data folder",
    )
    data: Path = Field(
        Path(".data"),
        description="folder of the embedded Postgres, the artifacts, the address and the token file",
    )
    admin_token: SecretStr | None = Field(None, description="an admin token that is to be valid")
    max_body_bytes: int = Field(64 * 2**20, ge=2**16, description="largest request body, artifact files excepted")
    artifact_uris: str = Field(
        "",
        description="URIs below which artifacts may lie instead of being uploaded, with blanks or commas between them: "
        "file:///mnt/policies or what fsspec opens; left out: none",
    )
    pool_size: int = Field(10, ge=1, description="database connections of one server process")
