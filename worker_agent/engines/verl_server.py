"""What runs on the server's side of `verl_engine`: verl's rollout server and its vLLM worker, with what they keep to
themselves made askable.

Imports verl and vLLM; only to be imported after `worker_agent.verl_platform.import_verl`.
"""

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from worker_agent.engines.lora_digest import LoraDigest

_LOOK_SECONDS = 1.0

_logger = logging.getLogger(__name__)


class RolloutServer(vLLMHttpServer):
    """verl's server, with its output and its children's appended to the file `log`."""

    def __init__(self, log: str, **arguments: Any) -> None:
        with open(log, "ab") as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        super().__init__(**arguments)

    async def in_worker(self, method: str, *arguments: Any) -> Any:
        """What `method` of the vLLM worker answers; verl's own `collective_rpc` keeps that to itself."""
        (answer,) = await self._while_alive(self.engine.collective_rpc(method, args=arguments))
        return answer

    async def reset_prefix_cache(self) -> bool:
        """Whether the prefix cache is empty now; verl's own call does not say."""
        return bool(await self._while_alive(self.engine.reset_prefix_cache()))

    async def is_sleeping(self) -> bool:
        """Whether vLLM has given its memory away."""
        return bool(await self._while_alive(self.engine.is_sleeping()))

    async def _while_alive(self, call: Coroutine[Any, Any, Any]) -> Any:
        """vLLM leaves a call unanswered for ever if its core dies at that moment; here it raises `EngineDeadError`."""
        answer = asyncio.ensure_future(call)
        while not (await asyncio.wait([answer], timeout=_LOOK_SECONDS))[0]:
            try:
                await self.engine.check_health()
            except BaseException:
                answer.cancel()
                raise
        return answer.result()

    def _get_worker_extension_cls(self) -> str:
        return f"{RolloutWorker.__module__}.{RolloutWorker.__qualname__}"


class RolloutWorker(LoraDigest, vLLMColocateWorkerExtension):
    """verl's vLLM worker extension with digests; weights that vLLM refuses are refused without a deadlock."""

    def update_weights_from_ipc(self, *arguments: Any, **named: Any) -> None:
        """verl's, but what was refused is raised once the sender has its last answer, for which it waits forever."""
        self._refusal: str | None = None
        super().update_weights_from_ipc(*arguments, **named)
        if self._refusal is not None:
            raise ValueError(f"vLLM does not take these weights: {self._refusal}")

    def _update_weights(self, *arguments: Any, **named: Any) -> None:
        try:
            super()._update_weights(*arguments, **named)
        except Exception as error:
            _logger.exception("vLLM does not take these weights")
            # Kept as text: the error's frames hold views of the shared memory, which could not be closed then.
            self._refusal = repr(error)
