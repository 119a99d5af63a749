"""Clip-Cov: against entropy collapse, a few tokens of high covariance (A, log-prob) get no gradient.

old_log_prob, log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_clip_cov
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.masked import masked_mean
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate
from minirl.core_algos.ratio import clip_range, ppo_kl, safe_log_ratio


@register_policy_loss("clip_cov")
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    config: Any,
    rollout_is_weights: Tensor | None = None,
    generator: torch.Generator | None = None,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> PolicyLoss:
    """ℓ = z·max(-Aρ, -A·clip(ρ)), z = 0 on k random tokens with lb < cov < ub that PPO's clip has not caught.

    cov = (A - mean A)(log_prob - mean log_prob) per token, k = max(⌊clip_cov_ratio·Σm⌋, 1). Pushing up what
    is likely and good already is what shrinks the entropy. Means and k are the micro-batch's own, so its size
    matters, as in verl. Without `generator` the draw is torch's global
    one, as in verl. No dual clip. log ρ is held within ±20, which verl forgets here (exp overflows to inf,
    the loss to NaN).
    Config: clip_ratio*, policy_loss.clip_cov_ratio, clip_cov_lb, clip_cov_ub.
    Raises ValueError unless clip_cov_ratio > 0. Metrics: actor/pg_clipfrac (tokens dropped), actor/ppo_kl.
    Paper: https://arxiv.org/abs/2505.22617. Cost: 52 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_clip_cov
    """
    low, high = clip_range(config)
    options = config.policy_loss
    if options.clip_cov_ratio <= 0:
        raise ValueError(f"actor.policy_loss.clip_cov_ratio must be positive, got {options.clip_cov_ratio}")
    mask = response_mask.bool()
    log_ratio = safe_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)

    with torch.no_grad():
        cov = centered_product(advantages, log_prob, response_mask)
        eligible = (cov > options.clip_cov_lb) & (cov < options.clip_cov_ub) & mask & ~(clipped > free)
        candidates = eligible.flatten().nonzero().squeeze(-1)
        k = max(int(options.clip_cov_ratio * mask.sum().item()), 1)
        drawn = torch.randperm(len(candidates), generator=generator)[:k].to(candidates.device)
        dropped = torch.zeros_like(mask).flatten().index_fill_(0, candidates[drawn], True).view_as(mask)

    token_losses = torch.where(dropped, 0.0, torch.maximum(free, clipped))
    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, loss_agg_mode, **global_batch_info
    )
    metrics = {
        "actor/pg_clipfrac": masked_mean(dropped.float(), response_mask).item(),
        "actor/ppo_kl": ppo_kl(log_ratio, response_mask),
    }
    return loss, metrics


def centered_product(advantages: Tensor, log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """[B, R]: (A - mean A)(log_prob - mean log_prob), a token's part of the covariance."""
    return (advantages - masked_mean(advantages, response_mask)) * (
        log_prob - masked_mean(log_prob, response_mask)
    )
