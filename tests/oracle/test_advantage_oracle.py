"""Every advantage estimator against the pinned verl's, by name, on ragged batches."""

from types import SimpleNamespace

import pytest
import torch
from batches import DTYPES, Batch, assert_same, batches, check_on_batches
from hypothesis import assume, given, settings
from oracle.verl_functions import core_algos, later

import minirl.core_algos.advantage as ours
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY, estimate_advantage

pytestmark = pytest.mark.oracle

GAMMA, LAM = 0.9, 0.8
ESTIMATORS = sorted(core_algos.ADV_ESTIMATOR_REGISTRY)


def run_ours(name: str, b: Batch, **options):
    inputs = dict(
        token_level_rewards=b.token_level_rewards,
        response_mask=b.response_mask,
        index=b.index,
        values=b.values,
        reward_baselines=b.reward_baselines,
        component_scores=b.component_scores,
        old_log_probs=b.old_log_probs,
        sum_pi_squared=b.sum_pi_squared,
        gamma=GAMMA,
        lam=LAM,
    )
    return estimate_advantage(name, **(inputs | options))


class Config(dict):
    """verl reads `config.gamma` in one estimator and `config.get(...)` in others."""

    gamma = GAMMA


def run_verl(name: str, b: Batch, **options):
    fn = core_algos.ADV_ESTIMATOR_REGISTRY[name]
    if name == "gae":
        return fn(b.token_level_rewards, b.values, b.response_mask, GAMMA, LAM)
    inputs = dict(token_level_rewards=b.token_level_rewards, response_mask=b.response_mask)
    if name not in ("remax", "reinforce_plus_plus"):
        inputs["index"] = b.index
    if name == "remax":
        inputs["reward_baselines"] = b.reward_baselines
    if name.endswith("optimal_token_baseline"):
        inputs |= dict(old_log_probs=b.old_log_probs, sum_pi_squared=b.sum_pi_squared)
    if name in ("reinforce_plus_plus", "grpo_passk"):
        inputs["config"] = Config(options)
    if name == "gdpo":
        rows, width = b.response_mask.shape
        inputs |= dict(
            config=Config(gdpo_reward_keys=["first", "second"]) | options,
            non_tensor_batch=dict(zip(("first", "second"), b.component_scores.float().numpy(), strict=True)),
            batch=dict(
                prompts=torch.zeros(rows, 3), attention_mask=torch.ones(rows, 3 + width, dtype=torch.long)
            ),
        )
    return fn(**inputs)


def test_every_estimator_of_the_pin_is_registered_and_no_other():
    assert set(ADV_ESTIMATOR_REGISTRY) == set(core_algos.ADV_ESTIMATOR_REGISTRY)
    assert set(ADV_ESTIMATOR_REGISTRY) == {e.value for e in core_algos.AdvantageEstimator}


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_and_returns_equal_the_pins(name, dtype):
    def check(b):
        b = b.to(dtype)
        advantages, returns = run_ours(name, b)
        expected_advantages, expected_returns = run_verl(name, b)
        if name == "reinforce_plus_plus":  # the pin leaves rewards of masked tokens in `returns`
            expected_returns = expected_returns * b.response_mask
        if name == "opo":  # the pin: NaN in a group without a token
            expected_advantages, expected_returns = (
                expected_advantages.nan_to_num(),
                expected_returns.nan_to_num(),
            )
        assert advantages.dtype == returns.dtype == dtype
        assert_same(advantages, expected_advantages, dtype)
        assert_same(returns, expected_returns, dtype)

    check_on_batches(check, BATCHES.get(name, batches()), without=WITHOUT.get(name, ()))


def test_grpo_passk_refuses_a_group_of_one_here_and_in_the_pin():
    call = (torch.ones(1, 2), torch.ones(1, 2, dtype=torch.long), ["a"])
    with pytest.raises(ValueError, match="only one"):
        ours.compute_grpo_passk_outcome_advantage(*call)
    with pytest.raises(ValueError, match="at least 2"):
        core_algos.compute_grpo_passk_outcome_advantage(*call, config={})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reinforce_plus_plus_carries_returns_across_gaps_as_the_later_verl_does(dtype):
    fn = later(core_algos, "compute_reinforce_plus_plus_outcome_advantage").popitem()[1]

    def check(b):
        b = b.to(dtype)
        expected = fn(b.token_level_rewards, b.response_mask, config=SimpleNamespace(gamma=GAMMA))
        for mine, theirs in zip(run_ours("reinforce_plus_plus", b), expected, strict=True):
            assert_same(mine, theirs, dtype)

    check_on_batches(check, batches())


def test_reinforce_plus_plus_of_the_pin_loses_the_reward_before_a_gap():
    mask = torch.tensor([[1, 0, 1]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    _, theirs = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=SimpleNamespace(gamma=1.0)
    )
    _, mine = ours.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=1.0)
    assert theirs.tolist() == [[0.0, 1.0, 1.0]]
    assert mine.tolist() == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "grpo_passk", "gdpo"])
def test_the_option_without_std_equals_the_pins_functions_though_the_pin_passes_it_to_grpo_only(name, dtype):
    def check(b):
        b = b.to(dtype)
        scores = b.token_level_rewards.sum(-1)[None]  # the pin's gdpo without keys: the reward alone
        mine = run_ours(name, b, component_scores=scores, norm_adv_by_std_in_grpo=False)
        if name == "grpo_passk":
            theirs = run_verl(name, b, norm_adv_by_std_in_grpo=False)
        else:
            fn = core_algos.ADV_ESTIMATOR_REGISTRY[name]
            theirs = fn(b.token_level_rewards, b.response_mask, b.index, norm_adv_by_std_in_grpo=False)
        assert_same(mine[0], theirs[0], dtype)

    check_on_batches(check, BATCHES.get(name, batches()), without=WITHOUT.get(name, ()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gdpo_weights_equal_the_pins(dtype):
    def check(b):
        b = b.to(dtype)
        weights = dict(gdpo_reward_weights=[2.0, 0.25])
        assert_same(run_ours("gdpo", b, **weights)[0], run_verl("gdpo", b, **weights)[0], dtype)

    check_on_batches(check, BATCHES["gdpo"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_rollout_weights_enter_the_optimal_token_baseline_as_in_the_pin(name, dtype):
    def check(b):
        b = b.to(dtype)
        theirs = core_algos.ADV_ESTIMATOR_REGISTRY[name](
            b.token_level_rewards,
            b.response_mask,
            b.index,
            b.old_log_probs,
            b.sum_pi_squared,
            b.rollout_is_weights,
        )
        mine = run_ours(name, b, rollout_is_weights=b.rollout_is_weights)
        assert_same(mine[0], theirs[0], dtype)

    check_on_batches(check, batches())


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
