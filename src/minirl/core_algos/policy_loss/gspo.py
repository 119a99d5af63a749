"""GSPO: one importance ratio per response, the geometric mean over its tokens, clipped as a whole.

old_log_prob, log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_gspo
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.masked import count, masked_mean, masked_sum
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate
from minirl.core_algos.ratio import clip_range, ppo_kl


@register_policy_loss("gspo")
def compute_policy_loss_gspo(
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
    """ℓ = max(-A s, -A·clip(s, 1-ε_low, 1+ε_high)), s_it = sg(s_i)·π/sg(π), s_i = exp(mean_t log ρ_it).

    The value of s_it is the sequence's ratio; its gradient is the token's own. The reward judges the whole
    response, so the correction should too; ε is some hundred times smaller than PPO's (the paper: 3e-4,
    4e-4). log s is held at 10 at most. Aggregated by `loss_agg_mode`, as in verl 0.9.1; 0.8.0 always takes
    seq-mean-token-mean (the paper's), whatever the config says.
    Metrics: actor/pg_clipfrac (tokens of the rows clipped), actor/ppo_kl, actor/pg_clipfrac_lower (always 0).
    Paper: https://arxiv.org/abs/2507.18071. Cost: 34 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_gspo
    """
    low, high = clip_range(config)
    log_ratio = log_prob - old_log_prob
    lengths = count(response_mask, axis=-1).clamp(min=1)  # not masked_mean: it turns bfloat16 into float32
    log_sequence_ratio = masked_sum(log_ratio, response_mask, axis=-1) / lengths
    log_s = log_prob - log_prob.detach() + log_sequence_ratio.detach().unsqueeze(-1)
    ratio = log_s.clamp(max=10.0).exp()

    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    token_losses = torch.maximum(free, clipped)
    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, loss_agg_mode, **global_batch_info
    )
    metrics = {
        "actor/pg_clipfrac": masked_mean((clipped > free).float(), response_mask).item(),
        "actor/ppo_kl": ppo_kl(log_ratio, response_mask),
        "actor/pg_clipfrac_lower": 0.0,
    }
    return loss, metrics
