"""Settings of `worker-agent run` from file, environment and command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from worker_agent.configuration import Configuration, SettingsError, configure
from worker_agent.run_settings import MASK, Settings, TokenError, option, variable
from worker_agent.settings import EngineName

NEEDED = {"run": "sums", "worker_id": "gpu-0", "model": "/m", "tasks": "-"}
ANOTHER: dict[str, Any] = {
    "run": "other",
    "worker_id": "gpu-1",
    "model": "/n",
    "tasks": "http://127.0.0.1:9/tasks",
    "tasks_token": "t-secret",
    "url": "http://127.0.0.1:8000",
    "token": "secret",
    "token_file": "/run/secrets/token",
    "engine": "vllm-server",
    "engine_url": "http://127.0.0.1:8001",
    "threads": 2,
    "data": "/data",
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "lora_target_modules": ["q_proj", "o_proj"],
    "max_lora_rank": 64,
    "max_tokens": 512,
    "stop": ["\n", "END of it"],
    "groups_at_once": 8,
    "across_versions": "finish",
    "metrics_host": "0.0.0.0",
    "metrics_port": 0,
}
"""For every setting a value that is not its default."""


def write(folder: Path, content: Any) -> Path:
    path = folder / "worker.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def as_text(name: str) -> str:
    return json.dumps(ANOTHER[name]) if isinstance(ANOTHER[name], list) else str(ANOTHER[name])


def plain(configuration: Configuration, name: str) -> Any:
    value = configuration.settings.model_dump()[name]
    if hasattr(value, "get_secret_value"):
        return value.get_secret_value()
    return list(value) if isinstance(value, tuple) else value if value is None or type(value) is int else str(value)


def refused(*arguments: Any) -> list[str]:
    with pytest.raises(SettingsError) as raised:
        configure(*arguments)
    return str(raised.value).splitlines()


def test_every_setting_is_tried_here() -> None:
    assert ANOTHER.keys() == Settings.model_fields.keys()


@pytest.mark.parametrize("name", ANOTHER)
def test_each_setting_may_stand_in_each_place(tmp_path: Path, name: str) -> None:
    others = {"engine": "vllm-server", "tasks": "http://127.0.0.1:9/tasks"}
    base = {key: value for key, value in (NEEDED | others).items() if key != name}
    given: str | list[str] = ANOTHER[name] if isinstance(ANOTHER[name], list) else as_text(name)
    in_file = configure(write(tmp_path, base | {name: ANOTHER[name]}), {}, {})
    in_environment = configure(write(tmp_path, base), {variable(name): as_text(name)}, {})
    on_command_line = configure(write(tmp_path, base), {}, {name: given})
    for configuration, source in (
        (in_file, str(tmp_path / "worker.yaml")),
        (in_environment, f"environment, {variable(name)}"),
        (on_command_line, f"command line, {option(name)}"),
    ):
        assert plain(configuration, name) == ANOTHER[name]
        assert configuration.sources[name] == source


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, NEEDED | {"max_tokens": 1, "threads": 1, "dtype": "float16"})
    environment = {"WORKER_MAX_TOKENS": "2", "WORKER_THREADS": "2", "WORKER_DTYPE": ""}
    found = configure(file, environment, {"max_tokens": "3"})
    settings = found.settings
    assert (settings.max_tokens, settings.threads, settings.dtype) == (3, 2, "float16")
    assert [found.sources[name] for name in ("max_tokens", "threads", "dtype", "groups_at_once")] == [
        "command line, --max-tokens",
        "environment, WORKER_THREADS",
        str(file),
        "default",
    ]


def test_what_is_shown_is_yaml_that_makes_the_same_settings(tmp_path: Path) -> None:
    given = {name: value for name, value in ANOTHER.items() if name not in ("token", "tasks_token")}
    found = configure(write(tmp_path, given), {"WORKER_TASKS_TOKEN": "t-secret"}, {})
    shown = yaml.safe_load(found.shown())
    assert shown == {**ANOTHER, "token": None, "tasks_token": MASK}
    again = configure(write(tmp_path, shown | {"tasks_token": None}), {"WORKER_TASKS_TOKEN": "t-secret"}, {})
    assert again.settings == found.settings
    assert refused(write(tmp_path, shown), {}, {}) == [
        f"{tmp_path}/worker.yaml: tasks_token: this is the mask of a secret, not the secret"
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"worker-id": "gpu-0"}, "worker-id: no such setting; did you mean worker_id?"),
        ({"colour": 1}, "colour: no such setting"),
        ({"run": 7}, "run: input should be a valid string, not 7"),
        ({"worker_id": "../x"}, "worker_id: string should match pattern"),
        ({"threads": "4"}, "threads: input should be a valid integer, not '4'"),
        ({"threads": True}, "threads: input should be a valid integer, not True"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1, not 0"),
        ({"max_tokens": 1.5}, "max_tokens: input should be a valid integer, not 1.5"),
        ({"groups_at_once": 1001}, "groups_at_once: input should be less than or equal to 1000, not 1001"),
        ({"metrics_port": 65536}, "metrics_port: input should be less than or equal to 65535, not 65536"),
        ({"engine": "vlm"}, "engine: input should be 'vllm', 'vllm-server', 'verl' or 'transformers', not 'vlm'"),
        ({"across_versions": "stop"}, "across_versions: input should be 'continue' or 'finish', not 'stop'"),
        ({"stop": "END"}, "stop: input should be a valid "),
        ({"stop": ["a", ""]}, "stop: [1] string should have at least 1 character, not ''"),
        ({"data": ["a"]}, "data: input should be a valid string, not ['a']"),
        ({"engine_url": "http://a"}, "engine_url: an engine's address is for vllm-server alone, not for vllm"),
        ({"tasks_token": "x"}, "tasks_token: a token for tasks is for a task service alone"),
        ({"dtype": "float33"}, "dtype: input should be 'float32', 'bfloat16' or 'float16', not 'float33'"),
        ({"url": "http://[::1"}, "url: no address: "),
        ({"url": "http://a,ftp://b"}, "url: no address: it must begin with http:// or https://"),
        ({"engine": "vllm-server", "engine_url": "gpu:8000"}, "engine_url: no address: it must begin with "),
        ({"engine": "vllm-server", "engine_url": "http://a:b"}, "engine_url: no address: Invalid port"),
        ({"tasks": f"http://{'a' * 64}/"}, "tasks: no address: "),
        ({"tasks": "http://./"}, "tasks: no address: "),
        ({"token": "a", "token_file": "b"}, "token and token_file: give one of them"),
        ("run: a\nrun: b\n", "not YAML: run stands there twice"),
        ("run: [", "not YAML: "),
        ("- run", "must hold settings, a line each, such as 'run: sums', not a list"),
        ("run", "must hold settings, a line each, such as 'run: sums', not the single value 'run'"),
    ],
)
def test_what_a_file_may_not_hold_is_one_line_with_file_and_key(
    tmp_path: Path, content: str | dict[str, Any], said: str
) -> None:
    file = write(tmp_path, content if isinstance(content, str) else NEEDED | content)
    (line,) = refused(file, {}, {})
    assert line.startswith(f"{file}: {said}")


def test_every_fault_has_its_line_with_the_place_where_it_stands(tmp_path: Path) -> None:
    file = write(tmp_path, {"run": 1, "threads": 0})
    lines = refused(file, {"WORKER_MAX_TOKENS": "many", "WORKER_STOP": "END"}, {"metrics_port": "-1"})
    assert [line.split(": ")[:2] for line in lines] == [
        [str(file), "run"],
        [str(file), "threads"],
        ["environment, WORKER_MAX_TOKENS", "max_tokens"],
        ["environment, WORKER_STOP", "stop"],
        ["command line, --metrics-port", "metrics_port"],
    ]


def test_a_file_that_is_not_there_and_settings_that_were_not_given_are_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.yaml", {}, {}) == [f"{tmp_path}/none.yaml: No such file or directory"]
    assert refused(write(tmp_path, "# nothing\n"), {}, {"run": "r", "model": "m", "worker_id": "w"}) == [
        "tasks was not given: --tasks, WORKER_TASKS or tasks in a --config file"
    ]


def test_no_secret_is_in_a_refusal(tmp_path: Path) -> None:
    lines = refused(write(tmp_path, NEEDED | {"token": ["hidden-1"], "tasks_token": {"a": "hidden-2"}}), {}, {})
    assert len(lines) == 2 and "hidden" not in "".join(lines)


def test_a_date_in_the_file_is_the_text_that_it_is_written_as(tmp_path: Path) -> None:
    file = write(tmp_path, "run: 2026-11-30\nworker_id: w\nmodel: m\ntasks: '-'\n")
    assert configure(file, {}, {}).settings.run == "2026-11-30"


def test_a_token_is_the_file_s_unless_a_stronger_place_gives_another(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("from-the-file\n")
    file = write(tmp_path, NEEDED | {"token_file": str(token)})
    assert configure(file, {}, {}).settings.read_token() == "from-the-file"
    stronger = configure(file, {"COORDINATOR_TOKEN": "given"}, {})
    assert (stronger.settings.read_token(), stronger.settings.token_file) == ("given", None)
    file = write(tmp_path, NEEDED | {"token": "weaker"})
    assert configure(file, {}, {"token_file": str(token)}).settings.read_token() == "from-the-file"
    assert configure(write(tmp_path, NEEDED), {}, {}).settings.read_token() is None
    token.write_text(" \n")
    with pytest.raises(TokenError, match="token is empty"):
        configure(file, {}, {"token_file": str(token)}).settings.read_token()
    token.unlink()
    with pytest.raises(TokenError, match="No such file"):
        configure(file, {}, {"token_file": str(token)}).settings.read_token()


def test_the_parts_hold_what_was_given() -> None:
    settings = Settings.model_validate(ANOTHER | {"engine": EngineName.vllm_server})
    worker, engine = settings.of_worker(), settings.of_engine()
    for part in (worker, engine):
        for name, value in vars(part).items():
            whole = {"name": "engine", "url": "engine_url"} if part is engine else {}
            if name != "log":
                assert value == getattr(settings, whole.get(name, name))
    assert engine.log == Path("/data/other/gpu-1/vllm-server.log")


def played(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WORKER_", "COORDINATOR_"))}
    return subprocess.run(
        [sys.executable, "-m", "worker_agent.cli", "run", *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_shows_its_settings_and_touches_nothing(tmp_path: Path) -> None:
    # Neither the model, nor the tasks, nor the coordinator is there; and torch is not looked for.
    file = write(tmp_path, NEEDED | {"model": "/nowhere", "tasks": "/nowhere.jsonl", "data": str(tmp_path / "data")})
    played_with = played(
        *("--config", str(file), "--show-config", "--stop", "a b", "--stop", "c", "--max-tokens", "9"),
        COORDINATOR_TOKEN="hidden",
        COORDINATOR_URL="http://127.0.0.1:9",
    )
    assert (played_with.returncode, played_with.stderr) == (0, "")
    shown = yaml.safe_load(played_with.stdout)
    assert (shown["stop"], shown["max_tokens"], shown["token"]) == (["a b", "c"], 9, MASK)
    assert "hidden" not in played_with.stdout
    lines = dict(line.split(":", 1) for line in played_with.stdout.splitlines())
    assert lines["max_tokens"].endswith("# command line, --max-tokens")
    assert lines["token"].endswith("# environment, COORDINATOR_TOKEN")
    assert lines["model"].endswith(f"# {file}")
    assert lines["dtype"].endswith("# default")
    assert [path.name for path in tmp_path.iterdir()] == ["worker.yaml"]


def test_the_command_refuses_settings_in_plain_lines(tmp_path: Path) -> None:
    ended = played("--threads", "0", WORKER_CONFIG=str(write(tmp_path, NEEDED | {"colour": "red"})))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        f"worker-agent: {tmp_path}/worker.yaml: colour: no such setting",
        "worker-agent: command line, --threads: threads: input should be greater than or equal to 1, not '0'",
    ]


def test_the_help_has_every_option_with_its_variable() -> None:
    said = " ".join(played("--help", COLUMNS="400", TERMINAL_WIDTH="400").stdout.split())
    for name in Settings.model_fields:
        assert option(name) in said and variable(name) in said
