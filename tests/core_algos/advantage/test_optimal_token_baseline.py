import pytest
import torch
from batches import batches
from hypothesis import given, settings

from minirl.core_algos.advantage import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)

OLD = torch.log(torch.tensor([[0.5, 0.25, 0.5], [0.25, 0.25, 0.25]]))
SUM_PI_SQUARED = torch.full((2, 3), 0.5)  # w = 1 - 2π + 0.5: 0.5 where π is 0.5, 1 where it is 0.25
REWARDS = torch.tensor([[0.0, 0.0, 4.0], [0.0, 1.0, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def run(**options):
    return compute_optimal_token_baseline_advantage(
        REWARDS, MASK, options.pop("index", ["a", "a"]), OLD, SUM_PI_SQUARED, **options
    )


def test_the_baseline_weighs_each_path_by_the_noise_it_has_gathered():
    advantages, returns = run()
    assert returns.tolist() == [[4.0, 4.0, 4.0], [1.0, 1.0, 0.0]]
    # W: row 0: 0.5, 1.5, 2; row 1: 1, 2
    first, second = (4 * 0.5 + 1 * 1) / 1.5, (4 * 1.5 + 1 * 2) / 3.5
    assert advantages[0].tolist() == pytest.approx(
        [4 - first, 4 - second, 4.0]
    )  # alone at token 2: no baseline
    assert advantages[1].tolist() == pytest.approx([1 - first, 1 - second, 0.0])


def test_rollout_weights_enter_squared():
    weights = torch.tensor([[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    advantages, _ = run(rollout_is_weights=weights)
    first = (4 * 2.0 + 1 * 1) / 3.0  # row 0's noise times four
    assert advantages[:, 0].tolist() == pytest.approx([4 - first, 1 - first])


def test_a_row_alone_has_no_baseline():
    advantages, returns = run(index=["a", "b"])
    assert torch.equal(advantages, returns * MASK)


def test_rows_of_one_length_all_keep_the_baseline_to_the_end():
    rewards, mask = torch.tensor([[0.0, 4.0], [0.0, 1.0]]), torch.ones(2, 2, dtype=torch.long)
    advantages, _ = compute_optimal_token_baseline_advantage(
        rewards, mask, ["a", "a"], OLD[:, :2], SUM_PI_SQUARED[:, :2]
    )
    last = (4 * 1.5 + 1 * 2) / 3.5
    assert advantages[:, 1].tolist() == pytest.approx([4 - last, 1 - last])


def test_tool_output_between_tokens_makes_no_difference_to_the_multi_turn_form():
    spread = torch.tensor([0, 2, 3])  # where the three tokens stand in rows of width 5

    def widen(x, fill):
        wide = torch.full((2, 5), fill, dtype=x.dtype)
        wide[:, spread] = x
        return wide

    dense, _ = compute_multi_turn_optimal_token_baseline_advantage(
        REWARDS, MASK, ["a", "a"], OLD, SUM_PI_SQUARED
    )
    wide, _ = compute_multi_turn_optimal_token_baseline_advantage(
        widen(REWARDS, 0.0), widen(MASK, 0), ["a", "a"], widen(OLD, -9.0), widen(SUM_PI_SQUARED, 0.9)
    )
    torch.testing.assert_close(wide, widen(dense, 0.0))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches(gaps=False))
def test_without_gaps_both_forms_agree(b):
    call = (b.token_level_rewards, b.response_mask, b.index, b.old_log_probs, b.sum_pi_squared)
    for one, other in zip(
        compute_optimal_token_baseline_advantage(*call),
        compute_multi_turn_optimal_token_baseline_advantage(*call),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_paths_without_noise_have_no_baseline():
    certain = torch.zeros(2, 3)  # log-probs: every token had probability 1, so w = 1 - 2 + 1 = 0
    advantages, returns = compute_optimal_token_baseline_advantage(
        REWARDS, MASK, ["a", "a"], certain, torch.ones(2, 3)
    )
    assert torch.equal(advantages, returns * MASK)
