"""RLOO, OPO, GPG, pass@k, GDPO, ReMax, REINFORCE++ on one small batch, worked out by hand."""

import numpy as np
import pytest
import torch
from batches import batches
from hypothesis import given, settings

import minirl.core_algos.advantage as adv

# scores 1, 0, 2 in group a; 3 alone in group b; lengths 3, 1, 2, 2
SCORES = torch.tensor([1.0, 0.0, 2.0, 3.0])
INDEX = np.array(["a", "a", "a", "b"], dtype=object)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]])
REWARDS = torch.zeros(4, 3)
REWARDS[torch.arange(4), MASK.sum(-1) - 1] = SCORES


def rows_of(result):
    """One number per row, after checking that all generated tokens share it and the others are 0."""
    advantages, _ = result
    rows = advantages[:, 0]
    torch.testing.assert_close(advantages, rows[:, None] * MASK)
    return rows.tolist()


def test_rloo_compares_with_the_mean_of_the_others():
    expected = [1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2]
    assert rows_of(adv.compute_rloo_outcome_advantage(REWARDS, MASK, INDEX)) == pytest.approx(
        [*expected, 3.0]
    )
    vectorized = adv.compute_rloo_vectorized_outcome_advantage(REWARDS, MASK, INDEX)
    assert rows_of(vectorized) == pytest.approx([*expected, 0.0])  # a row alone: 0 instead of its score


def test_opo_weighs_the_baseline_by_length():
    baseline = (3 * 1 + 1 * 0 + 2 * 2) / (3 + 1 + 2)
    expected = [1 - baseline, 0 - baseline, 2 - baseline, 3.0]
    assert rows_of(adv.compute_opo_outcome_advantage(REWARDS, MASK, INDEX)) == pytest.approx(expected)


def test_opo_of_a_group_of_empty_responses_is_zero():
    advantages, _ = adv.compute_opo_outcome_advantage(REWARDS, torch.zeros_like(MASK), INDEX)
    assert (advantages == 0).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", 3 / (1 + 1e-6)),
        ("grpo_vectorized", 3 / (1 + 1e-6)),
        ("rloo", 3.0),
        ("rloo_vectorized", 0.0),
        ("opo", 3.0),
        ("gpg", 4 / 3 * 3.0),
    ],
)
def test_a_row_alone_keeps_its_score_except_in_rloo_vectorized(name, expected):
    rows = rows_of(adv.get_adv_estimator_fn(name)(REWARDS, MASK, INDEX))
    assert rows[3] == pytest.approx(expected)


def test_a_row_alone_is_not_centred_before_reinforce_plus_plus_baseline_whitens():
    of_four = torch.tensor([0.0, 0.0, 0.0, 3.0])  # three equal scores, and one that is alone
    rewards = of_four[:, None] * torch.tensor([[0.0, 0.0, 1.0]])
    index = np.array(["a", "a", "a", "b"], dtype=object)
    rows = adv.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, torch.ones(4, 3), index)[0]
    spread = (12 * (3 / 4) * (1 / 4) * 9 / 11) ** 0.5  # unbiased, over 12 tokens: a quarter 3, the others 0
    assert rows[:, 0].tolist() == pytest.approx([-0.75 / spread] * 3 + [2.25 / spread])


def test_gpg_rescales_by_the_share_of_rows_that_scored():
    alpha = 4 / 3  # one row of four scored 0
    expected = [alpha * 0.0, alpha * -1.0, alpha * 1.0, alpha * 3.0]
    assert rows_of(adv.compute_gpg_outcome_advantage(REWARDS, MASK, INDEX)) == pytest.approx(expected)
    halved = adv.compute_gpg_outcome_advantage(REWARDS, MASK, INDEX, f_norm=2.0)
    assert rows_of(halved) == pytest.approx([x / 2 for x in expected])
    nothing, _ = adv.compute_gpg_outcome_advantage(torch.zeros(4, 3), MASK, INDEX)
    assert (nothing == 0).all()


def test_passk_rewards_only_the_best_row_by_its_lead():
    mates = ["a", "a", "a", "b"], ["a", "a", "a", "a"]
    with pytest.raises(ValueError, match="prompt b.*rollout.n"):
        adv.compute_grpo_passk_outcome_advantage(REWARDS, MASK, mates[0])
    plain = adv.compute_grpo_passk_outcome_advantage(REWARDS, MASK, mates[1], norm_adv_by_std_in_grpo=False)
    assert rows_of(plain) == [0.0, 0.0, 0.0, 1.0]  # 3 against 2
    normed = adv.compute_grpo_passk_outcome_advantage(REWARDS, MASK, mates[1])
    assert rows_of(normed) == pytest.approx([0.0, 0.0, 0.0, 1 / SCORES.std().item()], rel=1e-5)


def test_passk_gives_nothing_when_the_best_score_is_shared():
    rewards = torch.ones(2, 3)
    advantages, _ = adv.compute_grpo_passk_outcome_advantage(rewards, MASK[:2], ["a", "a"])
    assert (advantages == 0).all()


def whitened(rows, lengths):
    tokens = np.repeat(rows, lengths)
    return ((np.array(rows) - tokens.mean()) / tokens.std(ddof=1)).tolist()


def test_reinforce_plus_plus_baseline_divides_by_one_spread_for_the_whole_batch():
    expected = whitened([0.0, -1.0, 1.0, 3.0], [3, 1, 2, 2])
    result = adv.compute_reinforce_plus_plus_baseline_outcome_advantage(REWARDS, MASK, INDEX)
    assert rows_of(result) == pytest.approx(expected, rel=1e-4)


def test_gdpo_normalises_each_reward_in_the_group_before_adding():
    large_and_small = torch.stack([100 * SCORES, torch.tensor([0.0, 1.0, 0.0, 0.0])])
    index = ["a", "a", "b", "b"]
    half = 0.5**0.5
    # large: 100, 0 | 200, 300; small: 0, 1 | 0, 0 -> every spread becomes 1, but for the group without one
    total = [half - half, -half + half, -half + 0, half + 0]
    result = adv.compute_gdpo_outcome_advantage(large_and_small, MASK, index)
    assert rows_of(result) == pytest.approx(whitened(total, [3, 1, 2, 2]), abs=1e-4)
    weighted = adv.compute_gdpo_outcome_advantage(
        large_and_small, MASK, index, gdpo_reward_weights=[1.0, 3.0]
    )
    total = [half - 3 * half, -half + 3 * half, -half, half]
    assert rows_of(weighted) == pytest.approx(whitened(total, [3, 1, 2, 2]), abs=1e-4)


def test_gdpo_takes_its_columns_by_name_and_says_what_is_missing():
    columns = {"correct": np.array([1, 0], dtype=object), "format": np.array([0.5, 1.0])}
    scores = adv.gdpo_component_scores(columns, ["format", "correct"])
    assert scores.tolist() == [[0.5, 1.0], [1.0, 0.0]] and scores.dtype == torch.float32
    with pytest.raises(ValueError, match="names 'style'.*correct, format"):
        adv.gdpo_component_scores(columns, ["style"])
    for column in (["good", "bad"], [None, [1.0]]):
        with pytest.raises(ValueError, match="names 'style', whose values are no numbers"):
            adv.gdpo_component_scores({"style": np.array(column, dtype=object)}, ["style"])
    with pytest.raises(ValueError, match="gdpo_reward_keys is empty"):
        adv.gdpo_component_scores(columns, [])
    with pytest.raises(ValueError, match="gdpo_reward_weights has 1 entries for 2 keys"):
        adv.compute_gdpo_outcome_advantage(scores, MASK[:2], ["a", "a"], gdpo_reward_weights=[1.0])


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "gpg", "opo", "reinforce_plus_plus_baseline", "rloo"])
def test_an_index_of_another_length_is_refused_with_both_numbers(name):
    with pytest.raises(ValueError, match="index has 3 entries for 4 rows: give every row"):
        adv.get_adv_estimator_fn(name)(SCORES.unsqueeze(-1) * MASK, MASK, ["a", "a", "a"])


def test_opo_counts_long_responses_exactly_in_bfloat16():
    # bfloat16 knows neither 257 nor 259, only 256 and 260: the baseline would be -7.9 instead of -4.0
    mask = (torch.arange(259) < torch.tensor([[257], [259]])).long()
    rewards = torch.zeros(2, 259, dtype=torch.bfloat16)
    rewards[:, 0] = torch.tensor([1024.0, -1024.0])
    advantages, _ = adv.compute_opo_outcome_advantage(rewards, mask, ["a", "a"])
    baseline = 1024 * (257 - 259) / (257 + 259)
    exact = torch.tensor([1024 - baseline, -1024 - baseline])
    assert advantages[:, 0].tolist() == exact.to(torch.bfloat16).tolist() == [1024.0, -1020.0]


def test_remax_subtracts_the_greedy_score_from_the_reward_to_go():
    rewards = torch.tensor([[1.0, 0.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    advantages, returns = adv.compute_remax_outcome_advantage(rewards, torch.tensor([0.5]), mask)
    assert returns.tolist() == [[3.0, 2.0, 2.0, 0.0]]
    assert advantages.tolist() == [[2.5, 1.5, 1.5, 0.0]]


def test_reinforce_plus_plus_discounts_over_generated_tokens_only():
    rewards = torch.tensor([[0.0, 5.0, 0.0, 1.0, 3.0]])
    mask = torch.tensor([[1, 0, 1, 1, 0]])
    advantages, returns = adv.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    # the masked rewards 5 and 3 are lost, and the gap costs no discount
    assert returns.tolist() == [[0.25, 0.0, 0.5, 1.0, 0.0]]
    kept = np.array([0.25, 0.5, 1.0])
    expected = (kept - kept.mean()) / kept.std(ddof=1)
    assert advantages[0, [0, 2, 3]].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert advantages[0, [1, 4]].tolist() == [0.0, 0.0]


OUTCOME = ["grpo", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("name", OUTCOME)
def test_tokens_outside_the_mask_get_no_advantage_and_generated_ones_share_the_rows(name):
    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(batches())
    def check(b):
        advantages, returns = adv.ADV_ESTIMATOR_REGISTRY[name](
            b.token_level_rewards, b.response_mask, b.index
        )
        assert returns is advantages
        assert (advantages[b.response_mask == 0] == 0).all()
        rows = advantages.sum(-1) / b.response_mask.sum(-1).clamp(min=1)
        torch.testing.assert_close(advantages, rows[:, None] * b.response_mask)

    check()


def test_passk_divides_each_lead_by_the_spread_of_its_own_group():
    rewards = torch.tensor([[0.0], [2.0], [10.0], [0.0]])
    index, mask = ["a", "a", "b", "b"], torch.ones(4, 1, dtype=torch.long)
    advantages, _ = adv.compute_grpo_passk_outcome_advantage(rewards, mask, index)
    # leads 2 and 10, spreads √2 and 10/√2
    assert advantages[:, 0].tolist() == pytest.approx([0.0, 2**0.5, 2**0.5, 0.0], rel=1e-5)


def test_remax_subtracts_from_each_row_the_baseline_of_its_own_prompt():
    mask = torch.ones(2, 1, dtype=torch.long)
    advantages, _ = adv.compute_remax_outcome_advantage(torch.ones(2, 1), torch.tensor([0.25, 1.0]), mask)
    assert advantages[:, 0].tolist() == [0.75, 0.0]


def test_gpg_counts_rows_that_did_not_score_zero_negative_ones_too_and_not_their_tokens():
    rewards = torch.tensor([[1.0, 1.0], [-1.0, 0.0], [1.0, -1.0], [0.0, 0.0]])  # scores 2, -1, 0, 0
    advantages, _ = adv.compute_gpg_outcome_advantage(rewards, torch.ones(4, 2), ["a"] * 4)
    assert advantages[:, 0].tolist() == pytest.approx([2 * (s - 0.25) for s in (2, -1, 0, 0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", adv.ADV_ESTIMATOR_REGISTRY)
def test_every_estimator_answers_in_the_dtype_of_the_rewards_and_without_a_graph(name, dtype):
    rewards = REWARDS.to(dtype).requires_grad_()
    both = adv.estimate_advantage(
        name,
        token_level_rewards=rewards,
        response_mask=MASK,
        index=["a", "a", "b", "b"],
        values=torch.zeros(4, 3, dtype=dtype),
        gamma=1.0,
        lam=1.0,
        reward_baselines=torch.zeros(4, dtype=dtype),
        component_scores=torch.stack([SCORES, -SCORES]).to(dtype),
        old_log_probs=-torch.ones(4, 3, dtype=dtype),
        sum_pi_squared=torch.full((4, 3), 0.5, dtype=dtype),
    )
    for tensor in both:
        assert tensor.dtype == dtype and not tensor.requires_grad and tensor.isfinite().all()


def test_gdpo_of_equal_scores_is_zero_in_bfloat16_too():
    scores = torch.full((1, 4), 0.7, dtype=torch.bfloat16)
    advantages, _ = adv.compute_gdpo_outcome_advantage(scores, MASK, ["a", "b", "c", "d"])  # each alone
    assert advantages.abs().max() < 1e-2  # a mean rounded to eight bits, divided by 1e-4, would be 20
