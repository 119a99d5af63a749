"""Every advantage estimator against the pinned verl's, by name, on ragged batches."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import DTYPES, assert_same, batches, check_on_batches
from hypothesis import assume, given, settings
from oracle.estimator_calls import BATCHES, OTHER_VALUES, WITHOUT, run_ours, run_verl, settings_of
from oracle.verl_functions import core_algos

import minirl.core_algos.advantage as ours
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY, estimate_advantage

pytestmark = pytest.mark.oracle

ESTIMATORS = sorted(core_algos.ADV_ESTIMATOR_REGISTRY)


def test_every_estimator_of_the_pin_is_registered_and_no_other():
    assert set(ADV_ESTIMATOR_REGISTRY) == set(core_algos.ADV_ESTIMATOR_REGISTRY)
    assert set(ADV_ESTIMATOR_REGISTRY) == {e.value for e in core_algos.AdvantageEstimator}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), settings_of(ESTIMATORS), ids=str)
def test_advantages_and_returns_equal_the_pins(name, options, dtype):
    def check(b):
        b = b.to(dtype)
        advantages, returns = run_ours(name, b, **options)
        expected_advantages, expected_returns = run_verl(core_algos, name, b, **options)
        if name == "reinforce_plus_plus":  # the pin leaves rewards of masked tokens in `returns`
            expected_returns = expected_returns * b.response_mask
        if name == "opo":  # the pin: NaN in a group without a token
            expected_advantages, expected_returns = (
                expected_advantages.nan_to_num(),
                expected_returns.nan_to_num(),
            )
        assert advantages.dtype == returns.dtype == dtype
        # the pin rounds opo's baseline to bfloat16, and the score minus it may be smaller than that error
        terms = b.token_level_rewards.sum(-1).abs().max().item() if name == "opo" else 0.0
        terms = terms if dtype == torch.bfloat16 else 0.0
        assert_same(advantages, expected_advantages, dtype, terms)
        assert_same(returns, expected_returns, dtype, terms)

    check_on_batches(check, BATCHES.get(name, batches()), without=WITHOUT.get(name, ()))


def test_options_are_tried_at_other_values_wherever_the_pins_function_has_one():
    for name, fn in core_algos.ADV_ESTIMATOR_REGISTRY.items():
        read = {
            parameter.name
            for parameter in inspect.signature(fn).parameters.values()
            if parameter.name in ("gamma", "lam", "epsilon", "f_norm", "norm_adv_by_std_in_grpo")
            and parameter.name in inspect.getsource(fn).split('"""')[-1]  # epsilon is often unread
        }
        tried = {option for options in OTHER_VALUES.get(name, []) for option in options}
        assert read <= tried, name


def test_grpo_passk_refuses_a_group_of_one_here_and_in_the_pin():
    call = (torch.ones(1, 2), torch.ones(1, 2, dtype=torch.long), ["a"])
    with pytest.raises(ValueError, match="only one"):
        ours.compute_grpo_passk_outcome_advantage(*call)
    with pytest.raises(ValueError, match="at least 2"):
        core_algos.compute_grpo_passk_outcome_advantage(*call, config={})


def test_reinforce_plus_plus_of_the_pin_loses_the_reward_before_a_gap():
    mask = torch.tensor([[1, 0, 1]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    _, theirs = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=SimpleNamespace(gamma=1.0)
    )
    _, mine = ours.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=1.0)
    assert theirs.tolist() == [[0.0, 1.0, 1.0]]
    assert mine.tolist() == [[1.0, 0.0, 1.0]]


def test_the_trainer_of_the_pin_passes_the_option_without_std_to_grpo_only():
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    rewards, mask = torch.tensor([[1.0], [0.0], [0.0]]), torch.ones(3, 1, dtype=torch.long)
    index = np.array(["a"] * 3, dtype=object)
    theirs, mine = {}, {}
    for name in ("grpo", "grpo_vectorized"):
        data = DataProto.from_dict(
            tensors=dict(token_level_rewards=rewards.clone(), response_mask=mask),
            non_tensors=dict(uid=index.copy()),
        )
        data = compute_advantage(data, name, norm_adv_by_std_in_grpo=False)
        theirs[name] = data.batch["advantages"][0].item()
        advantages, _ = estimate_advantage(
            name,
            token_level_rewards=rewards,
            response_mask=mask,
            index=index,
            norm_adv_by_std_in_grpo=False,
        )
        mine[name] = advantages[0].item()
    assert mine == pytest.approx({"grpo": 2 / 3, "grpo_vectorized": 2 / 3})
    assert theirs == pytest.approx({"grpo": 2 / 3, "grpo_vectorized": 2 / 3**0.5}, rel=1e-5)


def test_opo_of_the_pin_is_nan_for_a_group_of_empty_responses():
    rewards, mask = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.zeros(2, 2, dtype=torch.long)
    theirs, _ = core_algos.compute_opo_outcome_advantage(rewards, mask, ["a", "a"])
    mine, _ = ours.compute_opo_outcome_advantage(rewards, mask, ["a", "a"])
    assert theirs.isnan().all() and (mine == 0).all()


def test_a_group_of_equal_odd_scores_is_exactly_zero_here_and_noise_in_the_pin():
    rewards, mask = torch.full((8, 1), 0.7), torch.ones(8, 1, dtype=torch.long)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, ["a"] * 8)
    mine, _ = ours.compute_grpo_outcome_advantage(rewards, mask, ["a"] * 8)
    assert (mine == 0).all()
    assert theirs.abs().max() > 0.05  # float32: the mean of eight 0.7 is not 0.7, and 6e-8 is divided by 1e-6


def test_a_row_alone_keeps_its_score_in_rloo_and_gets_zero_in_rloo_vectorized_as_in_the_pin():
    rewards, mask = torch.tensor([[0.5]]), torch.ones(1, 1, dtype=torch.long)
    for name, expected in (("rloo", 0.5), ("rloo_vectorized", 0.0)):
        assert core_algos.ADV_ESTIMATOR_REGISTRY[name](rewards, mask, ["a"])[0].item() == expected
        assert ADV_ESTIMATOR_REGISTRY[name](rewards, mask, ["a"])[0].item() == expected


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches(gaps=False))
def test_pf_ppo_draws_the_pins_rows_under_the_same_seed(b):
    from verl import DataProto

    from minirl.core_algos.pf_ppo import pf_ppo_indices

    scores = b.token_level_rewards.abs()
    assume((scores.sum(-1) > 0).any())
    rows = torch.arange(len(scores))
    for method in ("pow", "max_min", "max_random"):
        data = DataProto.from_dict(tensors={"token_level_scores": scores, "row": rows})
        torch.manual_seed(3)
        theirs = core_algos.compute_pf_ppo_reweight_data(data, method, 2.0).batch["row"]
        torch.manual_seed(3)
        assert torch.equal(rows[pf_ppo_indices(scores, reweight_method=method)], theirs)


def test_a_case_that_hypothesis_never_made_is_noticed():
    with pytest.raises(AssertionError, match="gap in the mask"):
        check_on_batches(lambda b: None, batches(), without=["gap in the mask"])
    with pytest.raises(AssertionError, match="asked for all but"):
        check_on_batches(lambda b: None, batches(gaps=False))
