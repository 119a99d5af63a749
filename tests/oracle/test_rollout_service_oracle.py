"""Load balancer, chat template and tool loop against verl's own: same servers, same tokens, same masks."""

import asyncio
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tool_conversation import ScriptedServer, build_tokenizer, log_probs_of, rollout_config, said, turn

from minirl.pin import use_verl
from minirl.rollout.chat_template import system_prompt_of
from minirl.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient
from minirl.rollout.sampling import SamplingParams
from minirl.rollout.tool_agent_loop import ToolAgentLoop
from minirl.rollout.tools import calculator, extract_tool_calls

use_verl()
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap  # noqa: E402
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop as VerlToolAgentLoop  # noqa: E402
from verl.experimental.agent_loop.tool_parser import HermesToolParser  # noqa: E402
from verl.tools.function_tool import FunctionTool  # noqa: E402
from verl.tools.schemas import OpenAIFunctionToolSchema  # noqa: E402
from verl.utils.chat_template import initialize_system_prompt  # noqa: E402
from verl.workers.rollout import llm_server  # noqa: E402
from verl.workers.rollout.replica import TokenOutput as VerlTokenOutput  # noqa: E402

pytestmark = pytest.mark.oracle

TOKENIZER = build_tokenizer()
CONFIG = OmegaConf.create(OmegaConf.to_container(rollout_config(), resolve=True))
QUESTION = [{"role": "user", "content": "what is 7"}]
SERVICE = OmegaConf.create(dict(timeout=60, max_retries=0, max_in_flight=8))
# the class inside verl's Ray actor
VerlLoadBalancer = llm_server.GlobalRequestLoadBalancer.__ray_metadata__.modified_class


@settings(deadline=None)
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("acquire"), st.integers(0, 7)), st.tuples(st.just("release"), st.integers(0, 2))
        ),
        max_size=60,
    ),
    cache=st.integers(1, 5),
)
def test_balancer_chooses_as_verls(events, cache):
    names = ["a", "b", "c"]
    ours = GlobalRequestLoadBalancer(dict.fromkeys(names), max_cache_size=cache)
    theirs = VerlLoadBalancer(dict.fromkeys(names), max_cache_size=cache)
    for kind, number in events:
        if kind == "acquire":
            assert ours.acquire_server(f"r{number}") == theirs.acquire_server(f"r{number}")
        else:
            ours.release_server(names[number])
            theirs.release_server(names[number])
        assert [ours.get_inflight_count(n) for n in names] == [theirs.get_inflight_count(n) for n in names]


def test_system_prompt_is_found_as_verl_finds_it():
    assert system_prompt_of(TOKENIZER) == initialize_system_prompt(TOKENIZER, return_dict=False) != []


def verl_output(script: list[list[int]], config) -> object:
    """What verl's loop makes of the same script, its server answering as vLLM's does."""

    async def generate(request_id, *, prompt_ids, **kwargs):
        tokens = list(said(script, prompt_ids))
        return VerlTokenOutput(token_ids=tokens, log_probs=log_probs_of(tokens), stop_reason="completed")

    schema = OpenAIFunctionToolSchema.model_validate(calculator.tool_schema)
    whole = OmegaConf.create({"actor_rollout_ref": {"rollout": OmegaConf.to_container(config, resolve=True)}})
    whole.actor_rollout_ref.rollout.multi_turn.format = "hermes"

    async def scenario():
        loop = VerlToolAgentLoop(
            trainer_config=DictConfigWrap(whole),
            server_manager=types.SimpleNamespace(generate=generate),
            tokenizer=TOKENIZER,
            processor=None,
            dataset_cls=type("NoDataset", (), {}),
            data_config=DictConfigWrap(OmegaConf.create({"apply_chat_template_kwargs": {}})),
            tools=ToolListWrap([FunctionTool("calculator", calculator.fn, schema)]),
        )
        return await loop.run({}, raw_prompt=QUESTION)

    return asyncio.run(scenario())


def our_output(script: list[list[int]], config):
    client = LLMServerClient(SERVICE, GlobalRequestLoadBalancer({"only": ScriptedServer(script)}))
    loop = ToolAgentLoop(config, client, TOKENIZER, [calculator])
    return asyncio.run(loop.run(SamplingParams(), draw=(0, 0, 0), raw_prompt=QUESTION))


CALL = st.sampled_from(["sum", "product", "zero", "unknown"])
TURN = st.builds(lambda calls, text: turn(*calls, text=text), st.lists(CALL, max_size=3), st.just("#### 7"))


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(TURN, min_size=1, max_size=4),
    width=st.integers(3, 60),
    limits=st.fixed_dictionaries(
        {
            "max_assistant_turns": st.sampled_from([None, 1, 2, 3]),
            "max_user_turns": st.sampled_from([None, 1, 2]),
            "max_parallel_calls": st.integers(1, 3),
            "max_tool_response_length": st.sampled_from([2, 9, 20, 256]),
            "tool_response_truncate_side": st.sampled_from(["left", "middle", "right"]),
        }
    ),
)
def test_tool_loop_makes_the_trajectory_that_verls_makes(script, width, limits):
    config = OmegaConf.merge(CONFIG, {"response_length": width, "multi_turn": limits})
    ours, theirs = our_output(script, config), verl_output(script, config)
    for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "num_turns"):
        assert getattr(ours, name) == getattr(theirs, name), name


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "a", "arguments": {"x": 1}}',
                '{"name": "a"}',
                "7",
                "\n",
            ]
        ),
        max_size=9,
    ).map("".join)
)
def test_calls_are_found_as_verls_hermes_parser_finds_them(text):
    import json

    parser = HermesToolParser(types.SimpleNamespace(decode=lambda ids: text))

    async def scenario():
        return (await parser.extract_tool_calls([]))[1]

    theirs = [(call.name, json.loads(call.arguments)) for call in asyncio.run(scenario())]
    assert extract_tool_calls(text) == theirs
