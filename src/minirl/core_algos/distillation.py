"""On-policy distillation: the student samples, a teacher scores every token it sampled.

log_prob, teacher_log_prob [B, R] (or student_logits [.., V], teacher top-k [.., K]) -> token losses -> loss.
Simplified against verl: plain tensors (verl computes the top-k loss inside the engine's logit processor on
packed sequences), plain floats as metrics.
verl: verl.trainer.distillation.losses:distillation_loss,
verl.trainer.distillation.fsdp.losses:compute_forward_kl_topk
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo, agg_loss
from minirl.core_algos.kl import KL_PENALTIES, kl_penalty
from minirl.core_algos.logprob import logprobs_of_ids
from minirl.core_algos.policy_loss.registry import get_policy_loss_fn
from minirl.core_algos.registry import Registry

DISTILLATION_LOSS_REGISTRY = Registry("distillation loss", "distillation.distillation_loss.loss_mode")
register_distillation_loss = DISTILLATION_LOSS_REGISTRY.register

# d(log π - log π_T)/dθ = d log π/dθ: the teacher drops out
TEACHER_FREE_GRADIENT = ("k1", "kl")


class TopK(NamedTuple):
    """Per position, all [..] float32 except the count: what `forward_kl_topk` measured."""

    distillation_losses: Tensor
    student_mass: Tensor  # probability that each side puts on the teacher's K tokens
    teacher_mass: Tensor
    overlap_count: Tensor  # how many of the K are in the student's own top K
    overlap_token_advantage: Tensor  # mean over those of -p_T (log p_T - log p_S)


@register_distillation_loss("forward_kl_topk")
def forward_kl_topk(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    teacher_ids: Tensor,
    *,
    log_prob_min_clamp: float | None = None,
) -> TopK:
    """D = max(0, Σ_{v ∈ teacher's top K} p_T(v) (log p_T(v) - log p_S(v))): KL(π_T‖π) cut off after K tokens.

    student_logits [.., V], teacher_logprobs and teacher_ids [.., K]. Cut off, the sum can turn negative; then
    the loss is 0 and so is its gradient. `log_prob_min_clamp` bounds both log-probs from below.
    Cost: no float32 copy of the logits (verl: a log-softmax of all), one top-k over [.., V] for metrics.
    Paper: https://arxiv.org/abs/2306.13649. verl:
    verl.trainer.distillation.fsdp.losses:compute_forward_kl_topk
    """
    assert teacher_logprobs.shape == teacher_ids.shape, (teacher_logprobs.shape, teacher_ids.shape)
    student_logprobs = logprobs_of_ids(student_logits, teacher_ids)
    teacher_logprobs = teacher_logprobs.float()
    student_mass = student_logprobs.exp().sum(dim=-1)
    teacher_mass = teacher_logprobs.exp().sum(dim=-1)
    if log_prob_min_clamp is not None:
        student_logprobs = student_logprobs.clamp(min=log_prob_min_clamp)
        teacher_logprobs = teacher_logprobs.clamp(min=log_prob_min_clamp)
    token_kl = teacher_logprobs.exp() * (teacher_logprobs - student_logprobs)
    with torch.no_grad():
        student_ids = student_logits.topk(teacher_ids.shape[-1], dim=-1).indices
        shared = (teacher_ids.unsqueeze(-1) == student_ids.unsqueeze(-2)).any(dim=-1)
        count = shared.sum(dim=-1)
        advantage = (-token_kl * shared).sum(dim=-1) / count.clamp(min=1)
    return TopK(token_kl.sum(dim=-1).clamp(min=0.0), student_mass, teacher_mass, count, advantage)


@register_distillation_loss(*KL_PENALTIES)
def reverse_kl_estimate(log_prob: Tensor, teacher_log_prob: Tensor, *, loss_mode: str) -> Tensor:
    """[B, R]: D = an estimate of KL(π‖π_T) at the sampled token, the teacher as reference.

    verl: verl.trainer.distillation.losses:compute_distillation_loss_reverse_kl_estimator
    """
    return kl_penalty(log_prob, teacher_log_prob, loss_mode)


def uses_topk(loss_mode: str) -> bool:
    """Whether the teacher must return its K best tokens, not the sampled one. ValueError if unknown."""
    return DISTILLATION_LOSS_REGISTRY.find(loss_mode) is forward_kl_topk


@dataclass(frozen=True)
class DistillationClip:
    """Clip range of the policy-gradient form, in the shape the policy losses expect."""

    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float = 3.0


def check_form(config: Any) -> None:
    """Raise ValueError for a `loss_mode` that does not exist, or that the chosen form cannot train with.

    `config` is distillation.distillation_loss.
    """
    DISTILLATION_LOSS_REGISTRY.find(config.loss_mode)
    if config.policy_loss_mode != "vanilla":
        raise ValueError(
            f"distillation.distillation_loss.policy_loss_mode must be vanilla, got {config.policy_loss_mode}"
        )
    if not config.use_policy_gradient and config.loss_mode in TEACHER_FREE_GRADIENT:
        raise ValueError(
            f"distillation.distillation_loss.loss_mode={config.loss_mode} has a gradient without the teacher "
            "in it. Set use_policy_gradient=True, or loss_mode=k3"
        )


def distillation_loss(
    distillation_losses: Tensor,
    response_mask: Tensor,
    *,
    config: Any,
    loss_agg_mode: str,
    log_prob: Tensor | None = None,
    old_log_prob: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> tuple[Tensor, dict[str, float]]:
    """Token losses D [B, R] -> scalar, in one of two forms; `config` is distillation.distillation_loss.

    use_policy_gradient=False (supervised): agg_loss(D), differentiated through D.
    use_policy_gradient=True: the vanilla policy loss with advantages = -sg(D): "be surer of what the teacher
    likes"; only this form needs the two log-probs. D is first held within ±loss_max_clamp. Both forms are
    normalised by `global_batch_info`, as in verl 0.9.1; 0.8.0 divides by what the previous micro-batch left.
    Raises ValueError for k1 and its alias kl in the supervised form (verl lets kl through): their gradient
    does not contain the teacher. Also for a policy_loss_mode other than vanilla.
    Paper: https://arxiv.org/abs/2306.13649 (supervised form);
    https://thinkingmachines.ai/blog/on-policy-distillation/ (policy-gradient form).
    verl: verl.trainer.distillation.losses:distillation_loss
    """
    check_form(config)
    metrics = distillation_metrics(distillation_losses, response_mask)
    if config.loss_max_clamp is not None:
        distillation_losses = distillation_losses.clamp(-config.loss_max_clamp, config.loss_max_clamp)
    if not config.use_policy_gradient:
        return agg_loss(distillation_losses, response_mask, loss_agg_mode, **global_batch_info), metrics
    assert log_prob is not None and old_log_prob is not None, "the policy-gradient form needs both log-probs"
    loss, pg_metrics = get_policy_loss_fn(config.policy_loss_mode)(
        old_log_prob,
        log_prob,
        -distillation_losses.detach(),
        response_mask,
        loss_agg_mode=loss_agg_mode,
        config=DistillationClip(config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high),
        rollout_is_weights=rollout_is_weights,
        **global_batch_info,
    )
    return loss, metrics | {
        key.replace("actor/", "distillation/", 1): value for key, value in pg_metrics.items()
    }


@torch.no_grad()
def distillation_metrics(distillation_losses: Tensor, response_mask: Tensor) -> dict[str, float]:
    """distillation/loss_min, loss_max, abs_loss over the generated tokens, before clamping.

    abs_loss: the mean of |D|, for k1 can be negative (verl leaves it out for forward_kl_topk).
    verl: verl.trainer.distillation.losses:compute_distillation_loss_range
    """
    losses = distillation_losses[response_mask.bool()]
    if losses.numel() == 0:
        return {}
    return {
        "distillation/loss_min": losses.min().item(),
        "distillation/loss_max": losses.max().item(),
        "distillation/abs_loss": losses.abs().mean().item(),
    }


@torch.no_grad()
def topk_metrics(topk: TopK, response_mask: Tensor, k: int) -> dict[str, float]:
    """distillation/student_mass, teacher_mass (mean, _min, _max), overlap_ratio, overlap_token_advantage.

    Overlap: how much of the teacher's top K is in the student's own, https://arxiv.org/abs/2604.13016.
    verl: verl.trainer.distillation.losses:compute_forward_kl_topk
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    count = topk.overlap_count[mask]
    shared = topk.overlap_token_advantage[mask][count > 0]
    metrics = {
        "distillation/overlap_ratio": (count.float().mean() / k).item(),
        "distillation/overlap_token_advantage": shared.mean().item() if shared.numel() else 0.0,
    }
    for side in ("student_mass", "teacher_mass"):
        mass = getattr(topk, side)[mask]
        metrics[f"distillation/{side}"] = mass.mean().item()
        metrics[f"distillation/{side}_min"] = mass.min().item()
        metrics[f"distillation/{side}_max"] = mass.max().item()
    return metrics


def combine_with_task_loss(policy_loss: Tensor, distill_loss: Tensor, *, config: Any) -> Tensor:
    """distillation_loss_coef·D + policy loss with `use_task_rewards`; else D alone, coefficient unread.

    verl: verl.trainer.distillation.losses:distillation_ppo_loss
    """
    if not config.use_task_rewards:
        return distill_loss
    return policy_loss + config.distillation_loss_coef * distill_loss
