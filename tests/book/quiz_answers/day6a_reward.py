"""Answers of data/quiz/day6a_reward.yml, computed with verl 0.8.0."""

from functools import lru_cache

import numpy as np
import pytest
import torch

from minirl.pin import find_symbol, use_verl

use_verl()

P, R = 4, 6
LENGTHS, SCORES = (4, 6, 0, 5), (1.0, 0.5, -1.0, 1.0)  # the four responses of the page


def proto(lengths=LENGTHS):
    from verl import DataProto

    mask = torch.zeros(len(lengths), P + R, dtype=torch.long)
    mask[:, 1:P] = 1
    for row, length in enumerate(lengths):
        mask[row, P : P + length] = 1
    ids = torch.zeros(len(lengths), P, dtype=torch.long)
    return DataProto.from_dict(
        {"prompts": ids, "responses": torch.zeros(len(lengths), R, dtype=torch.long), "attention_mask": mask}
    )


def rm_scores(lengths=LENGTHS, scores=SCORES):
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

    return RewardManagerBase.assemble_rm_scores(proto(lengths), list(scores))


def source(spec: str) -> str:
    return "\n".join(find_symbol(spec).lines)


def before(text: str, *parts: str) -> bool:
    places = [text.index(part) for part in parts]
    return places == sorted(places)


@lru_cache(maxsize=1)
def postprocessed():
    """verl's own `_postprocess` on two responses whose reward is a dict."""
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopMetrics,
        AgentLoopWorker,
        _InternalAgentLoopOutput,
    )

    def output(length: int):
        mask = torch.zeros(1, P + R, dtype=torch.long)
        mask[:, 1 : P + length] = 1
        return _InternalAgentLoopOutput(
            prompt_ids=torch.zeros(1, P, dtype=torch.long),
            response_ids=torch.zeros(1, R, dtype=torch.long),
            input_ids=torch.zeros(1, P + R, dtype=torch.long),
            position_ids=torch.zeros(1, P + R, dtype=torch.long),
            response_mask=mask[:, P:],
            attention_mask=mask,
            multi_modal_inputs={},
            reward_score=1.0,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"reward_extra_info": {"score": 1.0, "fmt": 1.0}},
        )

    worker = object.__new__(AgentLoopWorker)
    worker.reward_loop_worker_handles = ["a handle"]
    return worker._postprocess([output(3), output(6)])


def q_three_containers():
    data = postprocessed()
    found = {
        "a": "rm_scores" in data.batch.keys(),
        "b": "fmt" in data.non_tensor_batch,
        "c": "fmt" in data.meta_info,
        "d": "reward_extra_keys" in data.meta_info,
    }
    return {key for key, true in found.items() if true}


def q_rm_scores_shape():
    data = postprocessed()
    assert data.batch["rm_scores"].shape == (2, R)
    assert data.batch["rm_scores"].nonzero().tolist() == [[0, 2], [1, 5]]
    return "b"


def q_truncated_column():
    return rm_scores([6], [0.5])[0].nonzero().item()


def q_empty_column():
    """The width R at which the score of an empty response lands in column 7."""
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

    def column(width: int) -> int:
        data = DataProto.from_dict(
            {
                "prompts": torch.zeros(1, P, dtype=torch.long),
                "responses": torch.zeros(1, width, dtype=torch.long),
                "attention_mask": torch.tensor([[0, 1, 1, 1] + [0] * width]),
            }
        )
        return RewardManagerBase.assemble_rm_scores(data, [-1.0])[0].nonzero().item()

    (width,) = [width for width in range(1, 20) if column(width) == 7]
    return width


def q_who_writes_token_level_scores():
    assert 'batch["token_level_scores"] =' not in source(
        "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess"
    )
    fit = source("verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit")
    assert before(fit, "self._compute_values(batch)", 'batch.batch["token_level_scores"] = reward_tensor')
    return "c"


def q_order_of_a_score():
    scoring = source("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._agent_loop_postprocess")
    assert "self._compute_score(" in scoring  # a: row by row, before the rows are joined by _postprocess (b)
    fit = source("verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit")
    assert before(
        fit,
        "generate_sequences(combined_gen_batch)",
        "extract_reward(batch)",
        "self._compute_old_log_prob(batch)",
        "self._compute_values(batch)",
        'batch.batch["token_level_scores"] = reward_tensor',
        "batch = compute_advantage(",
    )
    return ["a", "b", "c", "d", "e", "f"]


def q_reward_timer():
    from types import SimpleNamespace

    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_loop import RewardLoopManager

    def handles(enable: bool):
        model = {"enable": enable, "enable_resource_pool": False}
        config = OmegaConf.create({"reward": {"reward_model": model}})
        return RewardLoopManager.reward_loop_worker_handles.fget(
            SimpleNamespace(config=config, reward_loop_workers=["a worker"])
        )

    assert handles(enable=False) == ["a worker"] and handles(enable=True) is None
    scoring = source("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score")
    assert "enable_async_reward = self.reward_loop_worker_handles is not None" in scoring
    fit = source("verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit")
    gen = fit[
        fit.index('marked_timer("gen"') : fit.index(
            'timing_raw.update(combined_gen_output.meta_info["timing"])'
        )
    ]
    assert "generate_sequences(combined_gen_batch)" in gen
    block = fit[fit.index('marked_timer("reward"') : fit.index("rollout_corr_config =")]
    assert before(
        block, "if self.use_rm and", "self._compute_reward_colocate(batch)", "extract_reward(batch)"
    )
    assert "compute_rm_score(batch)" in source(
        "verl.trainer.ppo.ray_trainer:RayPPOTrainer._compute_reward_colocate"
    )
    # the custom function comes first, also with a reward model
    choice = source("verl.experimental.reward_loop.reward_loop:RewardLoopWorker.compute_score")
    assert before(choice, "custom_reward_function.path is not None", "self.config.reward.reward_model.enable")
    return "b"


def q_score_to_reward_with_kl():
    from verl import DataProto
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    mask = torch.ones(1, 3)
    data = DataProto.from_dict(
        {
            "response_mask": mask,
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0]]),
            "old_log_probs": torch.tensor([[0.5, -0.2, 0.7]]),
            "ref_log_prob": torch.zeros(1, 3),
        }
    )
    data, _ = apply_kl_penalty(data, kl_ctrl=FixedKLController(0.1), kl_penalty="kl")
    rewards = data.batch["token_level_rewards"]
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0.02, 0.93]]))
    return rewards.sum().item()


def q_score_on_tool_token():
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_grpo_outcome_advantage

    rewards = rm_scores([5, 5], [1.0, 0.0])
    mask = proto([5, 5]).batch["attention_mask"][:, P:].clone()
    mask[:, 4] = 0  # the last token is a tool's
    _, returns = compute_gae_advantage_return(rewards, torch.zeros(2, R), mask, 1.0, 1.0)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(["u", "u"], dtype=object))
    assert (returns == 0).all()
    assert advantages[0, 0] > 0
    return "b"


def q_empty_row_metric():
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    data, scores = proto(), rm_scores()
    assert scores.sum(-1).mean() == pytest.approx(0.375)
    data.batch["response_mask"] = data.batch["attention_mask"][:, P:]
    for key in ("token_level_scores", "token_level_rewards", "advantages", "returns"):
        data.batch[key] = scores
    metrics = compute_data_metrics(data, use_critic=False)
    assert metrics["response/aborted_ratio"] == 0.25
    return round(metrics["critic/score/mean"], 3)


def q_critic_prefix():
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    data, scores = proto(), rm_scores()
    data.batch["response_mask"] = data.batch["attention_mask"][:, P:]
    for key in ("token_level_scores", "token_level_rewards", "advantages", "returns"):
        data.batch[key] = scores
    names = compute_data_metrics(data, use_critic=False)
    assert {"critic/score/mean", "critic/rewards/mean"} <= names.keys()
    assert "critic/values/mean" not in names and "critic/vf_explained_var" not in names
    return "b"


def q_colocated_chunk():
    assert "data.chunk(len(self.reward_loop_workers))" in source(
        "verl.experimental.reward_loop.reward_loop:RewardLoopManager.compute_rm_score"
    )
    with pytest.raises(AssertionError, match="equal chunk"):
        proto([1] * 20).chunk(8)
    return "b"
