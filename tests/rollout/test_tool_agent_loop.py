"""The tool loop: what the model reads, what is masked, when it ends, and training on it."""

import asyncio

import numpy as np
import pytest
import tiny_run
import torch
from omegaconf import OmegaConf
from runs import weights
from tool_conversation import WORDS, ScriptedServer, build_tokenizer, log_probs_of, rollout_config, turn

from minirl.config import compose
from minirl.protocol import DataProto
from minirl.rollout.agent_loop_manager import AgentLoopManager
from minirl.rollout.builtin_server import BuiltinServer
from minirl.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient
from minirl.rollout.sampling import SamplingParams
from minirl.rollout.server import TokenOutput
from minirl.rollout.tool_agent_loop import ToolAgentLoop
from minirl.rollout.tools import calculator
from minirl.trainer import PPOTrainer

QUESTION = [{"role": "user", "content": "what is 7"}]
SERVICE = OmegaConf.create(dict(timeout=60, max_retries=1, max_in_flight=8))
ANSWER = turn(text="#### 7")


def run(script, **limits):
    """(output, server) of one row."""
    server = ScriptedServer(script)
    client = LLMServerClient(SERVICE, GlobalRequestLoadBalancer({"only": server}))
    loop = ToolAgentLoop(rollout_config(**limits), client, build_tokenizer(), [calculator])
    return asyncio.run(loop.run(SamplingParams(), draw=(0, 0, 0), raw_prompt=QUESTION)), server


def words(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_the_model_reads_the_tools_answer_and_goes_on():
    output, server = run([turn("sum", text="what"), ANSWER])
    assert words(output.prompt_ids) == "<system> be brief <user> what is 7 <assistant>"
    first, second = turn("sum", text="what"), ANSWER
    observation = [WORDS.index(word) for word in ("<tool>", "7", "<assistant>")]  # no second system prompt
    assert output.response_ids == first + observation + second
    assert output.response_mask == [1] * len(first) + [0] * 3 + [1] * len(second)
    assert output.response_logprobs == log_probs_of(first) + [0.0] * 3 + log_probs_of(second)
    assert output.num_turns == 4  # user, assistant, tool, assistant
    assert server.prompts == [output.prompt_ids, output.prompt_ids + first + observation]
    assert output.extra_fields == {"min_global_steps": 0, "max_global_steps": 1}
    assert output.metrics["tool_calls"] > 0 and output.metrics["generate_sequences"] > 0


def test_a_tool_that_raises_answers_with_its_error():
    output, _ = run([turn("zero"), ANSWER])
    text = words(output.response_ids)
    assert "<tool> Error executing tool 'calculator': division by zero <assistant> #### 7" in text


def test_an_answer_without_a_call_ends_at_once():
    output, server = run([ANSWER])
    assert output.response_ids == ANSWER and output.num_turns == 2 and len(server.prompts) == 1
    assert 0 not in output.response_mask


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        (dict(max_assistant_turns=3), 1 + 3 + 2),
        (dict(max_user_turns=2), 1 + 3 + 2),  # the model still reacts to the last answer
    ],
)
def test_turn_limits_end_a_model_that_never_stops_calling(limits, turns):
    output, _ = run([turn("sum")], **limits)
    assert output.num_turns == turns
    assert output.response_mask[-1] == 1


def test_without_limits_the_response_length_ends_it():
    for width in range(5, 30):
        output, _ = run([turn("sum")], response_length=width)
        assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs) <= width
        assert output.response_mask[-1] == 1  # an answer that leaves no room to react is left out


def test_calls_of_one_turn_are_answered_up_to_the_limit_in_order():
    script = [turn("product", "sum", "sum"), ANSWER]
    one, _ = run(script)
    two, _ = run(script, max_parallel_calls=2)
    assert "<tool> 42 <assistant>" in words(one.response_ids)
    assert "<tool> 42 <tool> 7 <assistant>" in words(two.response_ids)
    assert one.num_turns == two.num_turns == 4


def test_long_answers_are_truncated():
    script = [turn("product"), ANSWER]
    output, _ = run(script, max_tool_response_length=1, tool_response_truncate_side="left")
    assert "<tool> <unk> <assistant>" in words(output.response_ids)  # (truncated)...2


def test_an_aborted_turn_is_the_last():
    class Aborted(ScriptedServer):
        async def generate(self, *args, **options) -> TokenOutput:
            output = await super().generate(*args, **options)
            output.stop_reason = "aborted"
            return output

    server = Aborted([turn("sum")])
    client = LLMServerClient(SERVICE, GlobalRequestLoadBalancer({"only": server}))
    loop = ToolAgentLoop(rollout_config(), client, build_tokenizer(), [calculator])
    output = asyncio.run(loop.run(SamplingParams(), draw=(0, 0, 0), raw_prompt=QUESTION))
    assert output.response_ids == turn("sum") and len(server.prompts) == 1


def test_masks_of_the_batch():
    config = rollout_config(response_length=16)
    manager = AgentLoopManager(config, [ScriptedServer([turn("sum"), ANSWER])], build_tokenizer(), SERVICE)
    raw_prompt = np.empty(3, dtype=object)
    raw_prompt[:] = [QUESTION] * 3
    batch = manager.generate_sequences(DataProto(non_tensor_batch={"raw_prompt": raw_prompt})).batch
    real = len(turn("sum")) + 3 + len(ANSWER)
    written = [1] * len(turn("sum")) + [0] * 3 + [1] * len(ANSWER) + [0] * (16 - real)
    assert batch["response_mask"].tolist() == [written] * 3
    attention = batch["attention_mask"][:, -16:]
    assert attention.tolist() == [[1] * real + [0] * (16 - real)] * 3  # tool tokens are real tokens
    assert (batch["rollout_log_probs"][batch["response_mask"] == 0] == 0).all()
    assert (batch["rollout_log_probs"][batch["response_mask"] == 1] < 0).all()
    positions = batch["position_ids"][0][batch["attention_mask"][0].bool()]
    assert positions.tolist() == list(range(len(positions)))


class CallsOnce(BuiltinServer):
    """The tiny model, made to open with a call: the rest, and every log-prob, is its own."""

    opening: list[int]
    assistant: int

    async def generate(self, prompt_ids, sampling_params, **options) -> TokenOutput:
        if prompt_ids.count(self.assistant) == 1:
            return TokenOutput(list(self.opening), [-1.0] * len(self.opening), "completed", self.version)
        return await super().generate(prompt_ids, sampling_params, **options)


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Two steps in which every row calls the calculator once; `trainer.batches` are what the actor learns."""
    overrides = tiny_run.make(tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "words")  # 27 words: the tiny model has as many
    monkeypatch.setattr(CallsOnce, "opening", turn("sum"), raising=False)
    monkeypatch.setattr(CallsOnce, "assistant", WORDS.index("<assistant>"), raising=False)
    monkeypatch.setattr("minirl.rollout.builtin_server.BuiltinServer", CallsOnce)
    options = [
        # beside a Qwen2 model, transformers would take it for Qwen2's own kind of tokenizer
        f"actor_rollout_ref.model.tokenizer_path={tmp_path}/words",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "data.max_response_length=14",
        "data.max_prompt_length=12",
        "trainer.logger=[]",
        "trainer.val_before_train=False",
    ]
    trainer = PPOTrainer(compose([*overrides, *options]))
    trainer.batches = []
    update_actor = trainer.actor_wg.update_actor

    def record(data):
        trainer.batches.append(data)
        return update_actor(data)

    trainer.actor_wg.update_actor = record
    return trainer


def test_the_trainer_trains_on_tool_conversations(trainer):
    history = trainer.fit()
    assert len(history) == len(trainer.batches) == 2
    assert all(step["num_turns/min"] == 4 for step in history)
    for batch in (data.batch for data in trainer.batches):
        mask = batch["response_mask"].bool()
        call = len(turn("sum"))
        assert not mask[:, call : call + 3].any() and mask[:, :call].all() and mask[:, call + 3].all()
        assert batch["attention_mask"][:, 12 + call : 12 + call + 3].all()
        assert (batch["rollout_log_probs"][~mask] == 0).all()
        last = batch["attention_mask"][:, 12:].sum(-1) - 1
        off_score = batch["token_level_scores"].clone()
        off_score[torch.arange(len(off_score)), last] = 0
        assert (off_score == 0).all()  # the score stands on the last real token, which the model wrote
        assert mask[torch.arange(len(mask)), last].all()


def test_what_stands_at_tool_tokens_does_not_train(trainer):
    trainer.fit()
    data = trainer.batches[-1]
    state = [p.detach().clone() for p in trainer.actor_wg.workers[0].parameters]

    def update(spoil) -> list[torch.Tensor]:
        with torch.no_grad():
            for parameter, saved in zip(trainer.actor_wg.workers[0].parameters, state, strict=True):
                parameter.copy_(saved)
        worker = trainer.actor_wg.workers[0]
        worker.optimizer.state.clear()
        copy = DataProto(data.batch.clone(), dict(data.non_tensor_batch), dict(data.meta_info))
        spoil(copy.batch)
        trainer.actor_wg.update_actor(copy)
        return weights(trainer)

    def at(mask_value: int):
        def spoil(batch):
            where = batch["response_mask"] == mask_value
            batch["advantages"][where] += 5.0
            batch["old_log_probs"][where] -= 0.1

        return spoil

    plain = update(lambda batch: None)
    assert all(torch.equal(a, b) for a, b in zip(plain, update(at(0)), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, update(at(1)), strict=True))
