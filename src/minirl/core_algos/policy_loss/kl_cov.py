"""KL-Cov: like Clip-Cov, but the tokens with the highest covariance get a KL penalty instead of no gradient.

old_log_prob, log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_kl_cov
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.masked import masked_mean
from minirl.core_algos.policy_loss.clip_cov import centered_product
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate
from minirl.core_algos.ratio import safe_log_ratio


@register_policy_loss("kl_cov")
def compute_policy_loss_kl_cov(
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
    """ℓ = -Aρ, plus ppo_kl_coef·|log ρ| on the max(1, ⌊kl_cov_ratio·Σm⌋) tokens of highest covariance.

    cov as in Clip-Cov. Nothing is clipped; the penalty holds back the tokens that shrink the entropy. log ρ
    is held within ±20, which verl forgets here. Metric: actor/ppo_kl, here the mean of |log ρ|.
    The choice is made within the micro-batch, so its size matters, as in verl.
    Config: policy_loss.kl_cov_ratio, ppo_kl_coef. Raises ValueError unless kl_cov_ratio > 0.
    Paper: https://arxiv.org/abs/2505.22617. Cost: 37 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_kl_cov
    """
    options = config.policy_loss
    if options.kl_cov_ratio <= 0:
        raise ValueError(f"actor.policy_loss.kl_cov_ratio must be positive, got {options.kl_cov_ratio}")
    log_ratio = safe_log_ratio(log_prob, old_log_prob)
    with torch.no_grad():
        generated = response_mask.flatten().nonzero().squeeze(-1)
        cov = centered_product(advantages, log_prob, response_mask).flatten()[generated]
        k = min(len(cov), max(1, int(len(cov) * options.kl_cov_ratio)))
        chosen = generated[cov.topk(k).indices]
        penalised = torch.zeros_like(response_mask, dtype=torch.bool).flatten().index_fill_(0, chosen, True)

    penalty = torch.where(penalised.view_as(log_ratio), options.ppo_kl_coef * log_ratio.abs(), 0.0)
    token_losses = -advantages * log_ratio.exp() + penalty
    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, loss_agg_mode, **global_batch_info
    )
    return loss, {"actor/ppo_kl": masked_mean(log_ratio.detach().abs(), response_mask).item()}
