"""One call of an advantage estimator by name, ours and verl's (any version), on a `Batch`; with what options.

Not a test: used by the tests of advantages against either version.
"""

from types import ModuleType
from typing import Any

import torch
from batches import Batch, batches
from torch import Tensor

from minirl.core_algos.advantage import estimate_advantage

# by name: the options of verl's function, at its defaults (those of the trainer for gamma, lam) and elsewhere
DEFAULTS: dict[str, Any] = {"gae": dict(gamma=1.0, lam=1.0), "reinforce_plus_plus": dict(gamma=1.0)}
OTHER_VALUES: dict[str, list[dict[str, Any]]] = {
    "gae": [dict(gamma=0.9, lam=0.8), dict(gamma=1.0, lam=0.0)],
    "reinforce_plus_plus": [dict(gamma=0.9)],
    "grpo": [dict(norm_adv_by_std_in_grpo=False), dict(epsilon=0.1)],
    "grpo_vectorized": [dict(norm_adv_by_std_in_grpo=False), dict(epsilon=0.1)],
    "grpo_passk": [dict(norm_adv_by_std_in_grpo=False), dict(epsilon=0.1)],
    "gdpo": [
        dict(gdpo_reward_weights=[2.0, 0.25]),
        dict(gdpo_reward_weights=[0.5, -1.0], norm_adv_by_std_in_grpo=False),
        dict(epsilon=0.1),
    ],
    "gpg": [dict(f_norm=2.5)],
    "optimal_token_baseline": [dict(weighted=True), dict(weighted=True, epsilon=0.3)],
    "tir_optimal_token_baseline": [dict(weighted=True), dict(weighted=True, epsilon=0.3)],
}


def settings_of(names: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """(name, options): for every name once the defaults, and each entry of `OTHER_VALUES`."""
    return [(name, options) for name in names for options in [{}, *OTHER_VALUES.get(name, [])]]


def run_ours(name: str, b: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    options = DEFAULTS.get(name, {}) | options
    weighted = options.pop("weighted", False)
    return estimate_advantage(
        name,
        token_level_rewards=b.token_level_rewards,
        response_mask=b.response_mask,
        index=b.index,
        values=b.values,
        reward_baselines=b.reward_baselines,
        component_scores=b.component_scores,
        old_log_probs=b.old_log_probs,
        sum_pi_squared=b.sum_pi_squared,
        rollout_is_weights=b.rollout_is_weights if weighted else None,
        **options,
    )


class Config(dict):
    """verl reads `config.gamma` in one estimator and `config.get(...)` in others."""

    @property
    def gamma(self) -> float:
        return self["gamma"]


def run_verl(core_algos: ModuleType, name: str, b: Batch, **options: Any) -> tuple[Tensor, Tensor]:
    options = DEFAULTS.get(name, {}) | options
    weighted = options.pop("weighted", False)
    fn = core_algos.ADV_ESTIMATOR_REGISTRY[name]
    inputs = dict(token_level_rewards=b.token_level_rewards, response_mask=b.response_mask)
    if name == "gae":
        return fn(values=b.values, **inputs, **options)
    if name == "remax":
        return fn(reward_baselines=b.reward_baselines, **inputs)
    if name == "reinforce_plus_plus":
        return fn(config=Config(options), **inputs)
    inputs["index"] = b.index
    if name == "grpo_passk":  # reads the option from the config; the argument is overwritten
        epsilon = {key: options.pop(key) for key in ("epsilon",) if key in options}
        return fn(config=Config(options), **inputs, **epsilon)
    if name.endswith("optimal_token_baseline"):
        inputs |= dict(old_log_probs=b.old_log_probs, sum_pi_squared=b.sum_pi_squared)
        inputs |= dict(rollout_is_weights=b.rollout_is_weights) if weighted else {}
    if name == "gdpo":
        weights = options.pop("gdpo_reward_weights", None)
        rows, width = b.response_mask.shape
        inputs |= dict(
            config=Config(gdpo_reward_keys=["first", "second"], gdpo_reward_weights=weights),
            non_tensor_batch=dict(zip(("first", "second"), b.component_scores.float().numpy(), strict=True)),
            batch=dict(
                prompts=torch.zeros(rows, 3), attention_mask=torch.ones(rows, 3 + width, dtype=torch.long)
            ),
        )
    return fn(**inputs, **options)


def tokens_differ(b: Batch) -> bool:
    """Else all that whitening finds is rounding errors, times 1e4; whitened numbers are of size 1."""
    return run_ours("gdpo", b)[0].abs().max().item() > 0.1


# what a name needs of a batch for the arithmetic of the pin to be the same as ours, and what that leaves out
BATCHES = {
    "grpo_passk": batches(min_group=2),
    "reinforce_plus_plus": batches(gaps=False),
    "gdpo": batches().filter(tokens_differ),
}
WITHOUT = {"grpo_passk": ["group of one"], "reinforce_plus_plus": ["gap in the mask"]}
