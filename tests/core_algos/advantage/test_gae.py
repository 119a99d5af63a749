import math

import pytest
import torch
from batches import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.core_algos.advantage import compute_gae_advantage_return
from minirl.core_algos.masked import masked_mean, masked_var


def gae_by_definition(rewards, values, mask, gamma, lam):
    """Squeeze the masked tokens out of one row, then a_t = Σ_k (γλ)^k δ_{t+k}; NaN where the mask is 0."""
    kept = [t for t in range(len(mask)) if mask[t]]
    r, v = [rewards[t] for t in kept], [values[t] for t in kept] + [0.0]
    deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(kept))]
    raw = [math.nan] * len(mask)
    for k, t in enumerate(kept):
        raw[t] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(kept)))
    return raw


def test_three_tokens_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    values = torch.tensor([[0.5, 0.6, 0.8, 7.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma=0.9, lam=0.5)
    # δ2 = 1 - 0.8 = 0.2; δ1 = 0.9·0.8 - 0.6 = 0.12; δ0 = 0.9·0.6 - 0.5 = 0.04; γλ = 0.45
    raw = [0.04 + 0.45 * (0.12 + 0.45 * 0.2), 0.12 + 0.45 * 0.2, 0.2]
    assert returns[0, :3].tolist() == pytest.approx(
        [a + v for a, v in zip(raw, [0.5, 0.6, 0.8], strict=True)]
    )
    mean = sum(raw) / 3
    std = (sum((a - mean) ** 2 for a in raw) / 2) ** 0.5
    assert advantages[0, :3].tolist() == pytest.approx([(a - mean) / std for a in raw], rel=1e-4)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_returns_follow_the_definition_across_gaps(b, gamma, lam):
    _, returns = compute_gae_advantage_return(
        b.token_level_rewards, b.values, b.response_mask, gamma=gamma, lam=lam
    )
    for i in range(len(b.index)):
        rows = (x[i].tolist() for x in (b.token_level_rewards, b.values, b.response_mask))
        raw = gae_by_definition(*rows, gamma, lam)
        for t, expected in enumerate(raw):
            if not math.isnan(expected):
                assert returns[i, t].item() == pytest.approx(expected + b.values[i, t].item(), abs=1e-4)


def test_with_gamma_and_lambda_one_the_return_is_the_reward_still_to_come():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[9.0, -3.0, 0.5]])
    _, returns = compute_gae_advantage_return(rewards, values, torch.ones(1, 3), gamma=1.0, lam=1.0)
    assert returns[0].tolist() == pytest.approx([7.0, 6.0, 4.0])


@settings(max_examples=10, deadline=None, derandomize=True)
@given(batches())
def test_advantages_are_whitened_over_all_generated_tokens(b):
    advantages, _ = compute_gae_advantage_return(
        b.token_level_rewards, b.values, b.response_mask, gamma=1.0, lam=0.9
    )
    assert masked_mean(advantages, b.response_mask).item() == pytest.approx(0.0, abs=1e-4)
    assert masked_var(advantages, b.response_mask).item() == pytest.approx(1.0, abs=1e-3)


def test_a_reward_on_a_masked_token_is_lost():
    values, mask = torch.zeros(1, 3), torch.tensor([[1, 0, 1]])
    _, returns = compute_gae_advantage_return(
        torch.tensor([[0.0, 5.0, 1.0]]), values, mask, gamma=1.0, lam=1.0
    )
    assert returns[0, [0, 2]].tolist() == [1.0, 1.0]


def test_under_the_masks_zeros_stand_leftovers_that_no_loss_reads():
    mask = torch.tensor([[1, 1, 0, 0]])
    values = torch.tensor([[0.0, 1.0, -1e4, 0.0]])
    rewards = torch.tensor([[0.0, 2.0, 0.0, 0.0]])
    advantages, _ = compute_gae_advantage_return(rewards, values, mask, gamma=1.0, lam=0.5)
    assert advantages[0, 2] != 0  # as in verl: whitening moves them too, and nothing sets them back to 0
    values[0, 2:] = 7.0
    again, _ = compute_gae_advantage_return(rewards, values, mask, gamma=1.0, lam=0.5)
    assert torch.equal(again[0, :2], advantages[0, :2])


def test_the_values_get_no_gradient():
    values = torch.zeros(1, 3, requires_grad=True)
    advantages, returns = compute_gae_advantage_return(
        torch.ones(1, 3), values, torch.ones(1, 3), gamma=1.0, lam=1.0
    )
    assert not advantages.requires_grad and not returns.requires_grad
