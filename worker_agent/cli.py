"""The command line `worker-agent`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated


def _not_installed(error: ModuleNotFoundError) -> str:
    """What to install for a module that is missing. One of our own is no matter of extras: raised again."""
    if error.name is None or error.name.split(".")[0] in ("coordinator", "worker_agent"):
        raise error
    return (
        f"{error.name} is not installed: pip install 'rollout-coordinator[worker]' on a GPU, or "
        "'rollout-coordinator[worker-cpu]' as requirements/cpu.lock has it"
    )


# The script is there in every installation, what it needs only with the extra.
try:
    import typer

    from coordinator.client import Coordinator, CoordinatorError
    from worker_agent.agent import Agent, AgentError
    from worker_agent.closure.cli import app as closure
    from worker_agent.configuration import SettingsError, configure
    from worker_agent.contract import ContractMismatch, check_model
    from worker_agent.engines.engine import EngineError
    from worker_agent.logs import event, log_to_stderr
    from worker_agent.models import ModelError, ModelIdentity, identify, smollm2
    from worker_agent.options import from_command_line, with_settings
    from worker_agent.passing import away
    from worker_agent.run_settings import Settings, TokenError
    from worker_agent.status.server import StatusError, serving_status
    from worker_agent.status.vitals import Vitals
    from worker_agent.tasks import TaskError, open_tasks
except ModuleNotFoundError as missing:
    sys.exit(f"worker-agent: {_not_installed(missing)}")

_LOOK_SECONDS = 2.0
"""How long the start tries to see whether it fits the run; the agent asks again, for as long as it takes."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(closure, name="closure")


@app.callback()
def _root() -> None:
    """Generates rollouts beside the GPU, with exactly the policy version that the coordinator has
    activated."""


@app.command()
@with_settings
def run(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(envvar="WORKER_CONFIG", help="A YAML file with settings, such as max_tokens: 32, a line each."),
    ] = None,
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Print all settings as YAML with where each came from; do nothing else."),
    ] = False,
    **options: object,
) -> None:
    """Work for a run until the tasks end or SIGTERM comes; then hand in everything and leave.

    Every setting may stand in the file, in its variable or on the command line; the later of these wins. Temperature,
    top_p, top_k and min_p are the run's, since every rollout of a run is made under one contract. While the coordinator
    is away, finished rollouts wait in the data folder and are sent later, in order. Exit status: 0 done, 1 with the
    reason as the last log line, 2 for settings that cannot be used.
    """
    try:
        configuration = configure(config, os.environ, from_command_line(context))
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"worker-agent: {line}", file=sys.stderr)
        raise typer.Exit(2) from error
    if show_config:
        print(configuration.shown())
        return
    log_to_stderr()
    try:
        _work(configuration.settings)
    except (
        AgentError,
        ContractMismatch,
        CoordinatorError,
        EngineError,
        ModelError,
        OSError,
        StatusError,
        TaskError,
        TokenError,
    ) as error:
        event("stopped", level=logging.ERROR, error=str(error), kind=type(error).__name__)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        event("stopped", level=logging.ERROR, error=_not_installed(error), kind=type(error).__name__)
        raise typer.Exit(1) from error


@app.command(name="identify")
def identify_command(
    model: Annotated[str, typer.Argument(help="Folder of a model in the Hugging Face layout, or smollm2.")],
    dtype: Annotated[str, typer.Option(help="dtype of the weights in the engines.")] = "float32",
    logprobs_mode: Annotated[
        str, typer.Option(help="raw, as vLLM and transformers have it here, or processed.")
    ] = "raw",
) -> None:
    """Print what a run on this model is created with, as JSON: contract, vocabulary and first policy.

    With a run_id and settings beside it, it is the body of POST /v1/runs, and the fields of CreateRun in Python.
    Temperature, top_p, top_k and min_p are yours to change. Exit status: 0, or 1 with the reason.
    """
    try:
        identity = identify(_model_folder(model))
    except (ModelError, OSError) as error:
        print(f"worker-agent: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    base = {"name": identity.name, "revision": identity.revision, "sha256": identity.sha256}
    contract = {
        "tokenizer_hash": identity.tokenizer_hash,
        "chat_template_hash": identity.chat_template_hash,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "logprobs_mode": logprobs_mode,
        "dtype": dtype,
    }
    body = {"contract": contract, "vocab_size": identity.vocab_size, "policy": {"base_model": base}}
    print(json.dumps(body, indent=1))


def _model_folder(model: str) -> Path:
    return smollm2(lambda line: event("model", detail=line)) if model == "smollm2" else Path(model)


def _work(settings: Settings) -> None:
    """From settings to the end of the work. What cannot be had is found out before the engine is started."""
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)  # read by torch and vLLM at their import, below
    worker = settings.of_worker()
    vitals = Vitals()
    with ExitStack() as stack:
        token = None if settings.tasks_token is None else settings.tasks_token.get_secret_value()
        tasks = stack.enter_context(open_tasks(settings.tasks, settings.worker_id, token, settings.groups_at_once))
        coordinator = stack.enter_context(Coordinator(settings.url, settings.read_token()))
        if settings.metrics_port is not None:
            spool = worker.folder(settings.run) / "spool"
            stack.enter_context(serving_status(settings.metrics_host, settings.metrics_port, vitals, spool))
        with vitals.in_engine():
            folder = _model_folder(settings.model)
            identity = identify(folder)
            _look_at_the_run(settings, identity)
            event("engine_starts", engine=settings.engine.value, model=identity.name, sha256=identity.sha256)
            # Imported here: `worker-agent --help` is not to wait for torch.
            from worker_agent.engines.start import start_engine

            engine = start_engine(folder, settings.of_engine())
        stack.callback(engine.close)
        vitals.engine_up = True
        agent = Agent(coordinator.run(settings.run), engine, identity, worker, tasks, vitals)
        _stop_on_signals(agent)
        agent.run()


def _look_at_the_run(settings: Settings, identity: ModelIdentity) -> None:
    """A wrong address, token, run or model ends the start here, before the engine is waited for. A coordinator that is
    away is waited for later, by the agent."""
    with Coordinator(settings.url, settings.read_token(), retry_seconds=_LOOK_SECONDS) as coordinator:
        run = coordinator.run(settings.run)
        try:
            check_model(run, run.view(), identity)
        except CoordinatorError as error:
            if not away(error):
                raise


def _stop_on_signals(agent: Agent) -> None:
    """The first SIGTERM or SIGINT ends the work in good order, the second at once."""

    def handle(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        agent.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def main() -> None:
    """Entry point of the `worker-agent` script."""
    app(prog_name="worker-agent")


if __name__ == "__main__":
    main()
