"""An agent loop: the coroutine that takes one row from its messages to a finished trajectory.

In:  raw_prompt of one row -> Out: AgentLoopOutput.
Simplified: text only; the score is computed later, by the trainer.
verl: verl.experimental.agent_loop.agent_loop:AgentLoopBase
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from minirl.rollout.chat_template import encode_prompt
from minirl.rollout.llm_server import LLMServerClient
from minirl.rollout.sampling import SamplingParams, row_seed
from minirl.rollout.tools import FunctionTool


@dataclass
class AgentLoopOutput:
    """One trajectory, not padded. The three response lists have one entry per token of response_ids.

    verl: verl.experimental.agent_loop.agent_loop:AgentLoopOutput
    """

    prompt_ids: list[int]
    response_ids: list[int]  # what the model wrote, and what tools answered in between
    response_mask: list[int]  # 1 = the model wrote it, 0 = a tool did
    response_logprobs: list[float] | None  # 0.0 where the mask is 0
    num_turns: int  # messages of user, assistant and tools
    metrics: dict[str, float]  # seconds in generate_sequences and in tool_calls
    extra_fields: dict[str, Any] = field(default_factory=dict)  # each becomes a column of the batch


class AgentLoopBase(ABC):
    """Made anew for every row.

    Args:
        config: `actor_rollout_ref.rollout`.
        server_manager: verl's name for the client.
        tools: what the row may call.

    verl: verl.experimental.agent_loop.agent_loop:AgentLoopBase
    """

    def __init__(
        self,
        config: DictConfig,
        server_manager: LLMServerClient,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[FunctionTool],
    ) -> None:
        self.config = config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.tools = tools

    @abstractmethod
    async def run(
        self, sampling_params: SamplingParams, *, draw: tuple[int, int, int], **kwargs: Any
    ) -> AgentLoopOutput:
        """At most rollout.response_length response tokens.

        Args:
            draw: the first three arguments of `row_seed`; the fourth is what a turn continues.
            kwargs: the row's columns, `raw_prompt` among them.
        """


AGENT_LOOPS: dict[str, type[AgentLoopBase]] = {}


def register(agent_name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Make a class the loop of rows whose `agent_name` is this.

    verl: verl.experimental.agent_loop.agent_loop:register
    """

    def decorator(subclass: type[AgentLoopBase]) -> type[AgentLoopBase]:
        AGENT_LOOPS[agent_name] = subclass
        return subclass

    return decorator


def get_agent_loop(agent_name: str) -> type[AgentLoopBase]:
    """Raises ValueError: no loop of that name."""
    if agent_name not in AGENT_LOOPS:
        raise ValueError(
            f"no agent loop {agent_name!r} (column agent_name, or actor_rollout_ref.rollout.agent."
            f"default_agent_loop): use one of {', '.join(AGENT_LOOPS)}, or register yours"
        )
    return AGENT_LOOPS[agent_name]


@contextmanager
def simple_timer(name: str, metrics: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block to `metrics[name]`. verl: verl.utils.profiler.performance:simple_timer"""
    start = time.perf_counter()
    yield
    metrics[name] = metrics.get(name, 0.0) + time.perf_counter() - start


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """One prompt, one response.

    verl: verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop
    """

    async def run(
        self,
        sampling_params: SamplingParams,
        *,
        draw: tuple[int, int, int],
        raw_prompt: list[dict],
        **kwargs: Any,
    ) -> AgentLoopOutput:
        prompt_ids = encode_prompt(self.tokenizer, raw_prompt, limit=self.config.prompt_length)
        metrics: dict[str, float] = {}
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(
                uuid4().hex,
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
                max_tokens=self.config.response_length,
                seed=row_seed(*draw, prompt_ids),
            )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,  # the prompt and the response
            metrics=metrics,
            extra_fields={"min_global_steps": output.version, "max_global_steps": output.version},
        )
