"""CISPO: the clipped ratio is only a weight; every token keeps a gradient.

old_log_prob, log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_cispo
"""

from typing import Any, Unpack

from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.masked import masked_mean
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate
from minirl.core_algos.ratio import clip_range, ppo_kl, safe_log_ratio


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
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
    """ℓ = -sg(clip(ρ, 1-ε_low, 1+ε_high))·A·log_prob.

    PPO's clip silences a token beyond the range; rare but decisive tokens ("wait", "however") go first. Here
    they keep pushing, with a bounded weight. Config: clip_ratio*.
    Metrics: actor/pg_clipfrac (tokens with ρ out of range), actor/ppo_kl, actor/pg_clipfrac_lower (always 0).
    Paper: https://arxiv.org/abs/2506.13585. Cost: 25 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_cispo
    """
    low, high = clip_range(config)
    log_ratio = safe_log_ratio(log_prob, old_log_prob).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - low, 1 + high)
    token_losses = -weight * advantages * log_prob
    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, loss_agg_mode, **global_batch_info
    )
    metrics = {
        "actor/pg_clipfrac": masked_mean((ratio != weight).float(), response_mask).item(),
        "actor/ppo_kl": ppo_kl(log_ratio, response_mask),
        "actor/pg_clipfrac_lower": 0.0,
    }
    return loss, metrics
