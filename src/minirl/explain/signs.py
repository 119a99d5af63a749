"""Signs that a run is sick, read from its log alone.

in: the metrics of every step -> out: a `Sign` for each thing that stands out.
simplified: rules of thumb with fixed thresholds; a sign says where to look, not what is wrong.
verl: verl.trainer.ppo.metric_utils:compute_data_metrics (the metrics)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Thresholds of the rules, each with what it means at verl's sizes.
LARGE_KL = 0.1  # nats a token between the policy before and after one step; healthy runs stay near 0.01
LARGE_CLIPFRAC = 0.3  # share of tokens outside the clip range
LARGE_CLIP_RATIO = 0.3  # share of responses that fill all of R
LARGE_PROBS_DIFF = 0.05  # mean |p_train - p_rollout| of the sampled tokens
ENTROPY_LEFT = 0.1  # share of the first entropy
DROP = 0.6  # last scores against the best ones
WINDOW = 5  # steps averaged when scores are compared


@dataclass(frozen=True)
class Sign:
    metric: str
    step: int
    zh: str


def signs_in(history: Sequence[dict[str, float]]) -> list[Sign]:
    """All signs, the earliest first."""
    found = [sign for rule in RULES if (sign := rule(history)) is not None]
    return sorted(found, key=lambda sign: sign.step)


def _first(history, name: str, is_bad: Callable[[float], bool]) -> tuple[int, float] | None:
    for step in history:
        if name in step and is_bad(step[name]):
            return int(step["step"]), step[name]
    return None


def _values(history, name: str) -> list[tuple[int, float]]:
    return [(int(step["step"]), step[name]) for step in history if name in step]


def not_finite(history) -> Sign | None:
    for step in history:
        for name, value in step.items():
            if isinstance(value, float) and not math.isfinite(value):
                return Sign(name, int(step["step"]), "不是有限数。先看这一步之前的 grad_norm 和学习率")
    return None


def large_kl(history) -> Sign | None:
    found = _first(history, "actor/ppo_kl", lambda value: abs(value) > LARGE_KL)
    if found:
        return Sign("actor/ppo_kl", found[0], f"{found[1]:.3f}，一步之内策略走得太远：学习率或更新次数过大")
    return None


def large_clipfrac(history) -> Sign | None:
    found = _first(history, "actor/pg_clipfrac", lambda value: value > LARGE_CLIPFRAC)
    if found:
        return Sign("actor/pg_clipfrac", found[0], f"{found[1]:.2f}，太多 token 被裁：这一步大半白做")
    return None


def truncated(history) -> Sign | None:
    found = _first(history, "response_length/clip_ratio", lambda value: value > LARGE_CLIP_RATIO)
    if found:
        zh = f"{found[1]:.2f}，这么多响应写满了 R：不是长度给少了，就是不会停了"
        return Sign("response_length/clip_ratio", found[0], zh)
    return None


def engines_apart(history) -> Sign | None:
    found = _first(history, "training/rollout_probs_diff_mean", lambda value: value > LARGE_PROBS_DIFF)
    if found:
        zh = f"{found[1]:.3f}，采样的策略和训练的策略不是同一个：查权重同步、温度、精度"
        return Sign("training/rollout_probs_diff_mean", found[0], zh)
    return None


def entropy_gone(history) -> Sign | None:
    values = _values(history, "actor/entropy")
    for step, value in values[1:]:
        if values[0][1] > 0 and value < ENTROPY_LEFT * values[0][1]:
            return Sign("actor/entropy", step, f"只剩起点的 {value / values[0][1]:.0%}：响应都快一样了")
    return None


def no_gradient(history) -> Sign | None:
    found = _first(history, "actor/grad_norm", lambda value: value == 0)
    if found:
        return Sign("actor/grad_norm", found[0], "是 0：这一批优势全是 0，或权重没有参与计算")
    return None


def score_fell(history) -> Sign | None:
    values = _values(history, "critic/score/mean")
    if len(values) < 2 * WINDOW:
        return None
    means = [
        (values[i][0], sum(value for _, value in values[i - WINDOW + 1 : i + 1]) / WINDOW)
        for i in range(WINDOW - 1, len(values))
    ]
    best = 0.0
    for step, mean in means:
        best = max(best, mean)
        if mean < DROP * best:
            return Sign(
                "critic/score/mean", step, f"从 {best:.2f} 掉到 {mean:.2f}（{WINDOW} 步平均）：训坏了"
            )
    return None


def useless_critic(history) -> Sign | None:
    values = _values(history, "critic/vf_explained_var")
    late = values[len(values) // 2 :]
    if len(values) >= 2 * WINDOW and all(value < 0 for _, value in late):
        return Sign("critic/vf_explained_var", late[0][0], "后半程一直小于 0：critic 还不如猜平均数")
    return None


def aborted(history) -> Sign | None:
    found = _first(history, "response/aborted_ratio", lambda value: value > 0)
    if found:
        return Sign("response/aborted_ratio", found[0], f"{found[1]:.2f} 的响应是空的：看引擎的日志")
    return None


RULES: tuple[Callable[[Sequence[dict[str, float]]], Sign | None], ...] = (
    not_finite,
    large_kl,
    large_clipfrac,
    truncated,
    engines_apart,
    entropy_gone,
    no_gradient,
    score_fell,
    useless_critic,
    aborted,
)
