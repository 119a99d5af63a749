"""Splits sequences into parts of similar work: rows to ranks, and rows to micro-batches.

in: a length (or cost) per row -> out: lists of row numbers.
simplified: one process decides for all ranks; no grouping by prefix.
verl: verl.utils.seqlen_balancing
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(order=True)
class _Part:
    """Rows given to one rank, ordered by total cost, then by count, then by the rows themselves."""

    total: int = 0
    count: int = 0
    items: list[tuple[int, int]] = field(default_factory=list)  # (row, cost)

    def join(self, other: "_Part") -> "_Part":
        return _Part(self.total + other.total, self.count + other.count, self.items + other.items)


class _State:
    """k parts, the most loaded first. A heap of states yields the one with the widest spread first."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = sorted(parts, reverse=True)
        self.spread = self.parts[0].total - self.parts[-1].total

    def __lt__(self, other: "_State") -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.parts[0] > other.parts[0]

    def join(self, other: "_State") -> "_State":
        """My most loaded part takes the other's least loaded one, and so on: the spreads cancel."""
        return _State(
            [mine.join(theirs) for mine, theirs in zip(self.parts, reversed(other.parts), strict=True)]
        )


def calculate_workload(seqlen_list: Tensor) -> Tensor:
    """A transformer's cost of each length, up to a factor: 12·h²·s + 2·h·s² at h = 4096, divided by 2h.

    verl: verl.utils.seqlen_balancing:calculate_workload
    """
    return 24576 * seqlen_list + seqlen_list**2


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int] | Tensor, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """k lists of row numbers with nearly equal sums: Karmarkar and Karp's largest differencing method.

    equal_size: the same number of rows in each list.
    Raises ValueError for fewer rows than lists, or for a number of rows that k does not divide.
    verl: verl.utils.seqlen_balancing:get_seqlen_balanced_partitions
    """
    costs = seqlen_list.tolist() if isinstance(seqlen_list, Tensor) else list(seqlen_list)
    if len(costs) < k_partitions:
        raise ValueError(f"{len(costs)} rows cannot fill {k_partitions} partitions: use at most {len(costs)}")
    if equal_size and len(costs) % k_partitions:
        raise ValueError(f"{len(costs)} rows do not split into {k_partitions} equal partitions")
    single = [_Part(cost, 1, [(row, cost)]) for cost, row in sorted((c, row) for row, c in enumerate(costs))]
    if (
        equal_size
    ):  # k neighbours in the sorted order start as one state, so every join adds one row to each part
        heap = [_State(single[i : i + k_partitions]) for i in range(0, len(single), k_partitions)]
    else:
        heap = [_State([part] + [_Part() for _ in range(k_partitions - 1)]) for part in single]
    heapq.heapify(heap)
    while len(heap) > 1:
        widest, next_widest = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, widest.join(next_widest))
    partitions = [sorted(row for row, _ in part.items) for part in heap[0].parts]
    assert all(partitions), "a partition is empty"
    return partitions


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: list[list[int]], prefix: str
) -> dict[str, float]:
    """Token sums per rank in the order the rows came, and as balanced.

    verl: verl.utils.seqlen_balancing:log_seqlen_unbalance
    """
    size = len(seqlen_list) // len(partitions)
    before = [sum(seqlen_list[i : i + size]) for i in range(0, len(seqlen_list), size)]
    after = [sum(seqlen_list[row] for row in part) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(before) / len(partitions),
    }


def rearrange_micro_batches(
    seqlen_list: Sequence[int], *, max_token_len: int, min_num_micro_batch: int = 1
) -> list[list[int]]:
    """Row numbers of each micro-batch: about max_token_len tokens, similar work, small ones at both ends.

    The number of micro-batches is the total over max_token_len, rounded up; rows are spread by work, so that
    a micro-batch can come out slightly above max_token_len, as in verl.
    Raises ValueError when one sequence alone is longer than max_token_len.
    verl: verl.utils.seqlen_balancing:rearrange_micro_batches
    """
    lengths = torch.as_tensor(seqlen_list, dtype=torch.int64)
    longest = int(lengths.max())
    if longest > max_token_len:
        raise ValueError(
            f"a sequence has {longest} tokens, more than {max_token_len} (*_max_token_len_per_gpu): raise it"
        )
    count = min(len(lengths), -(-int(lengths.sum()) // max_token_len))
    count = max(count, min_num_micro_batch)
    workload = calculate_workload(lengths).tolist()
    parts = get_seqlen_balanced_partitions(workload, count, equal_size=False)
    parts.sort(key=lambda part: (sum(workload[row] for row in part), part[0]), reverse=True)
    return parts[::2][::-1] + parts[1::2]


def restore_dynamic_batch(data: Tensor, batch_idx_list: list[list[int]]) -> Tensor:
    """Undo `rearrange_micro_batches` on its concatenated results [B, ...].

    verl: verl.utils.seqlen_balancing:restore_dynamic_batch
    """
    order = torch.tensor([row for part in batch_idx_list for row in part])
    assert len(order) == len(data), (len(order), len(data))
    return data[torch.argsort(order)]
