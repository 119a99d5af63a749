import numpy as np
import pytest
import torch
from batches import batches
from hypothesis import given, settings

from minirl.core_algos.advantage import ADV_ESTIMATOR_REGISTRY, compute_grpo_outcome_advantage

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]])


def run(scores, index, mask=MASK, **options):
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = torch.tensor(scores)
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, index, **options)
    assert returns is advantages
    return advantages


def test_two_groups_by_hand_wherever_the_rows_stand():
    # a: rows 0 and 2, scores 1 and 0: mean 0.5, std 0.7071; b: rows 1 and 3, scores 3 and 5: std 1.4142
    advantages = run([1.0, 3.0, 0.0, 5.0], ["a", "b", "a", "b"])
    half = 0.5**0.5
    assert advantages.tolist() == [
        pytest.approx([half, half, 0.0], abs=1e-5),
        pytest.approx([-half, 0.0, 0.0], abs=1e-5),
        pytest.approx([-half] * 3, abs=1e-5),
        pytest.approx([half] * 3, abs=1e-5),
    ]


def test_without_the_std_it_is_the_distance_to_the_mean():
    advantages = run([1.0, 3.0, 0.0, 5.0], ["a", "b", "a", "b"], norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0.5, -1.0, -0.5, 1.0]


def test_epsilon_is_added_to_the_std():
    advantages = run([1.0, 0.0, 1.0, 0.0], ["a", "a", "b", "b"], epsilon=0.2929)
    assert advantages[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5], abs=1e-4)


def test_a_row_alone_keeps_its_raw_score():
    assert run([0.7, 1.0, 0.0, 0.0], ["a", "b", "b", "b"])[0].tolist() == pytest.approx(
        [0.7, 0.7, 0.0], rel=1e-5
    )  # / (1 + 1e-6)


def test_a_group_of_equal_scores_teaches_nothing():
    assert (run([0.7] * 4, ["a"] * 4) == 0).all()


def test_the_score_sums_the_whole_row_masked_tokens_included():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.tensor([[1, 1, 0], [1, 1, 1]]), ["a", "a"])
    assert advantages[0, 0] > 0.7


def test_grpo_vectorized_is_the_same_function():
    assert ADV_ESTIMATOR_REGISTRY["grpo_vectorized"] is ADV_ESTIMATOR_REGISTRY["grpo"]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches(min_group=2, empty_rows=False, gaps=False))
def test_advantages_sum_to_zero_in_each_group(b):
    rows = compute_grpo_outcome_advantage(b.token_level_rewards, b.response_mask, b.index)[0][:, 0]
    for uid in set(b.index):
        assert rows[torch.from_numpy(b.index == uid)].sum().item() == pytest.approx(0.0, abs=1e-5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches())
def test_the_order_of_the_rows_does_not_matter(b):
    order = np.random.default_rng(0).permutation(len(b.index))
    straight, _ = compute_grpo_outcome_advantage(b.token_level_rewards, b.response_mask, b.index)
    shuffled, _ = compute_grpo_outcome_advantage(
        b.token_level_rewards[order], b.response_mask[order], b.index[order]
    )
    torch.testing.assert_close(shuffled, straight[order])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches(min_group=2))
def test_adding_a_constant_to_every_score_changes_nothing(b):
    shift = torch.zeros_like(b.token_level_rewards)
    shift[:, 0] = 4.0
    plain, _ = compute_grpo_outcome_advantage(b.token_level_rewards, b.response_mask, b.index)
    moved, _ = compute_grpo_outcome_advantage(b.token_level_rewards + shift, b.response_mask, b.index)
    torch.testing.assert_close(moved, plain, rtol=1e-4, atol=1e-5)
