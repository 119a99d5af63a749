"""Answers of data/quiz/day3_ppo.yml, computed from verl 0.8.0, and from minirl where it is shown."""

import torch
from tensordict import TensorDict

from minirl.config import compose
from minirl.core_algos.advantage import compute_gae_advantage_return
from minirl.core_algos.kl import kl_penalty
from minirl.core_algos.policy_loss import get_policy_loss_fn
from minirl.pin import find_symbol, use_verl

use_verl()

from verl.trainer.ppo import core_algos  # noqa: E402
from verl.trainer.ppo.utils import need_reference_policy  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402


def _source(spec: str) -> str:
    return "\n".join(find_symbol(spec).lines)


def _only(holds: dict[str, bool]) -> str:
    """The one option whose statement holds."""
    (key,) = [key for key, true in holds.items() if true]
    return key


def _verl_loss(ratio: float, advantage: float, **clip: float) -> float:
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **clip)
    loss, _ = core_algos.compute_policy_loss_vanilla(
        torch.zeros(1, 1),
        torch.tensor([[ratio]]).log(),
        torch.tensor([[advantage]]),
        torch.ones(1, 1),
        "token-mean",
        config,
    )
    return loss.item()


def _minirl_loss(ratio: float, advantage: float, *overrides: str) -> float:
    actor = compose(list(overrides)).actor_rollout_ref.actor
    new = torch.tensor([[ratio]]).log()
    advantages, mask = torch.tensor([[advantage]]), torch.ones(1, 1)
    loss, _ = get_policy_loss_fn("vanilla")(torch.zeros(1, 1), new, advantages, mask, config=actor)
    return loss.item()


def q_old_data_by_counting():
    old, new, visits = 0.20, 0.15, 1000
    ratio = torch.exp(torch.tensor(new).log() - torch.tensor(old).log()).item()
    counted = visits * old * ratio
    assert abs(counted - visits * new) < 1e-3
    return round(counted, 3)


def q_gae_shape():
    mask = torch.ones(64, 24, dtype=torch.long)
    advantages, _ = core_algos.compute_gae_advantage_return(
        torch.rand(64, 24), torch.rand(64, 24), mask, 1.0, 1.0
    )
    return {(64,): "a", (64, 56): "b", (64, 24): "c", (64, 25): "d"}[tuple(advantages.shape)]


def q_pushed_down_far_enough():
    """verl's loss and its gradient, and minirl's loss, which the question shows."""
    new = torch.tensor([[0.75]]).log().requires_grad_()
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    advantages, mask = torch.tensor([[-1.73]]), torch.ones(1, 1)
    loss, _ = core_algos.compute_policy_loss_vanilla(
        torch.zeros(1, 1), new, advantages, mask, "token-mean", config
    )
    loss.backward()
    printed = (round(loss.item(), 3), round(new.grad.item(), 3))
    ours = new.detach().requires_grad_()
    actor = compose([]).actor_rollout_ref.actor
    get_policy_loss_fn("vanilla")(torch.zeros(1, 1), ours, advantages, mask, config=actor)[0].backward()
    assert ours.grad.item() == new.grad.item()
    assert abs(_minirl_loss(0.75, -1.73) - loss.item()) < 1e-6
    return {(1.298, 1.298): "a", (1.384, 0.0): "b", (1.384, 1.384): "c", (1.73, 1.73): "d"}[printed]


def q_bad_token_grown_threefold():
    ours = _minirl_loss(3.5, -1.73)
    assert abs(ours - _verl_loss(3.5, -1.73)) < 1e-6
    return round(ours, 2)


def q_who_reads_the_option():
    fit = _source("verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit")
    trainer = fit + _source("verl.trainer.ppo.ray_trainer:RayPPOTrainer.__init__")
    losses = {
        "b": ("clip_ratio_high", _source("verl.trainer.ppo.core_algos:compute_policy_loss_vanilla")),
        "d": ("kl_loss_coef", _source("verl.workers.utils.losses:ppo_loss")),
        "e": ("cliprange_value", _source("verl.workers.utils.losses:value_loss")),
    }
    for name, text in losses.values():
        assert f"config.{name}" in text and name not in trainer
    read_by_trainer = {
        "a": "lam=self.config.algorithm.lam",
        "c": "get_kl_controller(self.config.algorithm.kl_ctrl)",
    }
    return {key for key, text in read_by_trainer.items() if text in trainer}


def q_two_kl_switches():
    config = compose(["algorithm.kl_ctrl.kl_coef=0.1", "actor_rollout_ref.actor.kl_loss_coef=0.1"])
    uses = int(config.algorithm.use_kl_in_reward) + int(config.actor_rollout_ref.actor.use_kl_loss)
    assert not need_reference_policy(config)
    assert "if self.config.algorithm.use_kl_in_reward:" in _source(
        "verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit"
    )
    assert "if config.use_kl_loss:" in _source("verl.workers.utils.losses:ppo_loss")
    return {0: "d", 2: "a"}[uses]


def q_optimizer_steps():
    prompts, mini, n, epochs = 256, 64, 8, 2
    data = TensorDict({"row": torch.arange(prompts * n)}, batch_size=[prompts * n])
    return sum(
        1
        for _ in tu.make_iterator(
            data, mini_batch_size=mini * n, epochs=epochs, seed=42, dataloader_kwargs={}
        )
    )


def q_negative_advantage_above_the_clip():
    ours = _minirl_loss(1.5, -1.0)
    assert abs(ours - _verl_loss(1.5, -1.0)) < 1e-6
    return round(ours, 3)


def q_clip_ratio_alone():
    ours = _minirl_loss(1.4, 1.0, "actor_rollout_ref.actor.clip_ratio=0.5")
    assert abs(ours - _verl_loss(1.4, 1.0, clip_ratio=0.5)) < 1e-6
    return round(ours, 3)


def q_gae_over_a_tool_gap():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.0, 0.8]])
    mask = torch.tensor([[1, 0, 1]])
    _, ours = compute_gae_advantage_return(rewards, values, mask, gamma=1.0, lam=0.5)
    _, theirs = core_algos.compute_gae_advantage_return(rewards, values, mask, 1.0, 0.5)
    torch.testing.assert_close(ours, theirs)
    return round((ours - values)[0, 0].item(), 3)


def q_k1_as_a_loss():
    grads = []
    for fn in (kl_penalty, core_algos.kl_penalty):
        log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
        fn(log_prob, torch.tensor([-1.5, -1.0]), "k1").sum().backward()
        grads.append(tuple(log_prob.grad.tolist()))
    assert grads[0] == grads[1]
    return {(1.0, 1.0): "a", (0.5, -1.0): "b", (1.0, -1.0): "c", (0.0, 0.0): "d"}[grads[0]]


def q_clipfrac_always_zero():
    """With the policy that sampled, the metrics are exactly 0 while the gradient is not."""
    log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        log_prob.detach(), log_prob, torch.tensor([[1.0, -0.5]]), torch.ones(1, 2), "token-mean", config
    )
    loss.backward()
    assert (
        metrics["actor/pg_clipfrac"] == 0 and metrics["actor/ppo_kl"] == 0 and log_prob.grad.abs().min() > 0
    )
    return "c"
