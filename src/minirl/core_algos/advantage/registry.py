"""Advantage estimators by their verl name, as in `algorithm.adv_estimator=grpo`.

name -> function(token_level_rewards, response_mask, ...) -> (advantages, returns), both [B, R].
verl: verl.trainer.ppo.core_algos:register_adv_est, get_adv_estimator_fn
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from minirl.core_algos.registry import Registry

ADV_ESTIMATOR_REGISTRY = Registry("advantage estimator", "algorithm.adv_estimator")
register_adv_est = ADV_ESTIMATOR_REGISTRY.register

_REMEDY = {
    "values": "a critic must run before the advantage (critic.enable=True)",
    "index": "the batch needs uid, one label per prompt",
    "reward_baselines": "ReMax needs the score of one greedy response per prompt",
    "sum_pi_squared": "set actor.calculate_sum_pi_squared=True",
    "component_scores": "set algorithm.gdpo_reward_keys to the keys that compute_score returns",
}


@functools.cache
def _parameters(fn: Callable) -> tuple[inspect.Parameter, ...]:
    """Looked up once: it takes longer than the statistics of a small batch."""
    return tuple(inspect.signature(fn).parameters.values())


def get_adv_estimator_fn(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The estimator called `name`. Raises ValueError with the nearest known name."""
    return ADV_ESTIMATOR_REGISTRY.find(name)


def estimate_advantage(name: str, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Run the estimator `name` with those of `inputs` that its signature asks for -> (advantages, returns).

    The trainer hands over everything it has (an input that is None counts as absent) and each estimator takes
    what it names, so that no estimator needs a `**kwargs` to swallow the rest. An option therefore reaches
    every estimator that has it: in verl `norm_adv_by_std_in_grpo` stops at `grpo` and never gets to
    `grpo_vectorized`.
    Raises ValueError, with the remedy, when a required input is absent.
    """
    fn = get_adv_estimator_fn(name)
    given = {key: value for key, value in inputs.items() if value is not None}
    parameters = _parameters(fn)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # a reader's own estimator, written in verl's manner
        return fn(**given)
    for p in parameters:
        if p.default is p.empty and p.name not in given:
            raise ValueError(
                f"algorithm.adv_estimator={name} needs {p.name}: {_REMEDY.get(p.name, 'missing')}"
            )
    return fn(**{p.name: given[p.name] for p in parameters if p.name in given})
