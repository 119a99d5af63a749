"""What the metrics of weights and of rejection have in common: how far a number spreads over tokens or rows.

verl: verl.trainer.ppo.rollout_corr_helper:compute_is_metrics, compute_rs_metrics
"""

import math

import torch
from torch import Tensor

from minirl.core_algos.masked import masked_mean


def require_tokens(response_mask: Tensor) -> None:
    """ValueError for a mask [B, R] without a single 1: there is nothing to average over."""
    if not response_mask.any():
        raise ValueError("response_mask must contain at least one valid token (1)")


def token_std(values: Tensor, mask: Tensor) -> float:
    """√(E[x²] - E[x]²) over the tokens of values [B, R], not unbiased, as in verl; 0 for a single token."""
    variance = masked_mean(values.square(), mask).item() - masked_mean(values, mask).item() ** 2
    return math.sqrt(max(variance, 0.0)) if torch.count_nonzero(mask) > 1 else 0.0


def row_std(values: Tensor) -> float:
    """Unbiased standard deviation of values [B], 0 for a single row."""
    return values.std().item() if values.numel() > 1 else 0.0
