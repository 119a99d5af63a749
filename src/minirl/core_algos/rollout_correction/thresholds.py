"""How the bounds of rollout correction are written: "2.0", "0.5_5.0", or one per rejection option.

rollout_is_threshold, rollout_rs, rollout_rs_threshold -> numbers, or ValueError.
verl: verl.trainer.ppo.rollout_corr_helper:_parse_rollout_rs_thresholds
"""

import math
from typing import NamedTuple

from minirl.core_algos.registry import unknown_name

Threshold = str | float

ROLLOUT_RS_OPTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


def parse_is_threshold(spec: Threshold) -> tuple[float | None, float]:
    """(lower, upper) of `rollout_is_threshold`: 2.0 or "2.0" -> (None, 2.0), "0.5_5.0" -> (0.5, 5.0)."""
    option = "rollout_is_threshold"
    if isinstance(spec, bool):
        raise ValueError(f"{option} must be a number or 'lower_upper', not a boolean")
    lower, upper = _numbers(option, str(spec).strip())
    if upper <= 0 or (lower is not None and not 0 < lower <= upper):
        raise ValueError(f"{option}: bounds must satisfy 0 < lower <= upper, got '{spec}'")
    return lower, upper


class Rejection(NamedTuple):
    """One rejection option with its bounds on the statistic."""

    option: str
    lower: float | None
    upper: float


def parse_rejections(rollout_rs: str, rollout_rs_threshold: Threshold | None) -> list[Rejection]:
    """Options and thresholds as bounds on the statistics. Raises ValueError if they do not fit."""
    options = list(dict.fromkeys(part.strip() for part in str(rollout_rs).split(",") if part.strip()))
    if not options:
        raise ValueError("rollout_rs must name at least one option, or be null")
    for option in options:
        if option not in ROLLOUT_RS_OPTIONS:
            raise ValueError(unknown_name("option", option, ROLLOUT_RS_OPTIONS, "rollout_rs"))
    if rollout_rs_threshold is None:
        raise ValueError("rollout_rs_threshold must be provided when rollout_rs is set")
    specs = [part.strip() for part in str(rollout_rs_threshold).split(",") if part.strip()]
    if len(specs) == 1:
        specs = specs * len(options)
    if len(specs) != len(options):
        raise ValueError(
            f"rollout_rs_threshold has {len(specs)} entries for {len(options)} options of rollout_rs: "
            "give one for all, or one each"
        )
    return [_rejection(option, spec) for option, spec in zip(options, specs, strict=True)]


def _rejection(option: str, spec: str) -> Rejection:
    lower, upper = _numbers(f"rollout_rs_threshold for {option}", spec)
    if upper <= 0 or (lower is not None and lower <= 0):
        raise ValueError(f"rollout_rs_threshold for {option} must be positive, got '{spec}'")
    if not option.endswith("k1"):
        if lower is not None:
            raise ValueError(f"rollout_rs_threshold for {option} must be a single upper bound, got '{spec}'")
        return Rejection(option, None, upper)
    lower = 1.0 / upper if lower is None else lower
    if lower > upper:
        raise ValueError(f"rollout_rs_threshold for {option}: lower must not exceed upper, got '{spec}'")
    # lo ≤ r ≤ hi  <=>  -log hi ≤ -log r ≤ -log lo
    return Rejection(option, -math.log(upper), -math.log(lower))


def _numbers(option: str, text: str) -> tuple[float | None, float]:
    lower, _, upper = text.rpartition("_")
    try:
        return (float(lower) if lower else None), float(upper)
    except ValueError:
        raise ValueError(f"{option}: '{text}' is neither a number nor 'lower_upper'") from None
