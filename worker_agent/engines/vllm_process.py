"""vLLM's HTTP server as a child of this process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

import worker_agent
from worker_agent.engines.engine import EngineError
from worker_agent.logs import event

_MODULE = "vllm.entrypoints.openai.api_server"
_READY_SECONDS = 900.0
_PROGRESS_SECONDS = 10.0
_FAREWELL_SECONDS = 20.0
_PR_SET_PDEATHSIG = 1
# Looked up before any fork: nothing may be imported between fork and exec.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class VllmProcess:
    """`python -m vllm.entrypoints.openai.api_server` on a free port of the loopback, ready to be called.

    `arguments` come after host and port; `environment` is added to this process's. Its output goes to the file `log`,
    and while it starts an event says every 10 s how far it is. It ends with this process, on Linux even after a
    SIGKILL; to be made on a thread that lives as long as the server, since Linux ties a child to the thread that made
    it. Raises `EngineError` with the log's end if the server does not become ready, ModuleNotFoundError without vLLM.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        parent = os.getpid()

        def tie() -> None:
            if _PRCTL is not None:
                _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)  # it takes its own children along
                if os.getppid() != parent:  # it died before the tie held
                    os._exit(1)

        # The server imports the extension that computes digests; this package need not be installed for it.
        paths = [str(Path(worker_agent.__file__).parents[1]), os.environ.get("PYTHONPATH")]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, "--host", "127.0.0.1", "--port", str(port), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **environment},
                start_new_session=True,  # Ctrl-C is this process's to handle, and the group is killed as one
                preexec_fn=tie,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def ended(self) -> str | None:
        """What to say of a server that has ended, None while it runs."""
        status = self._process.poll()
        return None if status is None else f"the vLLM server ended with status {status}: {self._last_words()}"

    def stop(self) -> None:
        """Ask it to end, then kill what is left of it and of its children."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_FAREWELL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        told = started
        while time.monotonic() - started < _READY_SECONDS:
            if ended := self.ended():
                raise EngineError(ended)
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            if time.monotonic() - told >= _PROGRESS_SECONDS:
                told = time.monotonic()
                event("engine_starting", seconds=round(told - started), detail=self._last_words(200))
            time.sleep(0.25)
        raise EngineError(f"the vLLM server was not ready after {_READY_SECONDS:.0f} s: {self._last_words()}")

    def _last_words(self, length: int = 2000) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        return f"{text[-length:]} ({self.log})"
