"""The metrics of a step, with verl's names and formulas.

in: the finished batch, timings, lists collected by the workers -> out: name -> number, and the log line.
simplified: no images, no speculative decoding, no cross-rank Metric without equal counts.
verl: verl.trainer.ppo.metric_utils, verl.utils.metric, verl.utils.debug.metrics
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import lru_cache
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirl.core_algos.masked import masked_mean, masked_sum
from minirl.protocol import DataProto

# ---- what the workers collect ----------------------------------------------------


class AggregationType(Enum):
    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


_REDUCE: dict[AggregationType, Callable] = {
    AggregationType.MEAN: np.mean,
    AggregationType.SUM: np.sum,
    AggregationType.MIN: np.min,
    AggregationType.MAX: np.max,
}


class Metric:
    """Values of one metric, and how they become one number.

    "sum" is for a loss whose micro-batches each hold a share of the whole.
    verl: verl.utils.metric.utils:Metric
    """

    def __init__(self, aggregation: str | AggregationType, value: Any = None) -> None:
        self.aggregation = AggregationType(aggregation)
        self.values: list[float] = []
        if value is not None:
            self.append(value)

    def append(self, value: "Metric | Number | Tensor") -> None:
        """Add one number, or all values of another Metric. A tensor must hold one element."""
        if isinstance(value, Metric):
            self.extend(value)
            return
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"a metric takes one number at a time, got a tensor of shape {list(value.shape)}"
                )
            value = value.detach().item()
        if not isinstance(value, Number | np.ndarray):
            raise ValueError(f"a metric takes a number, got {type(value).__name__}")
        self.values.append(value)

    def extend(self, values: "Metric | Iterable") -> None:
        """Add several values; another Metric must aggregate in the same way."""
        if isinstance(values, Metric):
            if values.aggregation != self.aggregation:
                raise ValueError(f"cannot add a {values.aggregation.value} to a {self.aggregation.value}")
            values = list(values.values)
        for value in values:
            self.append(value)

    def aggregate(self) -> float:
        """The values as one number."""
        return float(_REDUCE[self.aggregation](self.values))

    def init_list(self) -> "Metric":
        """An empty Metric of the same kind."""
        return Metric(self.aggregation)

    @classmethod
    def aggregate_dp(cls, metric_lists: Sequence["Metric"]) -> float:
        """One number from the same metric on every rank: mean over ranks, except for min and max."""
        if not metric_lists:
            raise ValueError("no metrics to aggregate: give one per rank")
        counts = [len(metric.values) for metric in metric_lists]
        if len(set(counts)) > 1:
            raise ValueError(
                f"ranks hold different numbers of values {counts}: use the same number of micro-batches"
            )
        values = np.array([metric.values for metric in metric_lists])  # [ranks, values]
        aggregation = metric_lists[0].aggregation
        if aggregation in (AggregationType.SUM, AggregationType.MEAN):
            values = values.mean(axis=0)
        return float(_REDUCE[aggregation](values))

    @classmethod
    def from_dict(cls, data: dict[str, Any], aggregation: str | AggregationType) -> dict[str, "Metric"]:
        """One Metric per key."""
        return {key: cls(aggregation, value) for key, value in data.items()}


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Lists to numbers: a Metric as it says, else max where the name contains "max", min for "min", mean.

    verl: verl.utils.metric.utils:reduce_metrics
    """
    return {key: _reduce(key, values) for key, values in metrics.items()}


def _reduce(key: str, values: Any) -> float:
    if isinstance(values, Metric):
        return values.aggregate()
    fn = np.max if "max" in key else np.min if "min" in key else np.mean
    return float(fn(values))


def append_to_dict(data: dict[str, Any], new_data: dict[str, Any], prefix: str = "") -> None:
    """Append each value of `new_data` to the list (or Metric) under the same key of `data`, in place.

    verl: verl.utils.py_functional:append_to_dict
    """
    for key, value in rename_dict(new_data, prefix).items():
        if key not in data:
            data[key] = value.init_list() if isinstance(value, Metric) else []
        if isinstance(value, list):
            data[key].extend(value)
        else:
            data[key].append(value)


def rename_dict(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The same values with `prefix` before every key that lacks it.

    verl: verl.utils.py_functional:rename_dict
    """
    return {key if key.startswith(prefix) else f"{prefix}{key}": value for key, value in data.items()}


# ---- what the batch shows ----------------------------------------------------------


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of a finished batch.

    Scores and rewards are per trajectory and leave out aborted ones (no response token); advantages, returns
    and values are per generated token.
    verl: verl.trainer.ppo.metric_utils:compute_data_metrics
    """
    tensors = batch.batch
    info = _compute_response_info(batch)
    response_mask = tensors["response_mask"].bool()
    aborted = info["response_length"] == 0
    returns = tensors["returns"][response_mask]
    metrics = {
        **_stats("critic/score", tensors["token_level_scores"].sum(-1)[~aborted]),
        **_stats("critic/rewards", tensors["token_level_rewards"].sum(-1)[~aborted]),
        **_stats("critic/advantages", tensors["advantages"][response_mask]),
        **_stats("critic/returns", returns),
    }
    if use_critic:
        values = tensors["values"][response_mask]
        metrics |= _stats("critic/values", values)
        metrics["critic/vf_explained_var"] = _explained_variance(returns, values)
    longest = tensors["responses"].shape[-1]
    metrics |= _lengths("response_length", info["response_length"], longest)
    metrics |= _lengths("response_length_non_aborted", info["response_length"][~aborted], longest)
    metrics["response/aborted_ratio"] = aborted.float().mean().item()
    metrics |= _lengths("prompt_length", info["prompt_length"], tensors["prompts"].shape[-1])
    for column, name in (("__num_turns__", "num_turns"), ("tool_call_counts", "tool_call_counts")):
        if column in batch.non_tensor_batch:
            metrics |= _turns(name, batch.non_tensor_batch[column])
    return metrics


def compute_gdpo_metrics(batch: DataProto, gdpo_reward_keys: Sequence[str]) -> dict[str, float]:
    """Each reward component's own statistics. verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit"""
    metrics = {}
    for key in gdpo_reward_keys:
        values = np.asarray(batch.non_tensor_batch[key], dtype=np.float32)
        for name in ("mean", "std", "max", "min"):
            metrics[f"gdpo/{key}/{name}"] = float(getattr(np, name)(values))
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: dict[str, float]) -> dict[str, float]:
    """Seconds per section, and milliseconds per token: response tokens for gen, all tokens for the others.

    verl: verl.trainer.ppo.metric_utils:compute_timing_metrics
    """
    info = _compute_response_info(batch)
    response_tokens = info["response_length"].sum().item()
    all_tokens = response_tokens + info["prompt_length"].sum().item()
    tokens = {"gen": response_tokens}
    tokens |= dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), all_tokens)
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name in sorted(tokens.keys() & timing_raw.keys()):
        per_token = timing_raw[name] * 1000 / tokens[name] if tokens[name] else math.nan
        metrics[f"timing_per_token_ms/{name}"] = per_token
    return metrics


def compute_throughout_metrics(
    batch: DataProto, timing_raw: dict[str, float], n_gpus: int
) -> dict[str, float]:
    """Tokens of the step and tokens per second per rank; meta_info["global_token_num"] lists them per row.

    verl: verl.trainer.ppo.metric_utils:compute_throughout_metrics
    """
    total = sum(batch.meta_info["global_token_num"])
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds,
        "perf/throughput": total / (seconds * n_gpus),
    }


def compute_variance_proxy_metrics(batch: DataProto, gradient_norm: float | None = None) -> dict[str, float]:
    """How noisy the policy gradient is, from W(τ) = Σ_t [1 - 2π(y_t) + Σ_v π(v)²]; {} without sum_pi_squared.

    proxy1 = |ḡ|², proxy2 = E[A²W], proxy3 = (proxy2 - proxy1) / (B - 1), not below 0.
    verl: verl.trainer.ppo.metric_utils:compute_variance_proxy_metrics
    """
    tensors = batch.batch
    if any(key not in tensors for key in ("sum_pi_squared", "old_log_probs", "advantages")):
        return {}
    mask = tensors["response_mask"]
    w_token = 1 - 2 * tensors["old_log_probs"].exp() + tensors["sum_pi_squared"]
    advantage = masked_mean(tensors["advantages"], mask, axis=-1)  # [B]
    power = advantage**2 * masked_sum(w_token, mask, axis=-1).clamp(min=0.0)
    if "rollout_is_weights" in tensors:
        weights = tensors["rollout_is_weights"]
        # zero weights carry no gradient: their token is left out, as is verl's division by a clamped square
        kept = torch.where(weights**2 < 1e-10, weights**2 / 1e-10, 1.0)
        power = advantage**2 * masked_sum(w_token * kept, mask, axis=-1).clamp(min=0.0)
        power = masked_mean(weights, mask, axis=-1) ** 2 * power
        w_token = w_token * weights**2
    signal = 0.0 if gradient_norm is None else float(gradient_norm) ** 2
    total = power.mean().item()
    noise = 0.0
    if gradient_norm is not None and len(batch) > 1:
        noise = max(0.0, (total - signal) / (len(batch) - 1))
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": total,
        "variance_proxy/proxy3_pure_noise": noise,
        "variance_proxy/expected_a_squared": (advantage**2).mean().item(),
        "variance_proxy/expected_w": masked_sum(w_token, mask, axis=-1).mean().item(),
    }


def calculate_debug_metrics(data: DataProto) -> dict[str, float]:
    """How far the actor's probabilities of the sampled tokens are from those the rollout reported.

    verl: verl.utils.debug.metrics:calculate_debug_metrics
    """
    mask = data.batch["response_mask"].bool()
    names = ("max", "mean", "std")
    if not mask.any():
        invalid = {f"training/rollout_probs_diff_{name}": math.nan for name in names}
        return {
            "training/rollout_probs_diff_valid": 0,
            **invalid,
            "training/rollout_actor_probs_pearson_corr": math.nan,
        }
    actor = data.batch["old_log_probs"].exp()[mask]
    rollout = data.batch["rollout_log_probs"].exp()[mask]
    diff = (actor - rollout).abs()
    return {
        "training/rollout_probs_diff_valid": 1,
        **{f"training/rollout_probs_diff_{name}": getattr(diff, name)().item() for name in names},
        "training/rollout_actor_probs_pearson_corr": torch.corrcoef(torch.stack([actor, rollout]))[
            0, 1
        ].item(),
    }


def _compute_response_info(batch: DataProto) -> dict[str, Tensor]:
    """float32 [B] each: attended tokens of prompt and response."""
    width = batch.batch["responses"].shape[-1]
    attention_mask = batch.batch["attention_mask"]
    return {
        "prompt_length": attention_mask[:, :-width].sum(-1).float(),
        "response_length": attention_mask[:, -width:].sum(-1).float(),
    }


def _stats(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:  # every row aborted, or every token rejected
        return {f"{name}/{stat}": math.nan for stat in ("mean", "max", "min")}
    return {f"{name}/{stat}": getattr(values, stat)().item() for stat in ("mean", "max", "min")}


def _lengths(name: str, lengths: Tensor, longest: int) -> dict[str, float]:
    clipped = (lengths == longest).float().mean().item()  # NaN for no rows, as the others
    return {**_stats(name, lengths), f"{name}/clip_ratio": clipped}


def _turns(name: str, counts: np.ndarray) -> dict[str, float]:
    return {f"{name}/{stat}": getattr(counts, stat)().item() for stat in ("min", "max", "mean")}


def _explained_variance(returns: Tensor, values: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one."""
    if returns.numel() == 0:
        return math.nan
    return (1.0 - (returns - values).var() / (returns.var() + 1e-5)).item()


# ---- validation ----------------------------------------------------------------------


def bootstrap_metric(
    data: Sequence,
    subset_size: int,
    reduce_fns: Sequence[Callable[[np.ndarray], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """(mean, std) of each function over `n_bootstrap` samples of `subset_size` drawn with replacement.

    Draws the same samples as verl for the same seed, without touching numpy's global generator.
    verl: verl.trainer.ppo.metric_utils:bootstrap_metric
    """
    values = _numeric_or_object(data)
    samples = values[
        _bootstrap_indices(len(data), subset_size, n_bootstrap, seed)
    ]  # [n_bootstrap, subset_size]
    results = []
    for fn in reduce_fns:
        if fn in (np.max, np.min, np.mean) and samples.dtype != object:
            outcome = fn(samples, axis=1)
        else:
            outcome = np.array([fn(sample) for sample in samples], dtype=np.float64)
        results.append((float(np.mean(outcome)), float(np.std(outcome))))
    return results


def calc_maj_val(data: Sequence[dict[str, Any]], vote_key: str, val_key: str) -> float:
    """The first `val_key` among the items that hold the commonest `vote_key`; the earliest vote wins a tie.

    verl: verl.trainer.ppo.metric_utils:calc_maj_val
    """
    votes = Counter(item[vote_key] for item in data)  # insertion order is kept, so max takes the earliest
    winner = max(votes, key=votes.__getitem__)
    return next(item[val_key] for item in data if item[vote_key] == winner)


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: dict[str, Sequence], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """data_source -> variable -> metric -> mean over prompts.

    Per prompt with N answers: mean@N; and for N > 1 std@N and, for n = 2, 4, ... N, best@n and worst@n
    (bootstrap mean and std), and maj@n where the reward also returned "pred". Text is left out.
    verl: verl.trainer.ppo.metric_utils:process_validation_metrics
    """
    rows: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows[source][uid].append(row)
    result = {}
    for source, by_uid in rows.items():
        collected: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for members in by_uid.values():
            pred = [infos_dict["pred"][row] for row in members] if "pred" in infos_dict else None
            for variable, column in infos_dict.items():
                values = [column[row] for row in members]
                if isinstance(values[0], str):
                    continue
                for name, value in _prompt_metrics(values, pred, seed).items():
                    collected[variable][name].append(value)
        result[source] = {
            variable: {name: float(np.mean(values)) for name, values in metrics.items()}
            for variable, metrics in collected.items()
        }
    return result


def val_metrics_update(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    reward_extra_infos_dict: dict[str, Sequence],
    sample_turns: Sequence[np.ndarray] = (),
) -> dict[str, float]:
    """Validation metrics under their logged names: val-core for the few that matter, val-aux for the rest.

    Core is `acc`, or `reward` where there is no acc, and of it mean, maj and best at the largest N.
    verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer._val_metrics_update
    """
    processed = process_validation_metrics(data_sources, sample_uids, reward_extra_infos_dict)
    logged: dict[str, float] = {}
    for source, variables in processed.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, metrics in variables.items():
            largest = max(int(name.split("@")[-1].split("/")[0]) for name in metrics)
            for name, value in metrics.items():
                # a prefix test, as in verl: with N = 16, "@16" is meant, and "@1" would match it too
                counts = name.startswith(("mean", "maj", "best")) and f"@{largest}" in name
                section = "val-core" if variable == core and counts else "val-aux"
                logged[f"{section}/{source}/{variable}/{name}"] = value
    if len(sample_turns) > 0:
        logged |= _turns("val-aux/num_turns", np.concatenate(sample_turns))
    return logged


def _prompt_metrics(values: list, pred: list | None, seed: int) -> dict[str, float]:
    n = len(values)
    metrics = {f"mean@{n}": float(np.mean(values))}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(np.std(values))
    for size in _subset_sizes(n):
        best, worst = bootstrap_metric(values, size, [np.max, np.min], seed=seed)
        metrics |= {f"best@{size}/mean": best[0], f"best@{size}/std": best[1]}
        metrics |= {f"worst@{size}/mean": worst[0], f"worst@{size}/std": worst[1]}
        if pred is not None:
            votes = [{"val": value, "pred": vote} for value, vote in zip(values, pred, strict=True)]
            [(mean, std)] = bootstrap_metric(votes, size, [_majority_value], seed=seed)
            metrics |= {f"maj@{size}/mean": mean, f"maj@{size}/std": std}
    return metrics


def _majority_value(sample: Sequence[dict]) -> float:
    return calc_maj_val(sample, vote_key="pred", val_key="val")


def _subset_sizes(n: int) -> list[int]:
    """2, 4, 8, ... below n, and n."""
    sizes = [2**k for k in range(1, n.bit_length()) if 2**k < n]
    return [*sizes, n]


def _numeric_or_object(data: Sequence) -> np.ndarray:
    if all(isinstance(value, Number | np.number) for value in data):
        return np.array(data, dtype=np.float64)
    array = np.empty(len(data), dtype=object)
    array[:] = list(data)
    return array


@lru_cache(maxsize=64)
def _bootstrap_indices(n_data: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """int64 [n_bootstrap, subset_size]. Raises ValueError for no data."""
    return np.random.RandomState(seed).choice(n_data, size=(n_bootstrap, subset_size), replace=True)


# ---- the log -------------------------------------------------------------------------


def format_log_line(metrics: dict[str, Any], step: int) -> str:
    """ "step:3 - actor/pg_loss:0.01 - ...", numbers only, as verl's console logger writes it.

    numpy numbers are written as plain ones (verl does so with numpy 1, for which it is declared).
    verl: verl.utils.logger.aggregate_logger:concat_dict_to_str
    """
    parts = [f"step:{step}"]
    for key, value in metrics.items():
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Number):
            parts.append(f"{key}:{value!r}")
    return " - ".join(parts)
