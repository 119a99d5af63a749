"""The batch arithmetic is checked before anything is loaded, with the numbers in the message."""

import pytest
from refusals import DEFAULT, assert_refused_in_one_line, changed

from minirl.config import compose, need_critic, need_reference_policy, validate

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["trainer.n_gpus_per_node=3"], ["16 x 8 = 128", "3 ranks"]),
        (["data.train_batch_size=2"], ["ppo_mini_batch_size=4", "data.train_batch_size=2"]),
        (["data.train_batch_size=18"], ["18", "multiple", "2 prompts"]),
        ([f"{A}.ppo_mini_batch_size=1", f"{R}.n=2", "trainer.n_gpus_per_node=4"], ["1 x 2 = 2", "4 ranks"]),
        ([f"{A}.ppo_micro_batch_size_per_gpu=5"], ["32 trajectories per rank", "per_gpu=5"]),
        ([f"{A}.ppo_micro_batch_size_per_gpu=null"], ["per_gpu=None", "use_dynamic_bsz"]),
        ([f"{A}.ppo_micro_batch_size_per_gpu=0"], ["per_gpu=0"]),
        (["critic.ppo_micro_batch_size_per_gpu=7"], ["critic", "per_gpu=7"]),
        (["critic.ppo_mini_batch_size=32"], ["critic.ppo_mini_batch_size=32"]),
        ([f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=40"], ["=40", "56 tokens"]),
        ([f"{R}.log_prob_use_dynamic_bsz=true"], ["log_prob_use_dynamic_bsz=True", "use_dynamic_bsz=False"]),
        ([f"{R}.log_prob_micro_batch_size_per_gpu=null"], [f"{R}.log_prob_micro_batch_size_per_gpu=None"]),
        ([f"{A}.use_kl_loss=true", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=null"],
         ["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=None"]),
        ([f"{R}.n=0"], [f"{R}.n=0", "at least 1"]),
        (["data.train_batch_size=0"], ["data.train_batch_size=0"]),
        ([f"{R}.temperature=0"], ["temperature=0", "divides"]),
        ([f"{R}.top_p=0"], ["rollout.top_p=0"]),
        ([f"{R}.top_p=1.5"], ["rollout.top_p=1.5"]),
        ([f"{R}.top_k=0"], ["rollout.top_k=0"]),
        ([f"{R}.name=vllm", f"{R}.temperature=3"], ["rollout.temperature=3", "vLLM samples at 0.01 to 2"]),
        ([f"{R}.max_model_len=40"], ["max_model_len=40", "56 tokens"]),
        ([f"{R}.gpu_memory_utilization=1.5"], ["gpu_memory_utilization=1.5", "at most 1"]),
        ([f"{R}.logprobs_mode=raw_logits"], ["logprobs_mode=raw_logits", "did you mean"]),
        ([f"{R}.val_kwargs.do_sample=true"], ["val_kwargs.temperature", "0.0"]),
        ([f"{A}.loss_agg_mode=token_mean"], ["loss_agg_mode=token_mean", "did you mean token-mean"]),
        ([f"{R}.name=sglang"], ["rollout.name=sglang", "builtin, vllm"]),
        (["reward.reward_manager.name=dapoo"], ["dapoo", "did you mean dapo"]),
        (["trainer.resume_mode=resume_path"], ["trainer.resume_from_path"]),
        (["algorithm.rollout_correction.rollout_is=token"], ["calculate_log_probs=true"]),
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k1", f"{R}.calculate_log_probs=true"],
         ["rollout_rs_threshold"]),
        (["algorithm.adv_estimator=gdpo"], ["gdpo_reward_keys"]),
        (["algorithm.filter_groups.enable=true"], ["filter_groups.metric"]),
        (["distillation.enabled=true"], ["teacher_model.model_path"]),
        (["minirl.placement=rai"], ["minirl.placement=rai", "did you mean ray?"]),
        (["minirl.worker_timeout=0"], ["minirl.worker_timeout=0"]),
        (["data.gen_batch_size=0"], ["data.gen_batch_size=0"]),
        (["data.gen_batch_size=3", "trainer.n_gpus_per_node=16"],
         ["data.gen_batch_size", "3 x 8 = 24", "16 ranks"]),
        (["data.gen_batch_size=18"], ["data.gen_batch_size=18", "multiple", "2 prompts"]),
    ],
)  # fmt: skip
def test_impossible_configuration_is_refused_in_one_line_with_its_numbers(overrides, parts):
    assert_refused_in_one_line(overrides, parts)


def test_micro_batch_larger_than_the_mini_batch_is_one_micro_batch():
    validate(changed(f"{A}.ppo_micro_batch_size_per_gpu=64"))


def test_prompts_that_filtering_draws_need_not_fill_whole_mini_batches():
    filtered = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]
    validate(changed("data.gen_batch_size=18", *filtered))
    with pytest.raises(ValueError, match="18 x 8 = 144 .* 32 ranks"):
        validate(changed("data.gen_batch_size=18", "trainer.n_gpus_per_node=32", *filtered))


def test_critic_keys_are_not_checked_without_a_critic():
    validate(changed("algorithm.adv_estimator=grpo", "critic.ppo_micro_batch_size_per_gpu=7"))


def test_compose_validates_unless_told_not_to():
    with pytest.raises(ValueError, match="at least 1"):
        compose([f"{R}.n=0"])
    compose([f"{R}.n=0"], check=False)


def test_critic_is_needed_for_gae_unless_switched():
    assert need_critic(DEFAULT)
    assert not need_critic(changed("algorithm.adv_estimator=grpo"))
    assert need_critic(changed("algorithm.adv_estimator=grpo", "critic.enable=true"))
    assert not need_critic(changed("critic.enable=false"))


def test_reference_policy_is_needed_for_either_kl():
    assert not need_reference_policy(DEFAULT)
    assert need_reference_policy(changed("algorithm.use_kl_in_reward=true"))
    assert need_reference_policy(changed(f"{A}.use_kl_loss=true"))
