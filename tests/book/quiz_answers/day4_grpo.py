"""Answers of data/quiz/day4_grpo.yml, computed from verl 0.8.0, and from minirl where it is shown."""

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from minirl.core_algos.advantage import compute_grpo_outcome_advantage
from minirl.pin import find_symbol, use_verl

use_verl()

from verl.protocol import DataProto  # noqa: E402
from verl.single_controller.base.decorator import MAGIC_ATTR  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.trainer.ppo.ray_trainer import compute_advantage  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402


def _source(spec: str) -> str:
    return "\n".join(find_symbol(spec).lines)


def _verl(scores: list[float], uid: list[str], **options) -> list[float]:
    rewards = torch.tensor(scores).unsqueeze(-1)
    index = np.array(uid, dtype=object)
    return core_algos.compute_grpo_outcome_advantage(rewards, torch.ones_like(rewards), index, **options)[0][
        :, 0
    ].tolist()


def _minirl(scores: list[float], uid: list[str], **options) -> list[float]:
    rewards = torch.tensor(scores).unsqueeze(-1)
    return compute_grpo_outcome_advantage(rewards, torch.ones_like(rewards), uid, **options)[0][:, 0].tolist()


def _policy_loss(
    log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss at ratio 1 and its gradient to every token."""
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    log_prob = log_prob.clone().requires_grad_()
    loss, _ = core_algos.compute_policy_loss_vanilla(
        log_prob.detach(), log_prob, advantages, mask, "token-mean", config
    )
    loss.backward()
    return loss.detach(), log_prob.grad


def q_group_statistics_container():
    data = DataProto.from_dict(
        tensors={"token_level_rewards": torch.tensor([[1.0], [0.0]]), "response_mask": torch.ones(2, 1)},
        non_tensors={"uid": np.array(["a", "a"], dtype=object)},
    )
    before = (set(data.batch.keys()), set(data.non_tensor_batch), set(data.meta_info))
    data = compute_advantage(data, "grpo", config=OmegaConf.create({}))
    after = (set(data.batch.keys()), set(data.non_tensor_batch), set(data.meta_info))
    in_batch, in_non_tensor, in_meta = (new - old for new, old in zip(after, before, strict=True))
    if in_batch - {"advantages", "returns"}:
        return "a"
    return "b" if in_non_tensor else "c" if in_meta else "d"


def q_grpo_shape():
    prompts, n, width = 16, 8, 24
    rewards, mask = torch.zeros(prompts * n, width), torch.ones(prompts * n, width)
    rewards[:, 19], mask[:, 20:] = torch.rand(prompts * n), 0
    uid = np.repeat(np.array([str(p) for p in range(prompts)], dtype=object), n)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, uid)
    if advantages.shape != (128, 24):
        return {(128,): "a", (16, 8): "b"}[tuple(advantages.shape)]
    same = torch.equal(advantages[:, :20], advantages[:, :1].expand(-1, 20)) and not advantages[:, 20:].any()
    return "c" if same else "d"


def q_baseline_from_where():
    scores, others = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0])
    uid = ["a"] * 4 + ["b"] * 2
    advantages = torch.tensor(_verl(scores.tolist() + others.tolist(), uid, norm_adv_by_std_in_grpo=False))
    baseline = scores[0] - advantages[0]
    candidates = {"a": scores.mean(), "b": scores[1:].mean(), "d": torch.cat([scores, others]).mean()}
    (key,) = [key for key, value in candidates.items() if torch.isclose(value, baseline)]
    return key


def q_siblings_on_two_ranks():
    fit = _source("verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit")
    balanced, estimated, updated = (
        fit.index(text)
        for text in ("self._balance_batch(batch", "batch = compute_advantage(", "self._update_actor(batch)")
    )
    assert balanced < estimated < updated
    mode = getattr(ActorRolloutRefWorker.update_actor, MAGIC_ATTR)["dispatch_mode"]
    split_by_mesh = isinstance(mode, dict) and {"dispatch_fn", "collect_fn"} <= set(mode)
    return "b" if split_by_mesh else "c"


def q_who_reads_norm_by_std():
    fit = _source("verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit")
    assert "norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo" in fit and "self.config.algorithm.get(" in fit
    for elsewhere in (
        "verl.workers.utils.losses:ppo_loss",
        "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla",
    ):
        assert "norm_adv_by_std_in_grpo" not in _source(elsewhere)
    return "d"


def q_loss_is_zero():
    advantages = torch.tensor(_verl([1.0, 1.0, 1.0, 0.0], ["a"] * 4)).unsqueeze(-1).expand(4, 3)
    loss, gradient = _policy_loss(torch.randn(4, 3), advantages, torch.ones(4, 3))
    assert abs(loss.item()) < 1e-6 and gradient.abs().min() > 0
    none, no_gradient = _policy_loss(torch.randn(4, 3), torch.zeros(4, 3), torch.ones(4, 3))
    assert none == 0 and not no_gradient.any()
    return "a"


def q_micro_batches_per_step():
    prompts, n, mini, micro = 32, 8, 8, 16
    rows = TensorDict({"row": torch.arange(prompts * n)}, batch_size=[prompts * n])
    steps = list(tu.make_iterator(rows, mini_batch_size=mini * n, epochs=1, seed=42, dataloader_kwargs={}))
    assert len(steps) == 4
    return len(steps[0].split(micro))


def q_two_siblings():
    ours = _minirl([1.0, 0.0], ["a", "a"])[0]
    assert abs(ours - _verl([1.0, 0.0], ["a", "a"])[0]) < 1e-6
    return round(ours, 4)


def q_groups_of_one():
    ours, theirs = (fn([0.2, 0.7, 1.0], ["a", "b", "c"]) for fn in (_minirl, _verl))
    assert np.allclose(ours, theirs)
    shown = {
        "a": [0.0, 0.0, 0.0],
        "c": [0.2, 0.7, 1.0],
        "d": [-1.072, 0.165, 0.907],
    }
    scores = torch.tensor([0.2, 0.7, 1.0])
    assert np.allclose(shown["d"], ((scores - scores.mean()) / scores.std()).tolist(), atol=1e-3)
    (key,) = [key for key, values in shown.items() if [round(a, 3) for a in ours] == values]
    return key


def q_shuffled_rows():
    args = ([1.0, 0.0, 0.0, 0.0], ["b", "a", "b", "a"])
    ours, theirs = (fn(*args, norm_adv_by_std_in_grpo=False) for fn in (_minirl, _verl))
    assert ours == theirs
    return {(0.5, -0.5, 0.0, 0.0): "a", (0.5, 0.0, -0.5, 0.0): "b", (0.75, -0.25, -0.25, -0.25): "c"}[
        tuple(ours)
    ]


def q_vectorized_ignores_the_switch():
    data = DataProto.from_dict(
        tensors={"token_level_rewards": torch.tensor([[1.0], [0.0]]), "response_mask": torch.ones(2, 1)},
        non_tensors={"uid": np.array(["a", "a"], dtype=object)},
    )
    data = compute_advantage(
        data, "grpo_vectorized", norm_adv_by_std_in_grpo=False, config=OmegaConf.create({})
    )
    printed = [round(a, 3) for a in data.batch["advantages"][:, 0].tolist()]
    return {(0.5, -0.5): "a", (1.0, -1.0): "b", (0.707, -0.707): "d"}[tuple(printed)]


def q_zero_variance_group():
    uid = ["a"] * 4 + ["b"] * 4
    advantages = torch.tensor(_verl([1.0, 0.0, 1.0, 0.0] + [0.0] * 4, uid)).unsqueeze(-1)
    log_prob, ref = torch.randn(8, 1), torch.randn(8, 1)
    remains = {"d"}  # the rows are sampled and scored before anyone knows that they are all equal
    _, with_it = _policy_loss(log_prob, advantages, torch.ones(8, 1))
    _, without_it = _policy_loss(log_prob[:4], advantages[:4], torch.ones(4, 1))
    if torch.allclose(with_it[:4] * 2, without_it):
        remains.add("a")
    if with_it[4:].any():
        remains.add("b")
    moving = log_prob.clone().requires_grad_()
    core_algos.kl_penalty(moving, ref, "low_var_kl").mean().backward()
    if moving.grad[4:].any():
        remains.add("c")
    return remains
