"""Rollout correction: the sampler's probabilities are not quite the trainer's; weigh tokens or drop them.

They differ because the two engines round differently (say bfloat16 and float32), or because the sampler still
ran on older weights; uncorrected, the gradient is that of the wrong policy.
old_log_prob, rollout_log_prob, response_mask [B, R] -> rollout_is_weights, response_mask [B, R], metrics.
Simplified against verl: tensors instead of a DataProto; means are over this process's rows (verl reduces over
ranks).
verl: verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_rejection_mask
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirl.core_algos.masked import masked_mean, masked_sum
from minirl.core_algos.ratio import LOG_RATIO_BOUND
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


@dataclass(frozen=True)
class RolloutCorrection:
    """The options `algorithm.rollout_correction.*`; `PRESETS` holds the named combinations.

    Two switches that can be on together: weights (rollout_is) and rejection (rollout_rs).
    verl: verl.trainer.config.algorithm:RolloutCorrectionConfig
    """

    rollout_is: str | None = None  # token | sequence | None
    rollout_is_threshold: Threshold = 2.0  # "2.0": truncate; "0.5_5.0": zero outside (IcePop)
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None  # comma-separated ROLLOUT_RS_OPTIONS
    rollout_rs_threshold: Threshold | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"  # in bypass mode: ppo_clip | reinforce

    def overrides(self) -> list[str]:
        """For `minirl.config.compose`, with the switch that makes the rollout return its log-probs."""
        return ["actor_rollout_ref.rollout.calculate_log_probs=true"] + [
            f"algorithm.rollout_correction.{key}={'null' if value is None else value}"
            for key, value in asdict(self).items()
        ]


def _presets() -> dict[str, RolloutCorrection]:
    token_tis = {"rollout_is": "token"}
    seq_tis = {"rollout_is": "sequence"}
    icepop = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    geo_rs = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
    k3_rs = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    seq_rs = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
    clip = {"bypass_mode": True, "loss_type": "ppo_clip"}
    reinforce = {"bypass_mode": True, "loss_type": "reinforce"}
    return {
        name: RolloutCorrection(**options)
        for name, options in {
            "disabled": {},
            "decoupled_token_is": token_tis,
            "decoupled_seq_is": seq_tis,
            "decoupled_token_icepop": icepop,
            "decoupled_seq_is_rs": seq_tis | seq_rs,
            "decoupled_geo_rs": geo_rs,
            "decoupled_geo_rs_seq_tis": seq_tis | geo_rs,
            "decoupled_geo_rs_token_tis": token_tis | geo_rs,
            "decoupled_k3_rs": k3_rs,
            "decoupled_k3_rs_seq_tis": seq_tis | k3_rs,
            "decoupled_k3_rs_token_tis": token_tis | k3_rs,
            "bypass_ppo_clip": clip,
            "bypass_ppo_clip_geo_rs": clip | geo_rs,
            "bypass_ppo_clip_k3_rs": clip | k3_rs,
            "bypass_pg_is": reinforce | seq_tis,
            "bypass_pg_token_icepop": reinforce | icepop,
            "bypass_pg_geo_rs": reinforce | geo_rs,
            "bypass_pg_geo_rs_seq_tis": reinforce | seq_tis | geo_rs,
            "bypass_pg_geo_rs_token_tis": reinforce | token_tis | geo_rs,
        }.items()
    }


PRESETS = _presets()


def rollout_correction_preset(name: str) -> RolloutCorrection:
    """The preset called `name`. Raises ValueError with the nearest known name."""
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS, "algorithm.rollout_correction"))
    return PRESETS[name]


def correction_options(config: Any) -> dict[str, Any]:
    """The keyword arguments of `compute_rollout_correction_and_rejection_mask` from a config object."""
    return {
        "rollout_is": config.rollout_is,
        "rollout_is_threshold": config.rollout_is_threshold,
        "rollout_is_batch_normalize": config.rollout_is_batch_normalize,
        "rollout_rs": config.rollout_rs,
        "rollout_rs_threshold": config.rollout_rs_threshold,
    }


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
    _require_tokens(response_mask)
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


def _require_tokens(response_mask: Tensor) -> None:
    if not response_mask.any():
        raise ValueError("response_mask must contain at least one valid token (1)")


# ---- weights ----


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
    _require_tokens(response_mask)
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


def parse_is_threshold(spec: Threshold) -> tuple[float | None, float]:
    """(lower, upper) of `rollout_is_threshold`: 2.0 or "2.0" -> (None, 2.0), "0.5_5.0" -> (0.5, 5.0)."""
    option = "rollout_is_threshold"
    if isinstance(spec, bool):
        raise ValueError(f"{option} must be a number or 'lower_upper', not a boolean")
    lower, upper = _numbers(option, str(spec).strip())
    if upper <= 0 or (lower is not None and not 0 < lower <= upper):
        raise ValueError(f"{option}: bounds must satisfy 0 < lower <= upper, got '{spec}'")
    return lower, upper


def _numbers(option: str, text: str) -> tuple[float | None, float]:
    lower, _, upper = text.rpartition("_")
    try:
        return (float(lower) if lower else None), float(upper)
    except ValueError:
        raise ValueError(f"{option}: '{text}' is neither a number nor 'lower_upper'") from None


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
    variance = mean(capped.square()) - capped_mean**2
    row_weights = masked_mean(weights, mask, axis=-1)
    raw_row_weights = masked_mean(raw, mask, axis=-1)
    metrics = {
        "rollout_is_mean": mean(weights),
        "rollout_is_max": largest.item(),
        "rollout_is_min": smallest.item(),
        "rollout_is_ratio_fraction_high": fraction_high,
        "rollout_is_ratio_fraction_low": fraction_low,
        "rollout_is_std": math.sqrt(max(variance, 0.0)) if torch.count_nonzero(mask) > 1 else 0.0,
        "rollout_is_eff_sample_size": _inverse(mean((capped / (capped_mean + 1e-8)).square())),
        "rollout_is_seq_mean": row_weights.mean().item(),
        "rollout_is_seq_std": _std(row_weights),
        "rollout_is_seq_max": row_weights.max().item(),
        "rollout_is_seq_min": row_weights.min().item(),
        "rollout_is_seq_max_deviation": (row_weights - 1.0).abs().max().item(),
        "rollout_is_seq_fraction_high": (raw_row_weights > upper).float().mean().item(),
        "rollout_is_seq_fraction_low": (raw_row_weights < low).float().mean().item(),
    }
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = mean((raw < lower) | (raw > upper))
    return metrics


def _std(values: Tensor) -> float:
    return values.std().item() if values.numel() > 1 else 0.0


def _inverse(value: float) -> float:
    return 1.0 / value if value > 0 else 0.0  # IcePop may zero every weight; verl then divides by zero


# ---- rejection ----


class Rejection(NamedTuple):
    """One rejection option with its bounds on the statistic."""

    option: str
    lower: float | None
    upper: float


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
    _require_tokens(response_mask)
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
    variance = mean(capped.square()) - mean(capped) ** 2
    rejected = mask & ~keep
    metrics = {
        "mean": mean(statistic),
        "max": units.max().item(),
        "min": units.min().item(),
        "fraction_high": (units > rejection.upper).float().mean().item(),
        "fraction_low": below,
        "std": math.sqrt(max(variance, 0.0)) if torch.count_nonzero(mask) > 1 else 0.0,
        "seq_mean": rows.mean().item(),
        "seq_std": _std(rows),
        "seq_max": rows.max().item(),
        "seq_min": rows.min().item(),
        "seq_max_deviation": rows.abs().max().item(),
        "seq_fraction_high": (rows > rejection.upper).float().mean().item(),
        **rows_below,
        "masked_fraction": mean(rejected),
        "seq_masked_fraction": rejected.any(dim=-1)[has_tokens].float().mean().item(),
    }
    return {f"rollout_rs_{rejection.option}_{key}": value for key, value in metrics.items()}


# ---- how far apart are the two policies? ----


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Perplexities, KL(π_rollout‖π_train) by k1 and k3, χ² = E[r²] - 1 per token and per row. No prefix.

    verl: verl.trainer.ppo.rollout_corr_helper:compute_offpolicy_metrics
    """
    mask = response_mask.bool()
    train_rows = masked_mean(old_log_prob, mask, axis=-1)  # [B]
    metrics = {
        "training_ppl": (-train_rows).exp().mean().item(),
        "training_log_ppl": (-train_rows).mean().item(),
    }
    if rollout_log_prob is None:
        return metrics
    log_ratio = old_log_prob - rollout_log_prob
    rollout_rows = masked_mean(rollout_log_prob, mask, axis=-1)
    gap = rollout_rows - train_rows
    token_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    row_log_ratio = masked_sum(log_ratio, mask, axis=-1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return metrics | {
        "kl": masked_mean(-log_ratio, mask).item(),
        "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, mask).item(),
        "rollout_ppl": (-rollout_rows).exp().mean().item(),
        "rollout_log_ppl": (-rollout_rows).mean().item(),
        "log_ppl_diff": gap.mean().item(),
        "log_ppl_abs_diff": gap.abs().mean().item(),
        "log_ppl_diff_max": gap.max().item(),
        "log_ppl_diff_min": gap.min().item(),
        "ppl_ratio": gap.exp().mean().item(),
        "chi2_token": masked_mean(token_ratio.square(), mask).item() - 1.0,
        "chi2_seq": (2.0 * row_log_ratio).exp().mean().item() - 1.0,
    }
