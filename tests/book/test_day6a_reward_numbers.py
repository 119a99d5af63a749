"""The hand-sized numbers and the failures that book/week1/day6a_reward.md states, run with verl 0.8.0."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from minirl.pin import LATER, find_symbol, use_verl, verl_root

pytestmark = pytest.mark.oracle
use_verl()

P, R = 4, 6
LENGTHS, SCORES = (4, 6, 0, 5), [1.0, 0.5, -1.0, 1.0]


@pytest.fixture
def batch():
    from verl import DataProto

    mask = torch.zeros(4, P + R, dtype=torch.long)
    mask[:, 1:P] = 1
    for row, length in enumerate(LENGTHS):
        mask[row, P : P + length] = 1
    ids = torch.zeros(4, P, dtype=torch.long)
    return DataProto.from_dict(
        {"prompts": ids, "responses": torch.zeros(4, R, dtype=torch.long), "attention_mask": mask}
    )


@pytest.fixture
def rm_scores(batch):
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

    return RewardManagerBase.assemble_rm_scores(batch, SCORES)


def test_the_four_scores_land_in_columns_3_5_5_4(rm_scores):
    assert rm_scores.nonzero().tolist() == [[0, 3], [1, 5], [2, 5], [3, 4]]


def test_minirl_places_the_four_scores_as_verl_does(batch, rm_scores):
    from minirl.reward.manager import assemble_rm_scores

    assert torch.equal(assemble_rm_scores(batch, SCORES), rm_scores)


def test_gae_reads_two_of_the_four_scores_and_the_sum_reads_all(batch, rm_scores):
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    mask = batch.batch["attention_mask"][:, P:].clone()
    mask[3, 4] = 0  # the last token of row 3 is a tool's
    _, returns = compute_gae_advantage_return(rm_scores, torch.zeros(4, R), mask, 1.0, 1.0)
    assert returns[:, 0].tolist() == [1.0, 0.5, 0.0, 0.0]
    assert rm_scores.sum(-1).tolist() == SCORES


def test_returns_are_the_rewards_still_to_come_only_at_lambda_1():
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    values, mask = torch.tensor([[0.5, 0.6, 0.4, 0.7, 0.9]]), torch.ones(1, 5)  # the row of Day 3
    rewards = torch.tensor([[-0.1, 0.2, -0.1, 0.0, 1.0]])
    _, returns = compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))
    _, returns = compute_gae_advantage_return(torch.tensor([[0.0, 0, 0, 0, 1]]), values, mask, 1.0, 0.5)
    assert round(returns[0, 0].item(), 3) == 0.606


def test_by_default_there_is_no_reward_model_and_no_pool_for_it():
    verl = verl_root() / "verl"
    reward = OmegaConf.load(verl / "trainer/config/reward/reward.yaml")
    rollout = OmegaConf.load(verl / "trainer/config/rollout/rollout.yaml")
    assert reward.reward_model.enable is False and reward.reward_model.enable_resource_pool is False
    assert reward.num_workers == 8 and rollout.agent.num_workers == 8


def manager(compute_score):
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"{len(ids)} tokens")
    return NaiveRewardManager(OmegaConf.create({}), tokenizer, compute_score)


def score_row(compute_score, batch, row=0):
    batch.non_tensor_batch["data_source"] = np.array(["a"] * 4, dtype=object)
    batch.non_tensor_batch["reward_model"] = np.array([{"ground_truth": "7"}] * 4, dtype=object)
    batch.non_tensor_batch["extra_info"] = np.array([{}] * 4, dtype=object)
    made = manager(compute_score)
    return made.loop.run_until_complete(made.run_single(batch[row : row + 1]))


def test_naive_hands_the_function_the_text_up_to_the_last_attended_token(batch):
    seen = {}
    score_row(lambda **given: seen.update(given) or 1.0, batch, row=3)
    assert seen["solution_str"] == "5 tokens" and seen["ground_truth"] == "7"


def test_naive_records_a_plain_number_as_acc(batch):
    assert score_row(lambda **_: 0.5, batch) == {"reward_score": 0.5, "reward_extra_info": {"acc": 0.5}}


def test_naive_records_every_key_of_a_dict_and_score_too(batch):
    result = score_row(lambda **_: {"score": 1.1, "fmt": 1.0}, batch)
    assert result == {"reward_score": 1.1, "reward_extra_info": {"score": 1.1, "fmt": 1.0}}


def test_naive_writes_into_the_row_s_own_extra_info(batch):
    score_row(lambda **_: 1.0, batch)
    assert "num_turns" in batch.non_tensor_batch["extra_info"][0]


def test_a_key_that_a_later_response_lacks_raises_and_a_new_one_is_dropped():
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopMetrics,
        AgentLoopWorker,
        _InternalAgentLoopOutput,
    )

    def output(extra):
        ids = torch.ones(1, R, dtype=torch.long)
        return _InternalAgentLoopOutput(
            prompt_ids=ids,
            response_ids=ids,
            input_ids=torch.ones(1, 2 * R, dtype=torch.long),
            position_ids=torch.ones(1, 2 * R, dtype=torch.long),
            response_mask=ids,
            attention_mask=torch.ones(1, 2 * R, dtype=torch.long),
            multi_modal_inputs={},
            reward_score=1.0,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"reward_extra_info": extra},
        )

    worker = object.__new__(AgentLoopWorker)
    worker.reward_loop_worker_handles = ["a handle"]
    joined = worker._postprocess([output({"acc": 1.0}), output({"acc": 1.0, "late": 1.0})])
    assert joined.meta_info["reward_extra_keys"] == ["acc"] and "late" not in joined.non_tensor_batch
    with pytest.raises(KeyError, match="acc"):
        worker._postprocess([output({"acc": 1.0}), output({})])


def test_a_result_without_reward_extra_info_breaks_the_streamed_path():
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

    class Handle:
        class compute_score:
            @staticmethod
            async def remote(data):
                return {"reward_score": 0.5}  # what compute_score_disrm returns

    worker = object.__new__(AgentLoopWorker)
    worker.reward_loop_worker_handles, worker.processor = [Handle], None
    worker._get_mm_processor_kwargs = lambda audios: {}
    output = AgentLoopOutput(
        prompt_ids=[1, 2], response_ids=[3], response_mask=[1], metrics=AgentLoopMetrics(), num_turns=2
    )
    with pytest.raises(KeyError, match="reward_extra_info"):
        asyncio.run(worker._compute_score([output], {"raw_prompt": [{"role": "user", "content": "x"}]}))


def test_the_later_version_keeps_the_broken_pair_and_pads_before_it_chunks():
    def later(spec):
        return "\n".join(find_symbol(f"verl.experimental.{spec}", LATER).lines)

    assert 'return {"reward_score": rm_score}' in later(
        "reward_loop.reward_loop:RewardLoopWorker.compute_score_disrm"
    )
    assert 'result["reward_extra_info"]' in later("agent_loop.agent_loop:AgentLoopWorker._compute_score")
    assert "pad_dataproto_to_divisor" in later("reward_loop.reward_loop:RewardLoopManager.compute_rm_score")
