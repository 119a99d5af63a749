"""The rollout as the trainer sees it: a batch goes in, one coroutine per row, a batch comes out.

In:  non_tensor_batch[raw_prompt, agent_name] -> Out: as in base.py, and min_global_steps, max_global_steps.
Simplified: workers are objects in one event loop, which runs in a thread of this process; verl's are Ray
actors.
verl: verl.experimental.agent_loop.agent_loop:AgentLoopManager
"""

import asyncio
import itertools
import threading
import weakref
from collections.abc import Coroutine, Iterable
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from minirl.protocol import DataProto
from minirl.rollout import tool_agent_loop  # noqa: F401  registers its loop
from minirl.rollout.agent_loop import AgentLoopOutput, get_agent_loop
from minirl.rollout.base import Rollout
from minirl.rollout.batch_layout import assemble, right_pad
from minirl.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient
from minirl.rollout.sampling import GREEDY, sampling_params, sibling_ranks
from minirl.rollout.server import RolloutServer
from minirl.rollout.tools import load_function_tools


class AgentLoopWorker:
    """Runs the agent loops of some rows at once.

    verl: verl.experimental.agent_loop.agent_loop:AgentLoopWorker
    """

    def __init__(
        self, config: DictConfig, llm_client: LLMServerClient, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.config, self.llm_client, self.tokenizer = config, llm_client, tokenizer
        self.tools = load_function_tools(config.multi_turn.function_tool_path)

    async def generate_sequences(self, rows: list[dict[str, Any]]) -> list[AgentLoopOutput]:
        """Each row: `agent_name` and the arguments of `AgentLoopBase.run`."""
        return await gather([self._run_agent_loop(**row) for row in rows])

    async def _run_agent_loop(self, *, agent_name: str, **kwargs: Any) -> AgentLoopOutput:
        agent_loop = get_agent_loop(agent_name)(self.config, self.llm_client, self.tokenizer, self.tools)
        return await agent_loop.run(**kwargs)


class AgentLoopManager(Rollout):
    """verl: verl.experimental.agent_loop.agent_loop:AgentLoopManager"""

    def __init__(
        self,
        config: DictConfig,
        servers: list[RolloutServer],
        tokenizer: PreTrainedTokenizerBase,
        service: DictConfig,
    ) -> None:
        """config is `actor_rollout_ref.rollout`, service is `minirl.rollout`; servers are the replicas."""
        get_agent_loop(config.agent.default_agent_loop)  # a wrong name fails here, not in the first step
        self.config, self.servers, self.pad_token_id = config, servers, tokenizer.pad_token_id
        self.version = 0
        balancer = GlobalRequestLoadBalancer({f"replica_{i}": server for i, server in enumerate(servers)})
        client = LLMServerClient(service, balancer)
        self.workers = [AgentLoopWorker(config, client, tokenizer) for _ in range(config.agent.num_workers)]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self.loop,), name="rollout", daemon=True).start()
        weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        rows = self._rows(prompts)
        outputs = self._call(self._dispatch(rows))
        batch = assemble(
            [output.prompt_ids for output in outputs],
            right_pad([o.response_ids for o in outputs], self.config.response_length, self.pad_token_id),
            torch.tensor([len(output.response_ids) for output in outputs]),
            right_pad([output.response_mask for output in outputs], self.config.response_length, 0),
            self._log_probs(outputs),
            prompt_length=self.config.prompt_length,
            pad_token_id=self.pad_token_id,
        )
        columns = {
            "__num_turns__": np.array([output.num_turns for output in outputs], dtype=np.int32),
            "multi_modal_inputs": np.array([{} for _ in outputs], dtype=object),
            "raw_prompt": prompts.non_tensor_batch["raw_prompt"],
        }
        for key in dict.fromkeys(key for output in outputs for key in output.extra_fields):
            columns[key] = np.empty(len(outputs), dtype=object)
            columns[key][:] = [output.extra_fields.get(key) for output in outputs]
        return DataProto(batch, columns, {"timing": performance_metrics(outputs)})

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        named = list(named_tensors)  # every replica reads them
        self._call(gather([server.update_weights(named, version) for server in self.servers]))
        self.version = version

    def sleep(self) -> None:
        self._call(gather([server.sleep() for server in self.servers]))

    def wake_up(self) -> None:
        self._call(gather([server.wake_up() for server in self.servers]))

    def close(self) -> None:
        """End the replicas."""
        self._call(gather([server.close() for server in self.servers]))

    def _rows(self, prompts: DataProto) -> list[dict[str, Any]]:
        """The arguments of each row's loop: its columns, how it samples, what it draws."""
        meta_info, columns = prompts.meta_info, dict(prompts.non_tensor_batch)
        params = sampling_params(self.config, meta_info)
        wants_sample, own = columns.pop("__do_sample__", None), columns.pop("__seed__", None)
        if own is None:
            own = sibling_ranks(map(repr, columns["raw_prompt"]))
        run = (meta_info.get("rollout_seed", 0), meta_info.get("global_steps", 0))
        rows = []
        for i in range(len(prompts)):
            row = {"agent_name": self.config.agent.default_agent_loop}
            row |= {key: column[i] for key, column in columns.items()}
            greedy = wants_sample is not None and not wants_sample[i] and not meta_info.get("validate", False)
            rows.append(row | {"sampling_params": GREEDY if greedy else params, "draw": (*run, int(own[i]))})
        return rows

    async def _dispatch(self, rows: list[dict[str, Any]]) -> list[AgentLoopOutput]:
        """The rows to the workers in equal shares, the outputs in the rows' order."""
        bounds = np.linspace(0, len(rows), len(self.workers) + 1).astype(int)
        shares = [rows[i:j] for i, j in itertools.pairwise(bounds)]
        outputs = await gather(
            [worker.generate_sequences(share) for worker, share in zip(self.workers, shares, strict=True)]
        )
        return list(itertools.chain(*outputs))

    def _log_probs(self, outputs: list[AgentLoopOutput]) -> Tensor | None:
        if not self.config.calculate_log_probs:
            return None
        return right_pad([output.response_logprobs for output in outputs], self.config.response_length, 0.0)

    def _call(self, coroutine: Coroutine) -> Any:
        """Run it in the event loop and wait here."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


def performance_metrics(outputs: list[AgentLoopOutput]) -> dict[str, float]:
    """Seconds of the rows, and what the slowest row had to do.

    verl: verl.experimental.agent_loop.agent_loop:AgentLoopManager._performance_metrics
    """
    timing = {}
    names = ("generate_sequences", "tool_calls")
    seconds = {name: np.array([output.metrics.get(name, 0.0) for output in outputs]) for name in names}
    for name, values in seconds.items():
        for statistic in ("min", "max", "mean"):
            timing[f"agent_loop/{name}/{statistic}"] = float(getattr(values, statistic)())
    slowest = int(np.argmax(sum(seconds.values())))
    for name, values in seconds.items():
        timing[f"agent_loop/slowest/{name}"] = float(values[slowest])
    timing["agent_loop/slowest/prompt_length"] = len(outputs[slowest].prompt_ids)
    timing["agent_loop/slowest/response_length"] = len(outputs[slowest].response_ids)
    return timing


async def gather(coroutines: Iterable[Coroutine]) -> list[Any]:
    """Like asyncio.gather, but the first failure cancels the others and is raised once they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
