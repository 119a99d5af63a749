"""DPPO: trust region by how far the token's probability moved, not by its ratio.

old_log_prob, log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_dppo_tv, compute_policy_loss_dppo_kl
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.masked import masked_mean
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate
from minirl.core_algos.ratio import clip_range, ppo_kl, safe_log_ratio

TRUNCATION = 20.0  # far out, so that it seldom bites: truncating ρ biases the gradient (paper, section 5.4)


@register_policy_loss("dppo_tv")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    config: Any,
    rollout_is_weights: Tensor | None = None,
    truncation: float = TRUNCATION,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> PolicyLoss:
    """ℓ = -A·sg(min(ρ, c))·log_prob·M with M = [π - π_old ≤ ε_high] if A > 0 else [π - π_old ≥ -ε_low].

    |π - π_old| is the total-variation distance of "this token or any other". With ε = 0.2 a token of
    probability 0.01 may become twenty times as likely and stay inside; one of 0.5 is at the border with 0.7.
    PPO allows both a factor of 1.2. Outside: no gradient.
    Config: clip_ratio_low/high are thresholds on the *distance* here. c is `truncation`, 20: in verl 0.8.0
    the line that says 20 reads clip_ratio_c and so gets PPO's 3. Metrics: actor/pg_clipfrac (tokens outside),
    actor/pg_clipfrac_lower (ratios truncated), actor/ppo_kl.
    Paper: https://arxiv.org/abs/2602.04879. Cost: 41 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_dppo_tv
    """
    low, high = clip_range(config)
    moved = (log_prob.exp() - old_log_prob.exp()).detach()
    inside = torch.where(advantages > 0, moved <= high, moved >= -low)
    return _inside_trust_region(
        inside,
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        rollout_is_weights,
        truncation,
        **global_batch_info,
    )


@register_policy_loss("dppo_kl")
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str = "token-mean",
    config: Any,
    rollout_is_weights: Tensor | None = None,
    truncation: float = TRUNCATION,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> PolicyLoss:
    """The same with the binary KL as distance: p_o(log p_o - log p) + (1 - p_o)·log((1 - p_o) / (1 - p)).

    A token is inside while that is ≤ ε (ε_high for A > 0, else ε_low), or if π moved against A.
    Paper: https://arxiv.org/abs/2602.04879. Cost: 55 passes over [B, R].
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_dppo_kl
    """
    low, high = clip_range(config)
    with torch.no_grad():
        prob, old_prob = log_prob.exp(), old_log_prob.exp()
        rest = ((1.0 - old_prob + 1e-8) / (1.0 - prob + 1e-8)).log()
        binary_kl = old_prob * (old_log_prob - log_prob) + (1 - old_prob) * rest
        inside_up = (binary_kl <= high) | (prob <= old_prob)
        inside_down = (binary_kl <= low) | (prob >= old_prob)
        inside = torch.where(advantages > 0, inside_up, inside_down)
    return _inside_trust_region(
        inside,
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        rollout_is_weights,
        truncation,
        **global_batch_info,
    )


def _inside_trust_region(
    inside: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    rollout_is_weights: Tensor | None,
    truncation: float,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> PolicyLoss:
    """-A·sg(min(ρ, c))·log_prob where `inside` [B, R] holds, else 0."""
    log_ratio = safe_log_ratio(log_prob, old_log_prob).detach()
    ratio = log_ratio.exp()
    token_losses = -advantages * ratio.clamp(max=truncation) * log_prob * inside
    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, loss_agg_mode, **global_batch_info
    )
    metrics = {
        "actor/pg_clipfrac": masked_mean((~inside).float(), response_mask).item(),
        "actor/ppo_kl": ppo_kl(log_ratio, response_mask),
        "actor/pg_clipfrac_lower": masked_mean(((ratio > truncation) & inside).float(), response_mask).item(),
    }
    return loss, metrics
