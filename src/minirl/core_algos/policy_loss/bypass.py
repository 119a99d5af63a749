"""Bypass mode: the sampler's own log-probs stand in for old_log_probs, and the loss corrects for it.

old_log_prob (= rollout_log_probs), log_prob, advantages, response_mask [B, R] -> scalar loss, metrics.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_bypass_mode, compute_policy_loss_reinforce
"""

from typing import Any, Unpack

from torch import Tensor

from minirl.core_algos.agg_loss import GlobalBatchInfo
from minirl.core_algos.policy_loss.registry import PolicyLoss, register_policy_loss, weigh_and_aggregate
from minirl.core_algos.policy_loss.vanilla import compute_policy_loss_vanilla
from minirl.core_algos.ratio import ppo_kl
from minirl.core_algos.registry import unknown_name
from minirl.core_algos.rollout_correction import (
    compute_rollout_correction_and_rejection_mask,
    correction_options,
)


@register_policy_loss("bypass_mode")
def compute_policy_loss_bypass_mode(
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
    """Two policies instead of three: π_θ against π_rollout. Options: config.policy_loss.rollout_correction.

    1. Rejection: tokens or rows whose log_prob - old_log_prob is out of bounds leave the mask.
    2. loss_type "ppo_clip": the vanilla loss; its ratio is π_θ/π_rollout already, so no weights.
       loss_type "reinforce": ℓ = -A·log_prob·w with w = sg(π_θ/π_rollout), truncated, from `rollout_is`.
    Saves a forward pass per step (no old_log_probs). Weights and mask are recomputed in every micro-batch,
    so `batch_num_tokens`, counted before, includes what they reject, and `rollout_is_batch_normalize` divides
    by the micro-batch's own mean: its size matters, as in verl.
    `rollout_is_weights` is not read. Metrics: the loss's own, and rollout_corr/*.
    Raises ValueError for another loss_type.
    In verl 0.8.0 the switch to this loss never reaches the workers (issue #4912): they keep running vanilla.
    verl: verl.trainer.ppo.core_algos:compute_policy_loss_bypass_mode
    """
    options = config.policy_loss.rollout_correction
    weights, kept_mask, correction_metrics = compute_rollout_correction_and_rejection_mask(
        log_prob.detach(), old_log_prob, response_mask, **correction_options(options)
    )
    if options.loss_type == "ppo_clip":
        loss, metrics = compute_policy_loss_vanilla(
            old_log_prob,
            log_prob,
            advantages,
            kept_mask,
            loss_agg_mode=loss_agg_mode,
            config=config,
            **global_batch_info,
        )
    elif options.loss_type == "reinforce":
        loss, metrics = compute_policy_loss_reinforce(
            old_log_prob,
            log_prob,
            advantages,
            kept_mask,
            loss_agg_mode=loss_agg_mode,
            rollout_is_weights=weights,
            **global_batch_info,
        )
    else:
        raise ValueError(
            unknown_name("loss", options.loss_type, ("ppo_clip", "reinforce"), "rollout_correction.loss_type")
        )
    return loss, metrics | correction_metrics


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    loss_agg_mode: str = "seq-mean-token-sum",
    rollout_is_weights: Tensor | None = None,
    **global_batch_info: Unpack[GlobalBatchInfo],
) -> PolicyLoss:
    """ℓ = -A·log_prob·w: REINFORCE, with the importance weight as a constant factor.

    verl: verl.trainer.ppo.core_algos:compute_policy_loss_reinforce
    """
    token_losses = -advantages * log_prob
    loss = weigh_and_aggregate(
        token_losses, response_mask, rollout_is_weights, loss_agg_mode, **global_batch_info
    )
    return loss, {"actor/ppo_kl": ppo_kl(log_prob - rollout_log_prob, response_mask)}
