import pytest
import torch

from minirl.core_algos.pf_ppo import pf_ppo_indices, pf_ppo_weights

SCORES = torch.tensor([-2.0, 0.0, 1.0, 3.0])


@pytest.mark.parametrize(
    ("method", "expected"),
    [("pow", [4.0, 0.0, 1.0, 9.0]), ("max_min", [1.0, 0.0, 0.0, 1.0]), ("max_random", [0.1, 0.1, 0.1, 0.4])],
)
def test_weights_by_hand(method, expected):
    assert pf_ppo_weights(SCORES, reweight_method=method).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_power_is_free():
    assert pf_ppo_weights(SCORES, weight_pow=1.0).tolist() == pytest.approx([2.0, 0.0, 1.0, 3.0], abs=1e-6)


def test_rows_are_drawn_with_replacement_in_proportion_to_their_weight():
    scores = SCORES.repeat(500)[:, None] * torch.tensor(
        [[0.5, 0.5]]
    )  # a row's score is the sum of its tokens
    drawn = pf_ppo_indices(scores, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(drawn % 4, minlength=4) / len(drawn)
    assert len(drawn) == 2000
    assert share.tolist() == pytest.approx([4 / 14, 0.0, 1 / 14, 9 / 14], abs=0.03)


def test_a_batch_without_any_score_can_still_be_drawn_from():
    assert len(pf_ppo_indices(torch.zeros(4, 2))) == 4


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="did you mean 'max_min'"):
        pf_ppo_weights(SCORES, reweight_method="maxmin")


def test_the_score_of_a_row_is_the_sum_of_its_tokens_wherever_they_stand():
    scores = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, -3.0]])  # row 1 sums to 0
    assert pf_ppo_indices(scores).tolist() == [0, 0]


def test_method_and_power_reach_the_weights():
    scores = torch.tensor([0.5, 1.0]).repeat(1000)[:, None]

    def share_of_the_better(**options):
        drawn = pf_ppo_indices(scores, generator=torch.Generator().manual_seed(0), **options) % 2
        return drawn.float().mean().item()

    assert share_of_the_better() == pytest.approx(1 / 1.25, abs=0.03)
    assert share_of_the_better(weight_pow=1.0) == pytest.approx(1 / 1.5, abs=0.03)
    assert share_of_the_better(reweight_method="max_min") == pytest.approx(0.5, abs=0.03)


def test_the_draw_comes_from_the_given_generator():
    scores = torch.rand(50, 1)
    one, other = (pf_ppo_indices(scores, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)
