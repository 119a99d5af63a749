"""Rollout correction by weights: a token that the trainer finds twice as likely counts twice.

log_ratio, response_mask [B, R] -> weights [B, R], metrics rollout_is_*.
Simplified against verl: batch normalisation takes the mean over this process's rows, verl over all ranks'.
verl: verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_weights
"""

import math

import torch
from torch import Tensor

from minirl.core_algos.masked import masked_mean, masked_sum
from minirl.core_algos.ratio import LOG_RATIO_BOUND
from minirl.core_algos.registry import unknown_name
from minirl.core_algos.rollout_correction.spread import require_tokens, row_std, token_std
from minirl.core_algos.rollout_correction.thresholds import Threshold, parse_is_threshold


@torch.no_grad()
def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str = "token",
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """w [B, R], 0 outside the mask, from log r [B, R].

    token:     w_it = r_it                  biased over a sequence, little variance
    sequence:  w_it = Π_s r_is              unbiased, varies wildly with length
    Threshold C (a number): min(w, C), truncated importance sampling. "lo_hi": w if lo ≤ w ≤ hi, else 0,
    IcePop. The exponent is held within ±20. `rollout_is_batch_normalize` divides by the mean weight (over
    tokens, or over rows), after the metrics are taken. Raises ValueError for another level, a threshold that
    is neither, or an empty mask.
    verl: verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_weights
    """
    if rollout_is not in ("token", "sequence"):
        raise ValueError(unknown_name("level", rollout_is, ("token", "sequence"), "rollout_is"))
    lower, upper = parse_is_threshold(rollout_is_threshold)
    require_tokens(response_mask)
    mask = response_mask.bool()
    level_log_ratio = log_ratio
    if rollout_is == "sequence":
        level_log_ratio = masked_sum(log_ratio, mask, axis=-1).unsqueeze(-1)
    raw = level_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().expand_as(log_ratio)
    raw = torch.where(mask, raw, 0.0)
    weights = raw.clamp(max=upper)
    if lower is not None:
        weights = torch.where((raw >= lower) & (raw <= upper), raw, 0.0)

    metrics = _is_metrics(weights, raw, level_log_ratio, mask, rollout_is, lower, upper)
    if rollout_is_batch_normalize:
        mean = masked_mean(weights, mask)
        if rollout_is == "sequence":
            mean = masked_mean(masked_mean(weights, mask, axis=-1), mask.any(dim=-1))
        factor = mean.item() if mean > 1e-8 else 1.0
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def _is_metrics(
    weights: Tensor,
    raw: Tensor,
    log_ratio: Tensor,
    mask: Tensor,
    rollout_is: str,
    lower: float | None,
    upper: float,
) -> dict[str, float]:
    """rollout_is_*: what the applied weights look like, and how often the raw ones were out of bounds.

    rollout_is_seq_fraction_high is taken from the raw weights, as in verl 0.9.1: in 0.8.0 it compares
    truncated weights with the bound they were truncated to, and so is always 0.
    verl: verl.trainer.ppo.rollout_corr_helper:compute_is_metrics
    """
    low = 1.0 / upper if lower is None else lower

    def mean(values: Tensor) -> float:
        return masked_mean(values.to(weights.dtype), mask).item()

    if rollout_is == "sequence":
        largest, smallest = log_ratio.max().clamp(max=LOG_RATIO_BOUND).exp(), log_ratio.min().exp()
        fraction_high = (log_ratio > math.log(upper)).float().mean().item()
        fraction_low = (log_ratio < math.log(low)).float().mean().item()
    else:
        generated = weights[mask]
        largest, smallest = generated.max(), generated.min()
        fraction_high, fraction_low = mean(raw > upper), mean(raw < low)

    capped = weights.clamp(min=0.0, max=upper)
    capped_mean = mean(capped)
    row_weights = masked_mean(weights, mask, axis=-1)
    raw_row_weights = masked_mean(raw, mask, axis=-1)
    metrics = {
        "rollout_is_mean": mean(weights),
        "rollout_is_max": largest.item(),
        "rollout_is_min": smallest.item(),
        "rollout_is_ratio_fraction_high": fraction_high,
        "rollout_is_ratio_fraction_low": fraction_low,
        "rollout_is_std": token_std(capped, mask),
        "rollout_is_eff_sample_size": _inverse(mean((capped / (capped_mean + 1e-8)).square())),
        "rollout_is_seq_mean": row_weights.mean().item(),
        "rollout_is_seq_std": row_std(row_weights),
        "rollout_is_seq_max": row_weights.max().item(),
        "rollout_is_seq_min": row_weights.min().item(),
        "rollout_is_seq_max_deviation": (row_weights - 1.0).abs().max().item(),
        "rollout_is_seq_fraction_high": (raw_row_weights > upper).float().mean().item(),
        "rollout_is_seq_fraction_low": (raw_row_weights < low).float().mean().item(),
    }
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = mean((raw < lower) | (raw > upper))
    return metrics


def _inverse(value: float) -> float:
    return 1.0 / value if value > 0 else 0.0  # IcePop may zero every weight; verl then divides by zero
