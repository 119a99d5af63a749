import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minirl.balance import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    rearrange_micro_batches,
    restore_dynamic_batch,
)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=60), st.integers(1, 8))
def test_partitions_hold_every_row_once_and_none_is_empty(lengths, k):
    k = min(k, len(lengths))
    parts = get_seqlen_balanced_partitions(lengths, k, equal_size=False)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert len(parts) == k and all(parts)


@given(st.integers(1, 8), st.integers(1, 16), st.randoms())
def test_equal_size_gives_every_rank_the_same_number_of_rows(k, rows, rng):
    lengths = [rng.randint(1, 2000) for _ in range(k * rows)]
    assert {len(part) for part in get_seqlen_balanced_partitions(lengths, k, equal_size=True)} == {rows}


def test_balanced_spread_is_far_below_the_spread_of_consecutive_rows():
    rng = random.Random(0)
    lengths = sorted(rng.randint(1, 1000) for _ in range(64))
    parts = get_seqlen_balanced_partitions(lengths, 4, equal_size=True)
    stats = log_seqlen_unbalance(lengths, parts, "global_seqlen")
    assert (
        stats["global_seqlen/balanced_max"] - stats["global_seqlen/balanced_min"]
        < 0.01 * stats["global_seqlen/max"]
    )
    assert stats["global_seqlen/minmax_diff"] > 0.5 * stats["global_seqlen/max"]
    assert stats["global_seqlen/mean"] == sum(lengths) / 4


def test_tensor_and_list_give_the_same_partitions():
    lengths = torch.randint(1, 100, (24,))
    assert get_seqlen_balanced_partitions(lengths, 3, True) == get_seqlen_balanced_partitions(
        lengths.tolist(), 3, True
    )


def test_impossible_splits_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match="2 rows cannot fill 3"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(ValueError, match="5 rows do not split into 2"):
        get_seqlen_balanced_partitions([1] * 5, 2, equal_size=True)
    with pytest.raises(ValueError, match="9 tokens, more than 8"):
        rearrange_micro_batches([3, 9], max_token_len=8)


def test_workload_counts_linear_and_attention_cost():
    assert calculate_workload(torch.tensor([1, 2])).tolist() == [24577, 49156]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(500, 3000))
def test_micro_batches_hold_every_row_once_and_results_are_restored(lengths, budget):
    parts = rearrange_micro_batches(lengths, max_token_len=budget)
    assert len(parts) == min(len(lengths), -(-sum(lengths) // budget))
    rows = torch.tensor([row for part in parts for row in part])
    assert torch.equal(restore_dynamic_batch(rows * 10, parts), torch.arange(len(lengths)) * 10)


def test_at_least_the_asked_number_of_micro_batches():
    assert len(rearrange_micro_batches([5, 5, 5], max_token_len=100, min_num_micro_batch=2)) == 2
