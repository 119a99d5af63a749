"""Every advantage estimator against the pinned verl's, by name, on ragged batches."""

from types import SimpleNamespace

import pytest
import torch
from batches import Batch, assert_same, batches, has_gaps
from hypothesis import assume, given, settings
from oracle.verl_functions import core_algos, later

import minirl.core_algos.advantage as ours
from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY, estimate_advantage

pytestmark = pytest.mark.oracle

GAMMA, LAM = 0.9, 0.8
DTYPES = [torch.float32, torch.bfloat16]
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


# what each name needs of a batch for the arithmetic of the pin to be the same as ours
BATCHES = {
    "grpo_passk": batches(min_group=2),
    "reinforce_plus_plus": batches(gaps=False),
    "opo": batches(empty_rows=False, gaps=False),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_and_returns_equal_the_pins(name, dtype):
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(BATCHES.get(name, batches()))
    def check(b):
        b = b.to(dtype)
        advantages, returns = run_ours(name, b)
        expected_advantages, expected_returns = run_verl(name, b)
        if name == "reinforce_plus_plus":  # the pin leaves rewards of masked tokens in `returns`
            expected_returns = expected_returns * b.response_mask
        assert advantages.dtype == returns.dtype == dtype
        assert_same(advantages, expected_advantages, dtype)
        assert_same(returns, expected_returns, dtype)

    check()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches())
def test_reinforce_plus_plus_carries_returns_across_gaps_as_the_later_verl_does(b):
    fn = later(core_algos, "compute_reinforce_plus_plus_outcome_advantage").popitem()[1]
    expected = fn(b.token_level_rewards, b.response_mask, config=SimpleNamespace(gamma=GAMMA))
    for mine, theirs in zip(run_ours("reinforce_plus_plus", b), expected, strict=True):
        assert_same(mine, theirs)


def test_reinforce_plus_plus_of_the_pin_loses_the_reward_before_a_gap():
    mask = torch.tensor([[1, 0, 1]])
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    _, theirs = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=SimpleNamespace(gamma=1.0)
    )
    _, mine = ours.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=1.0)
    assert theirs.tolist() == [[0.0, 1.0, 1.0]]
    assert mine.tolist() == [[1.0, 0.0, 1.0]]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches(min_group=2))
def test_the_option_without_std_equals_the_pins_where_the_pin_passes_it(b):
    for name in ("grpo", "grpo_passk"):
        mine = run_ours(name, b, norm_adv_by_std_in_grpo=False)
        if name == "grpo":
            theirs = core_algos.compute_grpo_outcome_advantage(
                b.token_level_rewards, b.response_mask, b.index, norm_adv_by_std_in_grpo=False
            )
        else:
            theirs = run_verl(name, b, norm_adv_by_std_in_grpo=False)
        assert_same(mine[0], theirs[0])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches())
def test_the_option_without_std_reaches_grpo_vectorized_and_gdpo_unlike_in_the_pin(b):
    plain = core_algos.compute_grpo_vectorized_outcome_advantage(
        b.token_level_rewards, b.response_mask, b.index, norm_adv_by_std_in_grpo=False
    )
    assert_same(run_ours("grpo_vectorized", b, norm_adv_by_std_in_grpo=False)[0], plain[0])
    gdpo = core_algos.compute_gdpo_outcome_advantage(
        b.token_level_rewards, b.response_mask, b.index, norm_adv_by_std_in_grpo=False
    )
    scores = b.token_level_rewards.sum(-1)[None]
    assert_same(run_ours("gdpo", b, component_scores=scores, norm_adv_by_std_in_grpo=False)[0], gdpo[0])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches())
def test_gdpo_weights_equal_the_pins(b):
    mine = run_ours("gdpo", b, gdpo_reward_weights=[2.0, 0.25])
    assert_same(mine[0], run_verl("gdpo", b, gdpo_reward_weights=[2.0, 0.25])[0])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches())
def test_rollout_weights_enter_the_optimal_token_baseline_as_in_the_pin(b):
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        theirs = core_algos.ADV_ESTIMATOR_REGISTRY[name](
            b.token_level_rewards,
            b.response_mask,
            b.index,
            b.old_log_probs,
            b.sum_pi_squared,
            b.rollout_is_weights,
        )
        mine = run_ours(name, b, rollout_is_weights=b.rollout_is_weights)
        assert_same(mine[0], theirs[0])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches())
def test_opo_differs_from_the_pin_only_in_groups_without_a_token(b):
    mine, theirs = run_ours("opo", b)[0], run_verl("opo", b)[0]
    assert mine.isfinite().all()
    defined = theirs.isfinite()
    assert_same(mine[defined], theirs[defined])
    assert (mine[~defined] == 0).all()


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


def test_the_strategy_makes_the_cases_it_promises():
    seen = set()

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(batches())
    def look(b):
        sizes = {
            n for n in torch.unique(torch.tensor([hash(u) for u in b.index]), return_counts=True)[1].tolist()
        }
        seen.update(["group of one"] if 1 in sizes else [], ["larger group"] if max(sizes) > 1 else [])
        seen.update(["empty response"] if (b.response_mask.sum(-1) == 0).any() else [])
        seen.update(["gap"] if has_gaps(b.response_mask) else [])
        seen.update(["extreme ratio"] if (b.log_prob - b.old_log_probs).abs().max() > 20 else [])

    look()
    assert seen == {"group of one", "larger group", "empty response", "gap", "extreme ratio"}
