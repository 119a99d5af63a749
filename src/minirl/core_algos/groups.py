"""Statistics over the trajectories of one prompt: the "group" of GRPO, RLOO and their relatives.

index [B] (uid of each row) -> Groups; scores [B] -> mean, std, ... of each row's group.
Simplified against verl: it loops over rows in Python; here a group is an integer, a sum one index_add.
verl: verl.utils.groupwise:group_mean_std (and the id2score dicts inside each verl estimator)
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Groups:
    """Which of the B rows belong together. All statistics come back per row ([B]), ready to be subtracted.

    Sums are made in float64: B numbers cost nothing, and eight scores of 0.7 then have exactly the
    mean 0.7 and the spread 0. In float32 the mean is off by 6e-8, which a division by σ + 1e-6 turns into an
    advantage of 0.056: verl's `grpo` does that.
    """

    def __init__(self, index: Sequence | Tensor, device: torch.device | str = "cpu") -> None:
        """`index`: one hashable label per row (verl's `uid`), in any order.

        Statistics of values with another number of rows raise ValueError.
        """
        labels = index.tolist() if hasattr(index, "tolist") else list(index)
        self.labels = list(dict.fromkeys(labels))
        number = {label: i for i, label in enumerate(self.labels)}
        ids = np.fromiter(map(number.__getitem__, labels), dtype=np.int64, count=len(labels))
        self.ids = torch.from_numpy(ids).to(device)  # [B]
        self.sizes = torch.bincount(self.ids, minlength=len(self.labels))  # [number of groups]

    @property
    def rows_in_group(self) -> Tensor:
        """[B]: number of rows in each row's group."""
        return self.sizes[self.ids]

    def totals(self, values: Tensor) -> Tensor:
        """[B, ..] -> [number of groups, ..]: one sum per group."""
        self._check_rows(values)
        sums = values.new_zeros((len(self.labels), *values.shape[1:]))
        return sums.index_add_(0, self.ids, values)

    def _check_rows(self, values: Tensor) -> None:
        if len(values) != len(self.ids):
            raise ValueError(
                f"index has {len(self.ids)} entries for {len(values)} rows: give every row its prompt's uid"
            )

    def sum(self, values: Tensor) -> Tensor:
        """[B, ..] -> [B, ..]: the sum over each row's group, handed to every row of the group."""
        return self.totals(values)[self.ids]

    def mean(self, scores: Tensor) -> Tensor:
        """[B], float64: μ_g of each row's group."""
        return (self.totals(scores.double()) / self.sizes)[self.ids]

    def baseline(self, scores: Tensor) -> Tensor:
        """[B], float64: μ_g, but 0 for a row that is alone: there is nobody to compare it with."""
        return torch.where(self.rows_in_group > 1, self.mean(scores), 0.0)

    def std(self, scores: Tensor) -> Tensor:
        """[B], float64: σ_g with n-1 in the denominator, 1 for a row that is alone."""
        squares = self.totals((scores.double() - self.mean(scores)) ** 2)
        spread = torch.where(self.sizes > 1, (squares / (self.sizes - 1).clamp(min=1)).sqrt(), 1.0)
        return spread[self.ids]

    def top_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers of the largest and the second largest value of each group, two [number of groups].

        For a group of one the second is the row itself.
        """
        self._check_rows(values)
        by_value = torch.argsort(values, descending=True, stable=True)
        order = by_value[torch.argsort(self.ids[by_value], stable=True)]  # groups in turn, best row first
        first = self.sizes.cumsum(0) - self.sizes
        return order[first], order[first + (self.sizes > 1).long()]
