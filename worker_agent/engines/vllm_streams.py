"""Completions that stream from a vLLM server, many at a time, and may be broken off.

A server works on a request for as long as its connection is open: closing it is how one is given up, on every
version.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Mapping
from typing import Any

import httpx

from worker_agent.engines.engine import Completion, EngineError

_PATH = "/v1/completions"


class Streams:
    """Requests in flight at the server at `url`. `timeout_seconds` is how long it may be silent about one."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        # No connection is kept: the server closes idle ones, and those on which it answered a 500.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_seconds, limits=limits, trust_env=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-streams", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()  # touched on the loop's thread alone
        self._running: dict[str, _Received] = {}
        self._ended: queue.Queue[asyncio.Task[None]] = queue.Queue()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, request_id: str, body: Mapping[str, Any]) -> None:
        """Send a completion request; it must ask for `stream`, `return_token_ids` and `logprobs`."""
        received = self._running[request_id] = _Received(body)
        self._loop.call_soon_threadsafe(self._start, request_id, received)

    def finished(self, wait_seconds: float) -> dict[str, Completion | EngineError]:
        """See `Engine.finished`."""
        done: dict[str, Completion | EngineError] = {}
        while self._running:
            try:
                task = self._ended.get(timeout=0 if done else wait_seconds)
            except queue.Empty:
                break
            if not task.cancelled():
                task.result()  # raises what nobody foresaw
            done[task.get_name()] = self._running.pop(task.get_name()).outcome()
        return done

    def interrupt(self) -> dict[str, Completion | EngineError]:
        """See `Engine.interrupt`."""
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
        return self.finished(0.0)

    def close(self) -> None:
        """Give everything up."""
        self.interrupt()
        asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, request_id: str, received: _Received) -> None:
        task = self._loop.create_task(self._receive(received), name=request_id)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        self._ended.put(task)

    async def _cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _receive(self, received: _Received) -> None:
        try:
            async with self._http.stream("POST", _PATH, json=dict(received.body)) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    received.error = refused(_PATH, answer)
                    return
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        received.add(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            received.error = EngineError(f"the vLLM server at {self._http.base_url} broke off {_PATH}: {error!r}")
        except (KeyError, TypeError, ValueError) as error:
            received.error = EngineError(f"the vLLM server at {self._http.base_url} answered what is none: {error!r}")


class _Received:
    """What came of one request so far."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.error: EngineError | None = None
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._text: list[str] = []
        self._finish_reason = "abort"

    def add(self, data: str) -> None:
        """One event of the stream."""
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            code = error.get("code") if isinstance(error, dict) else None
            did = "refused the request" if isinstance(code, int) and code < 500 else "broke a completion off"
            self.error = EngineError(f"vLLM {did}: {error}")
            return
        for choice in event["choices"]:
            prompt = choice.get("prompt_token_ids")
            if event["model"] != self.body["model"] or prompt not in (None, self.body["prompt"]):
                self.error = EngineError(
                    f"the server answered for {event['model']} and {prompt} where {self.body['model']} and "
                    f"{self.body['prompt']} were asked"
                )
                return
            self._tokens += [int(token) for token in choice["token_ids"] or ()]
            if choice["logprobs"] is not None:
                self._log_probs += [float(log_prob) for log_prob in choice["logprobs"]["token_logprobs"]]
            self._text.append(str(choice["text"]))
            self._finish_reason = choice["finish_reason"] or self._finish_reason

    def outcome(self) -> Completion | EngineError:
        """The completion, or why there is none."""
        if self.error is not None:
            return self.error
        if self._finish_reason not in ("stop", "length", "abort"):
            return EngineError(f"vLLM broke a completion off: {self._finish_reason}")
        if len(self._tokens) != len(self._log_probs):
            return EngineError(f"the server gave {len(self._log_probs)} log-probs for {len(self._tokens)} tokens")
        return Completion(self._tokens, self._log_probs, self._finish_reason, "".join(self._text))


def refused(path: str, answer: httpx.Response) -> EngineError:
    """The error for an answer that is no 200."""
    return EngineError(f"vLLM refused the request: {answer.status_code} to {path}: {answer.text[:500]}")
