"""Partitions and micro-batches equal verl's, ties included."""

import random

import pytest
import torch
from tensordict import TensorDict

from minirl.balance import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
from minirl.pin import use_verl

use_verl()
from verl.utils import seqlen_balancing as theirs  # noqa: E402

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("seed", range(30))
def test_partitions_are_verls_on_random_lengths(seed):
    rng = random.Random(seed)
    k = rng.randint(1, 8)
    high = rng.choice([3, 50, 4000])  # 3 makes many ties
    lengths = [rng.randint(1, high) for _ in range(k * rng.randint(1, 30))]
    for equal_size in (True, False):
        mine = get_seqlen_balanced_partitions(lengths, k, equal_size)
        assert mine == theirs.get_seqlen_balanced_partitions(lengths, k, equal_size)
        assert log_seqlen_unbalance(lengths, mine, "p") == theirs.log_seqlen_unbalance(lengths, mine, "p")


def test_workload_is_verls():
    lengths = torch.arange(1, 4000, 7)
    assert torch.equal(calculate_workload(lengths), theirs.calculate_workload(lengths))


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_are_verls_and_results_go_back_to_their_rows(seed):
    rng = random.Random(seed)
    rows, width = rng.randint(1, 40), 64
    lengths = [rng.randint(1, width) for _ in range(rows)]
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    batch = TensorDict({"input_ids": torch.zeros_like(mask), "attention_mask": mask}, batch_size=[rows])
    budget = rng.randint(width, 10 * width)
    floor = rng.choice([None, min(rows, 3)])
    _, expected = theirs.rearrange_micro_batches(batch, budget, min_num_micro_batch=floor)
    mine = rearrange_micro_batches(lengths, max_token_len=budget, min_num_micro_batch=floor or 1)
    assert mine == expected
    shuffled = torch.randn(rows, 3)
    assert torch.equal(restore_dynamic_batch(shuffled, mine), theirs.restore_dynamic_batch(shuffled, mine))
