"""Answers of data/quiz/day1_prerequisites.yml, computed from the pinned verl.

One function per question; its name is the question's id.
"""

import warnings

import numpy as np
import torch

from minirl.config import compose
from minirl.pin import find_symbol, use_verl


def _source(spec: str) -> str:
    return "\n".join(find_symbol(spec).lines)


def q_which_logits_score_the_response():
    assert "values[seq_offset - resp_len - 1 : seq_offset - 1]" in _source(
        "verl.workers.utils.padding:no_padding_2_padding"
    )
    seq_offset, resp_len = 5, 2
    shown = torch.arange(5)[seq_offset - resp_len - 1 : seq_offset - 1].tolist()
    assert shown == torch.arange(5)[3 - 1 : 3 + 2 - 1].tolist()
    return {(3, 4): "a", (2, 3): "b", (1, 2): "c", (2, 3, 4): "d"}[tuple(shown)]


def q_log_softmax_by_hand():
    use_verl()
    from verl.utils.torch_functional import logprobs_from_logits_naive

    return round(logprobs_from_logits_naive(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([1])).item(), 2)


def q_mask_container():
    source = _source("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess")
    tensors = source.split("batch = TensorDict(", 1)[1].split("batch_size=len(inputs)", 1)[0]
    assert '"response_mask": response_mask' in tensors
    return "a"


def q_advantage_shape():
    use_verl()
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(["u", "u"], dtype=object))
    assert advantages.shape == (2, 3) and advantages[0, 0] == advantages[0, 1] != 0 and advantages[0, 2] == 0
    return "b"


def q_who_needs_a_critic():
    use_verl()
    from verl.trainer.ppo.utils import need_critic

    built = set()
    cases = {"a": ("gae", None), "b": ("grpo", None), "c": ("grpo", True), "d": ("gae", False)}
    for key, (name, enable) in cases.items():
        config = compose([])
        config.algorithm.adv_estimator, config.critic.enable = name, enable
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if need_critic(config):
                built.add(key)
    return built


def q_is_a_ref_built():
    use_verl()
    from verl.trainer.ppo.utils import need_reference_policy

    config = compose([])
    config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu = 8
    config.actor_rollout_ref.actor.use_kl_loss = False
    config.algorithm.use_kl_in_reward = False
    return {True: "a", False: "b"}[bool(need_reference_policy(config))]


def q_kl_three_of_one_token():
    use_verl()
    from verl.trainer.ppo.core_algos import kl_penalty_forward

    value = kl_penalty_forward(torch.tensor([-1.0]), torch.tensor([-2.0]), "low_var_kl").item()
    return round(value, 2)


def q_rlhf_or_rlvr():
    # The score's source, not the estimator, is what need_reward_model asks for.
    source = _source("verl.trainer.ppo.utils:need_reward_model")
    assert "reward_model.enable" in source and "adv_estimator" not in source
    return "c"


def q_push_down_without_an_answer():
    """Gradient on the logit of the wrong answer that was written (index 2), beyond normalisation."""
    logits = torch.tensor([1.0, 1.0, 0.0, 0.0], requires_grad=True)
    pi = logits.detach().softmax(0)
    (-logits.log_softmax(0)[0]).backward()  # SFT on the right answer, index 0
    assert torch.allclose(logits.grad[2], pi[2])  # only the share that normalisation takes
    logits.grad = None
    advantage = -0.5  # of the sampled wrong answer
    (-advantage * logits.log_softmax(0)[2]).backward()
    assert logits.grad[2] > 0.4  # descent lowers this very logit
    return "c"


def q_computed_on_the_driver():
    trainer = "verl.trainer.ppo.ray_trainer:"
    remote = {"a": "_compute_old_log_prob", "b": "_compute_values", "d": "_compute_ref_log_prob"}
    for name in remote.values():
        assert "_wg." in _source(f"{trainer}RayPPOTrainer.{name}")  # a call to a worker group
    assert "_wg." not in _source(f"{trainer}compute_advantage")
    assert "# compute advantages, executed on the driver process" in _source(f"{trainer}RayPPOTrainer.fit")
    return ({"a", "b", "c", "d"} - set(remote)).pop()


def q_ratio_denominator():
    assert 'old_log_prob = data["old_log_probs"]' in _source("verl.workers.utils.losses:ppo_loss")
    loss = _source("verl.trainer.ppo.core_algos:compute_policy_loss_vanilla")
    assert "negative_approx_kl = log_prob - old_log_prob" in loss
    assert "ratio = torch.exp(negative_approx_kl)" in loss
    assert not compose([]).actor_rollout_ref.rollout.calculate_log_probs
    return "b"


def q_score_metric_without_critic():
    from verl.protocol import DataProto
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    ones = torch.ones(2, 3)
    tensors = dict.fromkeys(("token_level_scores", "token_level_rewards", "advantages", "returns"), ones)
    whole = torch.ones(2, 5, dtype=torch.long)
    batch = DataProto.from_dict(
        tensors
        | {"prompts": whole[:, :2], "responses": whole[:, 2:], "response_mask": whole[:, 2:]}
        | {"attention_mask": whole}
    )
    metrics = compute_data_metrics(batch, use_critic=False)
    assert "critic/score/mean" in metrics and "critic/values/mean" not in metrics
    return "b"
