import numpy as np
import pytest
import torch
from batches import batches
from hypothesis import given, settings

from minirl.core_algos.groups import Groups

SCORES = torch.tensor([1.0, 5.0, 0.0, 2.0, 4.0])
INDEX = np.array(["a", "b", "a", "a", "b"], dtype=object)


def test_members_are_found_wherever_they_stand():
    groups = Groups(INDEX)
    assert groups.labels == ["a", "b"]
    assert groups.ids.tolist() == [0, 1, 0, 0, 1]
    assert groups.rows_in_group.tolist() == [3, 2, 3, 3, 2]


def test_mean_and_unbiased_std_of_a_group():
    # a: 1, 0, 2 -> mean 1, squares 0 + 1 + 1 = 2, over n - 1 = 2 -> 1; b: 5, 4 -> mean 4.5, 0.5 / 1
    groups = Groups(INDEX)
    assert groups.mean(SCORES).tolist() == [1.0, 4.5, 1.0, 1.0, 4.5]
    assert groups.std(SCORES).tolist() == pytest.approx([1.0, 0.5**0.5, 1.0, 1.0, 0.5**0.5])


def test_a_row_alone_has_no_baseline_and_spread_one():
    groups = Groups(["a"])
    assert groups.baseline(torch.tensor([3.0])).item() == 0.0
    assert groups.std(torch.tensor([3.0])).item() == 1.0


def test_totals_are_per_group_and_sums_per_row():
    groups = Groups(INDEX)
    assert groups.totals(SCORES).tolist() == [3.0, 9.0]
    assert groups.sum(SCORES).tolist() == [3.0, 9.0, 3.0, 3.0, 9.0]
    assert groups.totals(SCORES[:, None] * torch.ones(5, 2)).shape == (2, 2)


def test_equal_scores_have_exactly_their_value_as_mean_and_no_spread():
    groups = Groups(["a"] * 8)
    scores = torch.full((8,), 0.7)
    assert (groups.baseline(scores) == scores.double()).all()
    assert (groups.std(scores) == 0).all()


def test_the_two_best_rows_of_each_group():
    best, second = Groups(INDEX).top_two(SCORES)
    assert best.tolist() == [3, 1] and second.tolist() == [0, 4]
    best, second = Groups(["a", "b", "b"]).top_two(torch.tensor([1.0, 2.0, 3.0]))
    assert best.tolist() == [0, 2] and second.tolist() == [0, 1]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches())
def test_statistics_equal_a_loop_over_groups(b):
    scores = b.token_level_rewards.sum(-1)
    groups = Groups(b.index)
    for i, uid in enumerate(b.index):
        mates = scores[torch.from_numpy(b.index == uid)].double()
        assert groups.mean(scores)[i] == pytest.approx(mates.mean().item())
        expected = mates.std().item() if len(mates) > 1 else 1.0
        assert groups.std(scores)[i] == pytest.approx(expected, abs=1e-12)


def test_labels_may_be_a_tensor_or_a_list():
    assert Groups(torch.tensor([7, 7, 3])).ids.tolist() == Groups([7, 7, 3]).ids.tolist() == [0, 0, 1]
