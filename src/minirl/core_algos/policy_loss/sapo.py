"""SAPO: no clip; a smooth gate lets the gradient of a token fade as its ratio leaves 1.

old_log_prob, log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_sapo
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate
from minirl.core_algos.ratio import ppo_kl, safe_log_ratio


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any,
    rollout_is_weights: Tensor | None = None,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> PolicyLoss:
    """ℓ = -A·(4/τ)·sigmoid(τ(ρ - 1)), τ = tau_pos where A > 0, else tau_neg.

    At ρ = 1 the slope in ρ is exactly -A, as in the unclipped -Aρ; a larger τ lets it fade sooner on both
    sides. tau_neg > tau_pos holds back tokens being pushed down (A < 0) more than those being pushed up.
    As in verl, the aggregation is always seq-mean-token-mean: `loss_agg_mode` is not read.
    Config: tau_pos, tau_neg.
    Metrics: actor/ppo_kl; actor/pg_clipfrac and actor/pg_clipfrac_lower are always 0.
    Paper: https://arxiv.org/abs/2511.20347. Cost: 24 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_sapo
    """
    log_ratio = safe_log_ratio(log_prob, old_log_prob)
    tau = torch.where(advantages > 0, float(config.tau_pos), float(config.tau_neg)).to(advantages.dtype)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    token_losses = -gate * advantages
    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, "seq-mean-token-mean", **global_batch_info
    )
    metrics = {
        "actor/pg_clipfrac": 0.0,
        "actor/ppo_kl": ppo_kl(log_ratio, response_mask),
        "actor/pg_clipfrac_lower": 0.0,
    }
    return loss, metrics
