"""The importance ratio ρ = π_θ / π_old of every token: how much likelier is it now than when it was sampled?

log_prob, old_log_prob [B, R] -> log ρ [B, R]; and what the policy losses share: clip range, `ppo_kl`.
verl: verl.trainer.ppo.core_algos:compute_policy_loss_vanilla (and again in eight more of its losses)
"""

from typing import Any

from torch import Tensor

from minirl.core_algos.masked import masked_mean

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: far outside any clip range, yet finite in float32 and bfloat16


def safe_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """log ρ = log_prob - old_log_prob, held within ±20 so that exp() stays finite. No gradient beyond."""
    return (log_prob - old_log_prob).clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)


def clip_range(config: Any) -> tuple[float, float]:
    """(ε_low, ε_high): `clip_ratio_low` and `clip_ratio_high` where given, else `clip_ratio` for both.

    In verl's yaml both are 0.2, so changing `clip_ratio` alone changes nothing.
    """
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def ppo_kl(log_ratio: Tensor, response_mask: Tensor) -> float:
    """Metric `actor/ppo_kl`: mean over tokens of old_log_prob - log_prob (k1): it may be negative."""
    return masked_mean(-log_ratio.detach(), response_mask).item()
