"""The agent loop of a model with tools: write, call, read the answer, write on.

In:  raw_prompt of one row -> Out: AgentLoopOutput; tool tokens have response_mask 0 and log-prob 0.
Simplified: text only, one set of tools for all rows, no tool rewards.
verl: verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop
"""

import asyncio
from typing import Any
from uuid import uuid4

from minirl.rollout.agent_loop import AgentLoopBase, AgentLoopOutput, register, simple_timer
from minirl.rollout.chat_template import encode_messages, encode_prompt, system_prompt_of
from minirl.rollout.sampling import SamplingParams, row_seed
from minirl.rollout.tools import call_tool, extract_tool_calls


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """verl: verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop"""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        multi_turn = self.config.multi_turn
        self.max_assistant_turns = multi_turn.max_assistant_turns
        self.max_user_turns = multi_turn.max_user_turns
        self.max_parallel_calls = multi_turn.max_parallel_calls
        self.max_tool_response_length = multi_turn.max_tool_response_length
        self.tool_response_truncate_side = multi_turn.tool_response_truncate_side
        self.response_length = self.config.response_length

    async def run(
        self,
        sampling_params: SamplingParams,
        *,
        draw: tuple[int, int, int],
        raw_prompt: list[dict],
        **kwargs: Any,
    ) -> AgentLoopOutput:
        request_id = uuid4().hex  # of all turns
        schemas = [tool.tool_schema for tool in self.tools]
        prompt_ids = encode_prompt(self.tokenizer, raw_prompt, limit=self.config.prompt_length, tools=schemas)
        response_ids: list[int] = []
        response_mask: list[int] = []
        log_probs: list[float] = []
        metrics: dict[str, float] = {}
        versions: list[int] = []
        assistant_turns = user_turns = 0  # verl counts a tool's answer as the user's turn
        while True:
            so_far = prompt_ids + response_ids
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id,
                    prompt_ids=so_far,
                    sampling_params=sampling_params,
                    max_tokens=self.response_length - len(response_ids),
                    seed=row_seed(*draw, so_far),
                )
            response_ids += output.token_ids
            response_mask += [1] * len(output.token_ids)
            log_probs += output.log_probs or []
            versions.append(output.version)
            assistant_turns += 1

            if output.stop_reason == "aborted" or len(response_ids) >= self.response_length:
                break
            if self.max_assistant_turns and assistant_turns >= self.max_assistant_turns:
                break
            if self.max_user_turns and user_turns >= self.max_user_turns:
                break
            calls = extract_tool_calls(self.tokenizer.decode(output.token_ids))
            if not calls:
                break
            with simple_timer("tool_calls", metrics):
                observation = await self._observe(calls[: self.max_parallel_calls])
            if len(response_ids) + len(observation) >= self.response_length:
                break  # no room to react to it, so it is left out
            response_ids += observation
            response_mask += [0] * len(observation)
            log_probs += [0.0] * len(observation)
            user_turns += 1
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=response_mask,
            response_logprobs=None if output.log_probs is None else log_probs,
            num_turns=1 + assistant_turns + user_turns,
            metrics=metrics,
            extra_fields={"min_global_steps": min(versions), "max_global_steps": max(versions)},
        )

    async def _observe(self, calls: list[tuple[str, Any]]) -> list[int]:
        """Token ids of the tools' answers, in the chat template, up to the next generation prompt."""
        tools = {tool.name: tool for tool in self.tools}
        cut = dict(length=self.max_tool_response_length, side=self.tool_response_truncate_side)
        texts = await asyncio.gather(*[call_tool(tools, name, given, **cut) for name, given in calls])
        messages = [{"role": "tool", "content": text} for text in texts]
        # the template writes its system prompt before any list of messages; here it stands there already
        return encode_messages(self.tokenizer, messages)[len(system_prompt_of(self.tokenizer)) :]
