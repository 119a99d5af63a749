import pytest
import torch
from batches import assert_same, batches
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.core_algos.agg_loss import LOSS_AGG_MODES, agg_loss

LOSSES = torch.tensor([[1.0, 2.0, 3.0], [6.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12 / 4),
        ("token-sum", 12.0),
        ("seq-mean-token-sum", (6 + 6) / 2),  # the empty row does not count
        ("seq-mean-token-sum-norm", (6 + 6) / 2 / 3),  # divided by the padded width
        ("seq-mean-token-mean", (2 + 6) / 2),
    ],
)
def test_each_mode_by_hand(mode, expected):
    assert agg_loss(LOSSES, MASK, mode).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 2 * 12 / 10),
        ("token-sum", 2 * 12),
        ("seq-mean-token-sum", 2 * 12 / 5),
        ("seq-mean-token-sum-norm", 2 * 12 / 5 / 8),
        ("seq-mean-token-mean", 2 * 8 / 5),
    ],
)
def test_each_mode_with_the_counts_of_the_mini_batch(mode, expected):
    info = dict(dp_size=2, batch_num_tokens=10, global_batch_size=5, loss_scale_factor=8)
    assert agg_loss(LOSSES, MASK, mode, **info).item() == pytest.approx(expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches(), st.sampled_from(LOSS_AGG_MODES), st.integers(0, 20))
def test_micro_batches_add_up_to_the_mini_batch_however_it_is_split(b, mode, cut):
    cut = min(cut, len(b.index))
    info = dict(batch_num_tokens=int(b.response_mask.sum()), global_batch_size=len(b.index))
    whole = agg_loss(b.values, b.response_mask, mode, **info)
    halves = [slice(0, cut), slice(cut, None)]
    parts = sum(agg_loss(b.values[rows], b.response_mask[rows], mode, **info) for rows in halves)
    assert_same(parts, whole)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches(), st.sampled_from([m for m in LOSS_AGG_MODES if m != "seq-mean-token-sum-norm"]))
def test_padding_length_does_not_change_the_loss(b, mode):
    pad = (0, 3)
    padded = agg_loss(
        torch.nn.functional.pad(b.values, pad, value=float("nan")),
        torch.nn.functional.pad(b.response_mask, pad),
        mode,
    )
    assert_same(padded, agg_loss(b.values, b.response_mask, mode))


def test_a_long_row_weighs_more_under_token_mean_and_the_same_under_seq_mean():
    losses = torch.zeros(2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    (by_token,) = torch.autograd.grad(agg_loss(losses, mask, "token-mean"), losses)
    (by_row,) = torch.autograd.grad(agg_loss(losses, mask, "seq-mean-token-mean"), losses)
    assert by_token.sum(-1).tolist() == pytest.approx([0.8, 0.2])
    assert by_row.sum(-1).tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("info", [{}, dict(batch_num_tokens=0, global_batch_size=3)])
def test_a_batch_without_a_token_has_loss_zero(mode, info):
    assert agg_loss(LOSSES, torch.zeros_like(MASK), mode, **info) == 0.0


def test_a_row_that_was_rejected_still_counts_among_the_mini_batchs_rows_but_not_its_tokens():
    rejected = torch.tensor([[1, 1, 1], [0, 0, 0]])
    ones = torch.ones(2, 3)
    assert agg_loss(ones, rejected, "seq-mean-token-mean", global_batch_size=2) == 0.5
    assert agg_loss(ones, rejected, "seq-mean-token-mean") == 1.0  # alone, only non-empty rows are counted
    assert agg_loss(ones, rejected, "token-mean", batch_num_tokens=3) == 1.0


def test_the_global_counts_are_demanded_on_several_ranks():
    with pytest.raises(ValueError, match="batch_num_tokens"):
        agg_loss(LOSSES, MASK, "token-mean", dp_size=2)
    with pytest.raises(ValueError, match="global_batch_size"):
        agg_loss(LOSSES, MASK, "seq-mean-token-mean", dp_size=2)


def test_an_unknown_mode_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'token-mean'"):
        agg_loss(LOSSES, MASK, "token_mean")


def test_the_norm_divides_by_the_padded_width_not_by_the_rows():
    ones = torch.ones(2, 4)
    assert agg_loss(ones, ones.long(), "seq-mean-token-sum-norm") == 4 / 4
