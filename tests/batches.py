"""Ragged batches for tests, made by hypothesis: the cases that break reinforcement-learning code.

Groups of one, empty responses, groups whose scores are all equal, gaps in the mask (tool output), importance
ratios far above and far below any clip range, rows of a group not next to each other. Numbers come from a
seed, so a failing example is small and can be repeated. Of several choices the hard one comes first, as
hypothesis takes the first most often. `check_on_batches` fails when a case never came up.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LOG_RATIO_SCALE = {"extreme": 40.0, "none": 0.0, "small": 0.05, "large": 0.7}
CASES = frozenset(
    ["group of one", "all-equal group", "empty response", "gap in the mask", "huge ratio", "tiny ratio"]
)
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1.2e-2}  # eight bits, three roundings

compared: Counter[bool] = Counter()  # comparisons, by whether there was anything in them but zeros


@dataclass(frozen=True)
class Batch:
    """B rows of padded width R, as the trainer holds them before the advantage and the update."""

    index: np.ndarray  # object [B], uid
    response_mask: Tensor  # int64 [B, R]
    token_level_rewards: Tensor
    values: Tensor
    returns: Tensor
    log_prob: Tensor
    old_log_probs: Tensor
    ref_log_prob: Tensor
    rollout_log_probs: Tensor
    sum_pi_squared: Tensor
    rollout_is_weights: Tensor
    advantages: Tensor
    reward_baselines: Tensor  # [B]
    component_scores: Tensor  # [2, B]

    def to(self, dtype: torch.dtype) -> "Batch":
        """Every float tensor in another dtype."""
        tensors = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("index", "response_mask")
        }
        return replace(self, **{name: tensor.to(dtype) for name, tensor in tensors.items()})

    def cases(self) -> set[str]:
        """Which of `CASES` are in this batch. A ratio counts when every pair of policies has such a token."""
        found = set()
        scores = self.token_level_rewards.sum(dim=-1)
        for uid in set(self.index):
            group = scores[torch.from_numpy(self.index == uid)]
            found |= {"group of one"} if len(group) == 1 else set()
            found |= {"all-equal group"} if len(group) > 1 and (group == group[0]).all() else set()
        found |= {"empty response"} if (self.response_mask == 0).all(dim=-1).any() else set()
        found |= {"gap in the mask"} if has_gaps(self.response_mask) else set()
        old = self.old_log_probs
        pairs = (self.log_prob - old, old - self.rollout_log_probs, self.log_prob - self.ref_log_prob)
        tokens = [log_ratio[self.response_mask.bool()] for log_ratio in pairs]
        found |= {"huge ratio"} if all(log_ratio.max() > 15 for log_ratio in tokens) else set()
        found |= {"tiny ratio"} if all(log_ratio.min() < -15 for log_ratio in tokens) else set()
        return found


@st.composite
def batches(
    draw,
    *,
    min_group: int = 1,
    gaps: bool = True,
    empty_rows: bool = True,
    ratios: tuple[str, ...] = tuple(LOG_RATIO_SCALE),
    log_ratio_bound: float | None = None,
) -> Batch:
    """A `Batch`; the first row is as long as R, so that there are at least two tokens to average over.

    `log_ratio_bound` holds log π_θ / π_old within ± that bound, for losses that exponentiate it as it is.
    """
    sizes = draw(st.lists(st.integers(min_group, 5), min_size=1, max_size=4), label="group sizes")
    rows, width = sum(sizes), draw(st.integers(2, 9), label="R")
    shortest = 0 if empty_rows else 1
    lengths = draw(st.lists(st.integers(shortest, width), min_size=rows, max_size=rows), label="lengths")
    lengths[0] = width
    scale = LOG_RATIO_SCALE[draw(st.sampled_from(ratios), label="ratios")]
    rewarded = draw(st.sampled_from(["equally", "last token", "every token"]), label="rewards")
    holes = gaps and draw(st.sampled_from([True, False]), label="gaps in the mask")
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1), label="seed"))

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=rng)

    def eighths(*shape: int) -> Tensor:  # multiples of 1/8 add up without rounding
        return torch.randint(-16, 17, shape, generator=rng).float() / 8

    order = torch.randperm(rows, generator=rng)
    uid = np.array([f"uid-{g}" for g, n in enumerate(sizes) for _ in range(n)], dtype=object)[order.numpy()]
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    last = torch.tensor(lengths).clamp(min=1) - 1
    if holes:
        mask = mask * (torch.rand(rows, width, generator=rng) < 0.7)
        mask[0, [0, -1]] = 1
        if not empty_rows:
            mask[torch.arange(rows), last] = 1

    scores, component_scores = eighths(rows), eighths(2, rows)
    if rewarded == "equally":
        one_group = torch.from_numpy(uid == uid[0])
        scores[one_group] = 0.625
        component_scores[:, one_group] = 0.625
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), last] = scores
    if rewarded == "every token":
        rewards = rewards + eighths(rows, width)

    common = -normal().abs() - 0.01

    def policy() -> Tensor:
        return (common + scale * normal()).clamp(-80.0, -1e-3)  # exp(80) is still finite

    old, log_prob = policy(), policy()
    if log_ratio_bound is not None:
        log_prob = log_prob.clamp(old - log_ratio_bound, old + log_ratio_bound)
    return Batch(
        index=uid,
        response_mask=mask.long(),
        token_level_rewards=rewards,
        values=normal(),
        returns=normal(),
        log_prob=log_prob,
        old_log_probs=old,
        ref_log_prob=policy(),
        rollout_log_probs=policy(),
        sum_pi_squared=torch.rand(rows, width, generator=rng),
        rollout_is_weights=2 * torch.rand(rows, width, generator=rng),
        advantages=normal(),
        reward_baselines=eighths(rows),
        component_scores=component_scores,
    )


def check_on_batches(
    check: Callable[..., None],
    drawn: st.SearchStrategy[Batch],
    *options: st.SearchStrategy,
    without: Collection[str] = (),
) -> None:
    """`check(batch, *options)` on hypothesis-made examples; all of `CASES` but `without` must come up.

    Fails as well when most of what `check` compared was zeros with zeros.
    """
    seen = set()
    compared.clear()

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(drawn, st.tuples(*options))
    def run(b: Batch, chosen: tuple) -> None:
        seen.update(b.cases())
        check(b, *chosen)

    run()
    assert seen == CASES.difference(without), f"asked for all but {sorted(without)}, got {sorted(seen)}"
    assert compared[True] > compared[False], f"compared zeros {compared[False]} times of {compared.total()}"


def has_gaps(mask: Tensor) -> bool:
    """Whether some row has a 0 before a 1."""
    return bool((mask[:, 1:] > mask[:, :-1]).any()) or bool((mask[:, 0] < mask.amax(dim=1)).any())


def assert_same(ours: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32, terms: float = 0.0) -> None:
    """Every element within `TOLERANCE` of its own size, or of the largest where that is below 1.

    A scalar counts as at least 1, for the terms of its sum may have cancelled; `terms` says how large they
    were elsewhere. NaN and inf equal nothing: a test that expects them says so itself.
    """
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    assert theirs.isfinite().all(), "nothing to compare with: the other side is not finite"
    largest = theirs.detach().abs().max().item() if theirs.numel() and theirs.dim() else 1.0
    tolerance = TOLERANCE[dtype]
    absolute = tolerance * max(min(largest, 1.0), terms)
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=absolute)
    compared[bool(theirs.any())] += 1


def assert_same_metrics(
    ours: dict[str, float],
    theirs: dict[str, float],
    dtype: torch.dtype = torch.float32,
    leave_out: Collection[str] = (),
) -> None:
    """The same names, but for `leave_out`, and values within `TOLERANCE`."""
    assert ours.keys() == theirs.keys()
    for name in theirs.keys() - set(leave_out):
        mine, their, tolerance = ours[name], theirs[name], TOLERANCE[dtype]
        if name.endswith("_std"):  # the root of a difference of two means: compared before the root
            mine, their, tolerance = mine**2, their**2, 10 * tolerance
        assert mine == pytest.approx(their, rel=tolerance, abs=tolerance), name
    compared[any(theirs.values())] += 1
