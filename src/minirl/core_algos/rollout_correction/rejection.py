"""Rollout correction by rejection: tokens or whole rows on which the two policies disagree are dropped.

log_ratio, response_mask [B, R] -> response_mask [B, R] without them, metrics rollout_rs_*.
Simplified against verl: nothing.
verl: verl.trainer.ppo.rollout_corr_helper:compute_rollout_rejection_mask
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minirl.core_algos.masked import masked_mean, masked_sum
from minirl.core_algos.ratio import LOG_RATIO_BOUND
from minirl.core_algos.rollout_correction.spread import require_tokens, row_std, token_std
from minirl.core_algos.rollout_correction.thresholds import Rejection, Threshold, parse_rejections

# as in kl.py with x = -log r, but k3 without its bound of 10: here large values are what we look for
_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: log_ratio.exp() - 1.0 - log_ratio,
}


def _row_max(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.any(dim=-1), values.masked_fill(~mask, -math.inf).max(dim=-1).values, 0.0)


_ROW_STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "seq_sum": lambda values, mask: masked_sum(values, mask, axis=-1),
    "seq_mean": lambda values, mask: masked_mean(values, mask, axis=-1),
    "seq_max": _row_max,
}


@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    *,
    rollout_rs: str,
    rollout_rs_threshold: Threshold | None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask without the tokens (token_*) or whole rows (seq_*) whose divergence is out of bounds.

    Options are comma-separated and must all pass; the divergence of a token is k1 = -log r, k2 = ½(log r)²,
    k3 = r - 1 - log r, of a row their sum, mean or maximum. Thresholds: one for all, or one per option.
    k2, k3: an upper bound. k1: "lo_hi" keeps lo ≤ r ≤ hi, and "x" means [1/x, x]; for seq_sum r is the row's
    product, for seq_mean its geometric mean. verl documents the same, but bounds 1/r: its "0.5_4.0" keeps r
    in [0.25, 2]. For bounds that are reciprocal the two agree, and so all presets do up to 1e-6.
    Raises ValueError for options or thresholds that `parse_rejections` refuses, or an empty mask.
    verl: verl.trainer.ppo.rollout_corr_helper:compute_rollout_rejection_mask
    """
    rejections = parse_rejections(rollout_rs, rollout_rs_threshold)
    require_tokens(response_mask)
    safe = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    mask = response_mask.bool()
    kept = mask
    metrics: dict[str, float] = {}
    for rejection in rejections:
        level, _, estimate = rejection.option.rpartition("_")
        statistic = _ESTIMATES[estimate](safe)
        row_statistic = None
        if level != "token":
            row_statistic = _ROW_STATISTICS[level](statistic, mask)
            statistic = row_statistic.unsqueeze(-1).expand_as(statistic)
        keep = statistic <= rejection.upper
        if rejection.lower is not None:
            keep = keep & (statistic >= rejection.lower)
        kept = kept & keep
        metrics |= _rs_metrics(rejection, statistic, row_statistic, keep, mask)
    rejected = mask & ~kept
    metrics["rollout_rs_masked_fraction"] = masked_mean(rejected.float(), mask).item()
    metrics["rollout_rs_seq_masked_fraction"] = rejected.any(dim=-1).float().mean().item()
    return torch.where(kept, response_mask, torch.zeros_like(response_mask)), metrics


def _rs_metrics(
    rejection: Rejection,
    statistic: Tensor,
    row_statistic: Tensor | None,
    keep: Tensor,
    mask: Tensor,
) -> dict[str, float]:
    """rollout_rs_<option>_*: the statistic's spread over tokens and rows, and what share was rejected.

    verl: verl.trainer.ppo.rollout_corr_helper:compute_rs_metrics
    """
    lower = 0.0 if rejection.lower is None else rejection.lower

    def mean(values: Tensor) -> float:
        return masked_mean(values.to(statistic.dtype), mask).item()

    has_tokens = mask.any(dim=-1)
    rows = masked_mean(statistic, mask, axis=-1) if row_statistic is None else row_statistic
    rows = rows[has_tokens]
    units = statistic[mask] if row_statistic is None else rows  # what a single verdict is about
    below = 0.0 if rejection.lower is None else (units < lower).float().mean().item()
    rows_below = {} if rejection.lower is None else {"seq_fraction_low": (rows < lower).float().mean().item()}
    capped = statistic.clamp(min=lower, max=rejection.upper)
    rejected = mask & ~keep
    metrics = {
        "mean": mean(statistic),
        "max": units.max().item(),
        "min": units.min().item(),
        "fraction_high": (units > rejection.upper).float().mean().item(),
        "fraction_low": below,
        "std": token_std(capped, mask),
        "seq_mean": rows.mean().item(),
        "seq_std": row_std(rows),
        "seq_max": rows.max().item(),
        "seq_min": rows.min().item(),
        "seq_max_deviation": rows.abs().max().item(),
        "seq_fraction_high": (rows > rejection.upper).float().mean().item(),
        **rows_below,
        "masked_fraction": mean(rejected),
        "seq_masked_fraction": rejected.any(dim=-1)[has_tokens].float().mean().item(),
    }
    return {f"rollout_rs_{rejection.option}_{key}": value for key, value in metrics.items()}
