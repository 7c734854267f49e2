"""What the server reads from its environment. Each setting is one variable."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


def _secret(variable: str, given: SecretStr | None, file: Path | None) -> SecretStr | None:
    """What was given, or what the file holds that was named in its place. Raises ValueError."""
    if file is None:
        return given
    if given is not None:
        raise ValueError(f"{variable} and {variable}_FILE are both set: set one of them")
    try:
        content = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{variable}_FILE names a file that cannot be read: {error}") from error
    if not content:
        raise ValueError(f"{variable}_FILE names an empty file: {file}")
    return SecretStr(content)


class Settings(BaseSettings):
    """Settings of `coordinator serve`, from the environment or from the command line."""

    # Without the input: of a model as a whole that is all variables, secrets among them.
    model_config = SettingsConfigDict(env_prefix="COORDINATOR_", extra="ignore", hide_input_in_errors=True)

    @model_validator(mode="after")
    def _read_secrets(self) -> Settings:
        """Takes secrets from the files that are named in their place."""
        self.database_url = _secret("DATABASE_URL", self.database_url, self.database_url_file)
        self.admin_token = _secret("COORDINATOR_ADMIN_TOKEN", self.admin_token, self.admin_token_file)
        return self

    database_url: SecretStr | None = Field(
        None,
        validation_alias="DATABASE_URL",
        description="postgresql://user:password@host/database; left out: an embedded Postgres in the data folder",
    )
    database_url_file: Path | None = Field(
        None,
        validation_alias="DATABASE_URL_FILE",
        description="a file that holds DATABASE_URL, in its place",
    )
    data: Path = Field(
        Path(".data"),
        description="folder of the embedded Postgres, the artifacts, the address and the token file",
    )
    admin_token: SecretStr | None = Field(None, description="an admin token that is to be valid")
    admin_token_file: Path | None = Field(None, description="a file that holds COORDINATOR_ADMIN_TOKEN, in its place")
    max_body_bytes: int = Field(64 * 2**20, ge=2**16, description="largest request body, artifact files excepted")
    artifact_uris: str = Field(
        "",
        description="URIs below which artifacts may lie instead of being uploaded, with blanks or commas between them: "
        "file:///mnt/policies or what fsspec opens; left out: none",
    )
    pool_size: int = Field(10, ge=1, description="database connections of one server process")
    log: Literal["text", "json"] = Field("text", description="how lines are logged to stderr")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the least that is logged; each request is a line at info"
    )
    metrics_open: bool = Field(False, description="/metrics wants no token: for a port that only your network reaches")
    tracing: bool = Field(False, description="sends OpenTelemetry traces where OTEL_EXPORTER_OTLP_ENDPOINT says")
    requests_per_second: float = Field(
        500, ge=0, description="what one token may send to one server process, twice as many at once; 0: no bound"
    )
    trusted_proxies: str = Field(
        "",
        description="addresses or networks, with commas between them, whose X-Forwarded-For and "
        "X-Forwarded-Proto count; left out: nobody's",
    )
    tls_certificate: Path | None = Field(None, description="certificate chain in PEM; with COORDINATOR_TLS_KEY: https")
    tls_key: Path | None = Field(None, description="the certificate's private key in PEM, without a password")
    drain_seconds: float = Field(
        0, ge=0, description="after SIGTERM it says that it is not ready, and serves on for so long"
    )
