"""DRO: policy gradient held back by a squared log-ratio instead of a clip (from verl 0.9.1).

old_log_prob, log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_dro (0.9.1; not in 0.8.0)
"""

from typing import Any, Unpack

from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate
from minirl.core_algos.ratio import ppo_kl


@register_policy_loss("dro")
def compute_policy_loss_dro(
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
    """ℓ = -(A·log_prob - ½β·(log_prob - old_log_prob)²), β = policy_loss.dro_beta > 0.

    The square pulls back harder the further a token moves, in both directions; at ρ = 1 it does nothing.
    Raises ValueError unless dro_beta > 0. Metric: actor/ppo_kl.
    Paper: https://arxiv.org/abs/2405.19107. Cost: 17 passes over [B, R].
    verl 0.9.1: verl.trainer.ppo.core_algos:compute_policy_loss_dro
    """
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"actor.policy_loss.dro_beta must be positive for loss_mode=dro, got {beta}")
    log_ratio = log_prob - old_log_prob
    token_losses = -(advantages * log_prob - 0.5 * beta * log_ratio.square())
    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, loss_agg_mode, **global_batch_info
    )
    return loss, {"actor/ppo_kl": ppo_kl(log_ratio, response_mask)}
