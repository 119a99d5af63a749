"""GMPO: the geometric mean of clipped token ratios, one loss per response.

old_log_prob, log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_geo_mean
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo, agg_loss
from minirl.core_algos.masked import masked_mean
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss
from minirl.core_algos.ratio import clip_range, ppo_kl, safe_log_ratio


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
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
    """ℓ_i = -Ā_i·exp(mean_t d_it), d = sign(A)·min(sign(A)·x, sign(A)·clip(x, -ε_low, ε_high)), x = log ρ.

    Ā_i = mean_t A_it, one advantage per row. One wild token moves a geometric mean little. The clip is on the
    log-ratio and per token; x is held within ±20, a line that verl has commented out. There is one loss per
    row, so `loss_agg_mode` is not read (as in verl): the mean is over the rows of the mini-batch, that is
    over `global_batch_size`; verl averages over the micro-batch, so its gradient depends on the micro-batch
    size and counts empty rows. `rollout_is_weights` enter as their geometric mean per row.
    Metrics: actor/pg_clipfrac, actor/pg_clipfrac_lower (tokens out of range, A > 0 and A < 0), actor/ppo_kl.
    Paper: https://arxiv.org/abs/2507.20673. Cost: 41 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_geo_mean
    """
    low, high = clip_range(config)
    log_ratio = safe_log_ratio(log_prob, old_log_prob)
    clamped = log_ratio.clamp(-low, high)
    sign = advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clamped)

    def row_mean(values: Tensor) -> Tensor:
        # float32 even from bfloat16, by masked_mean's division: exp() turns an error of 0.1 into 10%
        return masked_mean(values, response_mask, axis=-1)

    row_losses = -row_mean(advantages) * row_mean(pessimistic).exp()
    if rollout_is_weights is not None:
        row_losses = row_losses * row_mean((rollout_is_weights + 1e-10).log()).exp()
    has_tokens = response_mask.any(dim=-1, keepdim=True)
    loss = agg_loss(row_losses.unsqueeze(-1), has_tokens, "seq-mean-token-sum", **global_batch_info)
    outside = log_ratio != clamped
    metrics = {
        "actor/pg_clipfrac": masked_mean((outside & (advantages > 0)).float(), response_mask).item(),
        "actor/ppo_kl": ppo_kl(log_ratio, response_mask),
        "actor/pg_clipfrac_lower": masked_mean((outside & (advantages < 0)).float(), response_mask).item(),
    }
    return loss, metrics
