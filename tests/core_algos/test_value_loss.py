import pytest
import torch
from batches import assert_same, batches
from hypothesis import given, settings

from minirl.core_algos.value_loss import compute_value_loss

MASK = torch.tensor([[1, 1, 1, 0]])
OLD = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
RETURNS = torch.tensor([[1.0, 1.0, -1.0, 50.0]])


def run(vpreds, **options):
    vpreds = torch.tensor([vpreds], requires_grad=True)
    loss, clipfrac = compute_value_loss(vpreds, RETURNS, OLD, MASK, cliprange_value=0.5, **options)
    (gradient,) = torch.autograd.grad(loss, vpreds)
    return loss.item(), clipfrac.item(), gradient[0].tolist()


def test_the_larger_of_the_clipped_and_the_free_error_counts():
    # token 0: inside the band, (0.2 - 1)² = 0.64
    # token 1: 0.9 is clipped to 0.5, (0.5 - 1)² = 0.25 > 0.01: the step is not rewarded any more
    # token 2: 0.9 is clipped to 0.5, (0.5 + 1)² = 2.25 < 3.61: a step the wrong way is not excused
    loss, clipfrac, gradient = run([0.2, 0.9, 0.9, 7.0])
    assert loss == pytest.approx(0.5 * (0.64 + 0.25 + 3.61) / 3)
    assert clipfrac == pytest.approx(1 / 3)
    assert gradient == pytest.approx([-0.8 / 3, 0.0, 1.9 / 3, 0.0])


def test_micro_batches_add_up_with_the_counts_of_the_mini_batch():
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(batches())
    def check(b):
        vpreds = b.values + b.advantages
        info = dict(batch_num_tokens=int(b.response_mask.sum()), global_batch_size=len(b.index))
        whole, parts = [], []
        for collected, chunks in ((whole, 1), (parts, len(b.index))):
            for rows in torch.arange(len(b.index)).chunk(chunks):
                tensors = (x[rows] for x in (vpreds, b.returns, b.values, b.response_mask))
                collected.append(compute_value_loss(*tensors, cliprange_value=0.5, **info)[0])
        assert_same(sum(parts), sum(whole))

    check()


def test_a_clip_range_wider_than_the_step_is_the_plain_squared_error():
    loss, clipfrac, _ = run([0.1, 0.2, 0.3, 0.0], loss_agg_mode="token-sum")
    assert loss == pytest.approx(0.5 * (0.81 + 0.64 + 1.69))
    assert clipfrac == 0.0


def test_the_band_lies_around_the_values_of_the_rollout_and_has_two_edges():
    # band 2 ± 0.5: 1 is clipped to 1.5, 4 to 2.5; returns 0 and 3
    vpreds, returns = torch.tensor([[1.0, 4.0]]), torch.tensor([[0.0, 3.0]])
    values = torch.full((1, 2), 2.0)
    loss, clipfrac = compute_value_loss(vpreds, returns, values, torch.ones(1, 2), cliprange_value=0.5)
    # 1.5² > 1²: the edge counts; (4 - 3)² > (2.5 - 3)²: the free error counts
    assert loss.item() == pytest.approx(0.5 * (2.25 + 1.0) / 2)
    assert clipfrac.item() == 0.5


def test_the_clip_fraction_counts_only_tokens_whose_clipped_error_is_the_larger():
    vpreds, zeros = torch.tensor([[2.0, 2.0, 2.0]]), torch.zeros(1, 3)
    returns = torch.tensor([[2.0, -1.0, -1.0]])  # towards the return once, away from it twice
    _, clipfrac = compute_value_loss(vpreds, returns, zeros, torch.ones(1, 3), cliprange_value=0.5)
    assert clipfrac.item() == pytest.approx(1 / 3)
