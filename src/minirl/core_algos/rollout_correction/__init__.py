"""Rollout correction: the sampler's probabilities are not quite the trainer's; weigh tokens or drop them.

They differ because the two engines round differently (say bfloat16 and float32), or because the sampler still
ran on older weights; uncorrected, the gradient is that of the wrong policy.
old_log_prob, rollout_log_prob, response_mask [B, R] -> rollout_is_weights, response_mask [B, R], metrics.
In this order: options (what can be set), thresholds (how bounds are written), weights, rejection, off_policy
(how far apart the two are). Simplified against verl: weights come back as a tensor, not in a DataProto.
verl: verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_rejection_mask
"""

import torch
from torch import Tensor

from minirl.core_algos.rollout_correction.off_policy import compute_offpolicy_metrics
from minirl.core_algos.rollout_correction.options import (
    PRESETS,
    RolloutCorrection,
    correction_options,
    rollout_correction_preset,
)
from minirl.core_algos.rollout_correction.rejection import compute_rollout_rejection_mask
from minirl.core_algos.rollout_correction.spread import require_tokens
from minirl.core_algos.rollout_correction.thresholds import (
    ROLLOUT_RS_OPTIONS,
    Threshold,
    parse_is_threshold,
    parse_rejections,
)
from minirl.core_algos.rollout_correction.weights import compute_rollout_correction_weights

__all__ = [
    "PRESETS",
    "ROLLOUT_RS_OPTIONS",
    "RolloutCorrection",
    "compute_offpolicy_metrics",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "correction_options",
    "parse_is_threshold",
    "parse_rejections",
    "rollout_correction_preset",
]


@torch.no_grad()
def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Threshold | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """(weights [B, R] or None, mask [B, R], metrics with the prefix rollout_corr/).

    r = π_train / π_rollout = exp(old_log_prob - rollout_log_prob). The weights multiply the token losses
    later on; the returned mask replaces response_mask: a rejected token is as if it had not been generated.
    But a rejected row still counts among the rows of the seq-mean aggregations, as in verl.
    Both are constants to autograd. Metrics are computed even with everything off.
    Raises ValueError for shapes that differ, an empty mask, or options that make no sense.
    In verl's repository: docs/algo/rollout_corr.md, rollout_corr_math.md. Cost: 29 passes over [B, R] for the
    metrics alone, four times as many with weights and rejection on.
    verl: verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_rejection_mask
    """
    if not old_log_prob.shape == rollout_log_prob.shape == response_mask.shape:
        raise ValueError(
            "old_log_prob, rollout_log_prob and response_mask must have one shape, got "
            f"{tuple(old_log_prob.shape)}, {tuple(rollout_log_prob.shape)}, {tuple(response_mask.shape)}"
        )
    require_tokens(response_mask)
    log_ratio = old_log_prob - rollout_log_prob
    metrics: dict[str, float] = {}
    weights = None
    if rollout_is is not None and rollout_is_threshold is not None:
        weights, is_metrics = compute_rollout_correction_weights(
            log_ratio,
            response_mask,
            rollout_is=rollout_is,
            rollout_is_threshold=rollout_is_threshold,
            rollout_is_batch_normalize=rollout_is_batch_normalize,
        )
        metrics |= is_metrics
    kept_mask = response_mask.clone()
    if rollout_rs is not None:
        kept_mask, rs_metrics = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs=rollout_rs, rollout_rs_threshold=rollout_rs_threshold
        )
        metrics |= rs_metrics
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    return weights, kept_mask, {f"rollout_corr/{key}": value for key, value in metrics.items()}
