"""PPO's clipped surrogate, with the second clip that bounds what one bad token can do ("dual clip").

old_log_prob, log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_vanilla
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.masked import masked_mean
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate
from minirl.core_algos.ratio import clip_range, ppo_kl, safe_log_ratio


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    config: Any,
    rollout_is_weights: Tensor | None = None,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> PolicyLoss:
    """ℓ = max(-Aρ, -A·clip(ρ, 1-ε_low, 1+ε_high)), and where A < 0 no more than -A·c.

    The max is pessimistic: the clip stops the gain, never the loss. A token that got worse keeps its full
    gradient unless A < 0 and ρ > c, where the loss is held at c|A| and its gradient is zero.
    Config: clip_ratio, clip_ratio_low, clip_ratio_high (ε; raise the upper one for DAPO's clip-higher),
    clip_ratio_c (c > 1). Metrics: actor/pg_clipfrac (tokens clipped by ε), actor/pg_clipfrac_lower (by c),
    actor/ppo_kl.
    Papers: https://arxiv.org/abs/1707.06347, https://arxiv.org/abs/1912.09729 (dual clip).
    Cost: 41 passes over [B, R]. verl: verl.trainer.ppo.core_algos:compute_policy_loss_vanilla
    """
    low, high = clip_range(config)
    if config.clip_ratio_c <= 1.0:
        raise ValueError(f"actor.clip_ratio_c must be greater than 1, got {config.clip_ratio_c}")
    log_ratio = safe_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()

    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    worst = torch.maximum(free, clipped)
    ceiling = -advantages * config.clip_ratio_c
    token_losses = torch.where(advantages < 0, torch.minimum(worst, ceiling), worst)

    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, loss_agg_mode, **global_batch_info
    )
    at_ceiling = (worst > ceiling) & (advantages < 0)
    metrics = {
        "actor/pg_clipfrac": masked_mean((clipped > free).float(), response_mask).item(),
        "actor/ppo_kl": ppo_kl(log_ratio, response_mask),
        "actor/pg_clipfrac_lower": masked_mean(at_ceiling.float(), response_mask).item(),
    }
    return loss, metrics
