from enum import Enum

import pytest
import torch

from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY, estimate_advantage, get_adv_estimator_fn
from minirl.core_algos.policy_loss import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from minirl.core_algos.registry import Registry


def test_a_function_is_found_by_its_names_and_by_an_enum():
    registry = Registry("thing", "option")

    class Name(Enum):
        ONE = "one"

    @registry.register(Name.ONE, "uno")
    def fn():
        return 1

    assert registry["one"] is registry.find("uno") is registry.find(Name.ONE) is fn
    assert list(registry) == ["one", "uno"] and len(registry) == 2


def test_a_taken_name_is_refused_and_nothing_is_overwritten():
    registry = Registry("thing", "option")
    first = registry.register("one")(lambda: 1)
    registry.register("one")(first)  # the same function again is no conflict
    with pytest.raises(ValueError, match="thing 'one' is already registered"):
        registry.register("two", "one")(lambda: 2)
    assert registry["one"] is first and "two" not in registry


@pytest.mark.parametrize("registry", [ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY], ids=lambda r: r.what)
def test_registries_are_read_only_from_outside(registry):
    name = next(iter(registry))
    with pytest.raises(TypeError):
        registry[name] = print
    with pytest.raises(TypeError):
        del registry[name]
    assert not hasattr(registry, "clear") and not hasattr(registry, "update")


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="algorithm.adv_estimator.*did you mean 'grpo'"):
        get_adv_estimator_fn("gpro")
    with pytest.raises(ValueError, match="actor.policy_loss.loss_mode.*did you mean 'clip_cov'"):
        get_policy_loss_fn("clip-cov")
    with pytest.raises(ValueError, match="known: gae"):
        get_adv_estimator_fn("zzzzzz")


ONE_ROW = dict(token_level_rewards=torch.ones(1, 2), response_mask=torch.ones(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gae", "values"),
        ("grpo", "index"),
        ("remax", "reward_baselines"),
        ("optimal_token_baseline", "sum_pi_squared"),
        ("gdpo", "component_scores"),
    ],
)
def test_an_input_that_is_missing_is_named(name, missing):
    inputs = ONE_ROW | dict(
        index=["a"],
        gamma=1.0,
        lam=1.0,
        values=torch.ones(1, 2),
        old_log_probs=torch.zeros(1, 2),
        sum_pi_squared=torch.ones(1, 2),
        reward_baselines=torch.ones(1),
        component_scores=torch.ones(1, 1),
    )
    estimate_advantage(name, **inputs)
    with pytest.raises(ValueError, match=f"adv_estimator={name} needs {missing}"):
        estimate_advantage(name, **(inputs | {missing: None}))


def test_an_estimator_gets_only_what_it_names_unless_it_takes_everything():
    seen = {}
    registered = set(ADV_ESTIMATOR_REGISTRY)

    def narrow(token_level_rewards, response_mask):
        return token_level_rewards, response_mask

    def wide(token_level_rewards, **kwargs):
        seen.update(kwargs)
        return token_level_rewards, token_level_rewards

    try:
        ADV_ESTIMATOR_REGISTRY.register("narrow")(narrow)
        ADV_ESTIMATOR_REGISTRY.register("wide")(wide)
        estimate_advantage("narrow", **ONE_ROW, gamma=0.5)
        estimate_advantage("wide", **ONE_ROW, gamma=0.5, index=None)
    finally:
        for name in set(ADV_ESTIMATOR_REGISTRY) - registered:
            del ADV_ESTIMATOR_REGISTRY._functions[name]
    assert set(seen) == {"response_mask", "gamma"}


def test_an_option_reaches_every_estimator_that_has_it():
    rewards = dict(token_level_rewards=torch.tensor([[3.0], [1.0]]), response_mask=torch.ones(2, 1))
    for name in ("grpo", "grpo_vectorized", "grpo_passk"):
        plain, _ = estimate_advantage(name, **rewards, index=["a", "a"], norm_adv_by_std_in_grpo=False)
        assert plain[0, 0] == (2.0 if name == "grpo_passk" else 1.0), name
