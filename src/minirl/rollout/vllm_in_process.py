"""vLLM's engine in this process, behind the coroutines of vLLM's AsyncLLM, which has it in another.

In:  a prompt and SamplingParams of vLLM -> Out: a stream of RequestOutput, as many as output_kind asks for.
One thread owns the engine: everything that touches it waits its turn there, so no lock is needed.
Simplified: no statistics, no data parallelism; verl always gives the engine processes of its own.
verl: verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.run_server
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from minirl.rollout.server import ReplicaError


class InProcessEngine:
    """The part of AsyncLLM that a rollout needs, over LLMEngine; it steps while a request is open."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self.engine = self.thread.submit(_build, arguments).result()
        self.streams: dict[str, asyncio.Queue] = {}
        self.pump: asyncio.Task | None = None

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        """The outputs of one request; none where it is aborted before the engine has heard of it.

        Raises:
            ReplicaError: a step of the engine failed.
        """
        queue = self.streams[request_id] = asyncio.Queue()
        try:
            await self._call(self.engine.add_request, request_id, prompt, sampling_params)
            if self.pump is None or self.pump.done():
                self.pump = asyncio.create_task(self._step_until_idle())
            while (output := await queue.get()) is not None:
                if isinstance(output, Exception):
                    raise ReplicaError(f"a step of vLLM's engine failed: {output}") from output
                yield output
                if output.finished:
                    return
        finally:
            if self.streams.pop(request_id, None) is not None:  # the caller left: free its place
                await self._call(self.engine.abort_request, [request_id])

    async def abort(self, request_ids: list[str]) -> None:
        outputs = await self._call(self._abort, set(request_ids))
        for request_id in request_ids:
            if (queue := self.streams.pop(request_id, None)) is not None:
                queue.put_nowait(outputs.get(request_id))

    async def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        """Call a method of the worker; the arguments are not copied, there is no process to cross."""
        return await self._call(self.engine.collective_rpc, method, None, args)

    async def sleep(self, level: int) -> None:
        await self._call(self.engine.sleep, level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._call(self.engine.wake_up, tags)

    async def reset_prefix_cache(self) -> bool:
        return await self._call(self.engine.reset_prefix_cache)

    def shutdown(self) -> None:
        """Ends vLLM's process groups too, which its engines in this process share: none works after that."""
        self.thread.submit(self.engine.engine_core.shutdown).result()
        self.thread.shutdown()

    def _abort(self, request_ids: set[str]) -> dict[str, Any]:
        """End the requests; returns what they have so far, which LLMEngine by itself throws away."""
        from vllm.v1.engine import FinishReason

        outputs = {
            state.external_req_id: state.make_request_output([], None, FinishReason.ABORT, None)
            for state in self.engine.output_processor.request_states.values()
            if state.external_req_id in request_ids
        }
        self.engine.abort_request(list(request_ids))
        return outputs

    async def _call(self, function: Callable, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

    async def _step_until_idle(self) -> None:
        while self.streams:
            try:
                outputs = await self._call(self.engine.step)
            except Exception as error:
                for queue in self.streams.values():
                    queue.put_nowait(error)
                self.streams.clear()
                return
            for output in outputs:
                queue = self.streams.get(output.request_id)
                if queue is not None:
                    queue.put_nowait(output)
                    if output.finished:
                        del self.streams[output.request_id]


def _build(arguments: dict[str, Any]) -> Any:
    """The engine, with what its start changes in the whole process put back."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    variable, set_num_threads = os.environ.get(name), torch.set_num_threads
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    os.environ[name] = "0"
    try:
        # a step is over when it returns, so that an abort frees the request's cache at once
        return LLMEngine.from_engine_args(EngineArgs(**arguments | {"async_scheduling": False}))
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        os.environ.pop(name)
        if variable is not None:
            os.environ[name] = variable
