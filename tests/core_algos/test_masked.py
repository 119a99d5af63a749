import math

import pytest
import torch
from batches import batches
from hypothesis import given, settings

from minirl.core_algos.masked import (
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    reward_to_go,
    spread_over_tokens,
)

VALUES = torch.tensor([[1.0, 2.0, 9.0], [3.0, 6.0, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 0]])


@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.float()], ids=lambda m: str(m.dtype))
def test_only_selected_values_are_summed_and_averaged(mask):
    assert masked_sum(VALUES, mask) == 12.0
    assert masked_sum(VALUES, mask, axis=-1).tolist() == [3.0, 9.0]
    assert masked_mean(VALUES, mask) == 3.0
    assert masked_mean(VALUES, mask, axis=-1).tolist() == [1.5, 4.5]


@pytest.mark.parametrize("mask", [MASK, MASK.bool()], ids=lambda m: str(m.dtype))
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_whatever_lies_under_a_zero_is_ignored(mask, junk):
    values = VALUES.clone()
    values[:, 2] = junk
    assert masked_mean(values, mask) == 3.0
    assert spread_over_tokens(torch.tensor([1.0, 2.0]), mask).tolist() == [[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]]
    assert reward_to_go(values, mask)[0].tolist() == [3.0, 2.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32], ids=str)
def test_a_row_value_spread_over_tokens_leaves_plain_zeros_and_the_mask_as_it_was(dtype):
    mask = torch.tensor([[1, 0], [0, 1]]).to(dtype)
    before = mask.clone()
    spread = spread_over_tokens(torch.tensor([-2.0, 3.0]), mask)
    assert spread.tolist() == [[-2.0, 0.0], [0.0, 3.0]]
    assert torch.signbit(spread).tolist() == [[True, False], [False, False]]  # no -0.0 to print
    assert torch.equal(mask, before)


def test_a_mask_may_weigh_instead_of_select():
    assert masked_sum(torch.tensor([1.0, 10.0]), torch.tensor([3, 2])) == 23.0
    assert masked_mean(torch.tensor([1.0, 10.0]), torch.tensor([3, 2])) == pytest.approx(4.6)


def test_the_mean_over_nothing_is_zero():
    assert masked_mean(VALUES, torch.zeros_like(MASK)) == 0.0


def test_the_variance_is_unbiased_unless_asked_otherwise():
    # values 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14
    assert masked_var(VALUES, MASK) == pytest.approx(14 / 3)
    assert masked_var(VALUES, MASK, unbiased=False) == pytest.approx(14 / 4)


@pytest.mark.parametrize("selected", [0, 1])
def test_a_variance_of_fewer_than_two_tokens_is_refused(selected):
    mask = torch.zeros(1, 3, dtype=torch.long)
    mask[0, :selected] = 1
    with pytest.raises(ValueError, match="response_mask"):
        masked_var(torch.ones(1, 3), mask)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches())
def test_whitening_gives_mean_zero_and_variance_one_over_the_mask(b):
    whitened = masked_whiten(b.values, b.response_mask)
    assert masked_mean(whitened, b.response_mask) == pytest.approx(0.0, abs=1e-5)
    assert masked_var(whitened, b.response_mask) == pytest.approx(1.0, abs=1e-4)
    shifted = masked_whiten(b.values, b.response_mask, shift_mean=False)
    assert masked_mean(shifted, b.response_mask) == pytest.approx(
        masked_mean(b.values, b.response_mask).item(), abs=1e-5
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(batches())
def test_whitening_rows_weighted_by_length_is_whitening_their_tokens(b):
    scores = b.token_level_rewards.sum(-1)
    rows = masked_whiten(scores, b.response_mask.sum(-1))
    tokens = masked_whiten(scores[:, None].expand_as(b.values), b.response_mask)
    torch.testing.assert_close(rows[:, None].expand_as(tokens), tokens, rtol=1e-4, atol=1e-4)


def test_reward_to_go_sums_what_is_still_to_come():
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    assert reward_to_go(rewards, torch.tensor([[1, 0, 1, 1]])).tolist() == [[13.0, 12.0, 12.0, 8.0]]
