"""Ragged batches for tests, made by hypothesis: the cases that break reinforcement-learning code.

Groups of one, empty responses, groups whose scores are all equal, gaps in the mask (tool output), importance
ratios far outside any clip range, rows of a group not next to each other. Numbers come from a seed, so a
failing example is small and can be repeated.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

LOG_RATIO_SCALE = {"none": 0.0, "small": 0.05, "large": 0.7, "extreme": 40.0}


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


@st.composite
def batches(
    draw,
    *,
    min_group: int = 1,
    gaps: bool = True,
    empty_rows: bool = True,
    ratios: tuple[str, ...] = tuple(LOG_RATIO_SCALE),
) -> Batch:
    """A `Batch`; the first row is always full, so that there are tokens to average over."""
    sizes = draw(st.lists(st.integers(min_group, 5), min_size=1, max_size=4), label="group sizes")
    rows, width = sum(sizes), draw(st.integers(2, 9), label="R")
    shortest = 0 if empty_rows else 1
    lengths = draw(st.lists(st.integers(shortest, width), min_size=rows, max_size=rows), label="lengths")
    lengths[0] = width
    scale = LOG_RATIO_SCALE[draw(st.sampled_from(ratios), label="ratios")]
    equal_scores = draw(st.booleans(), label="a group of equal scores")
    dense = draw(st.booleans(), label="rewards on every token")
    holes = gaps and draw(st.booleans(), label="gaps in the mask")
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1), label="seed"))

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=rng)

    def eighths(*shape: int) -> Tensor:  # multiples of 1/8 add up without rounding
        return torch.randint(-16, 17, shape, generator=rng).float() / 8

    order = torch.randperm(rows, generator=rng)
    uid = np.array([f"uid-{g}" for g, n in enumerate(sizes) for _ in range(n)], dtype=object)[order.numpy()]
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    if holes:
        mask = mask * (torch.rand(rows, width, generator=rng) < 0.7)
        mask[0] = 1

    scores = eighths(rows)
    if equal_scores:
        scores[torch.from_numpy(uid == uid[0])] = 0.625
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), torch.tensor(lengths).clamp(min=1) - 1] = scores
    if dense:
        rewards = rewards + eighths(rows, width)

    old = -normal().abs() - 0.01
    log_prob = (old + scale * normal()).clamp(max=-1e-3)
    return Batch(
        index=uid,
        response_mask=mask.long(),
        token_level_rewards=rewards,
        values=normal(),
        returns=normal(),
        log_prob=log_prob,
        old_log_probs=old,
        ref_log_prob=(old + scale * normal()).clamp(max=-1e-3),
        rollout_log_probs=(old + scale * normal()).clamp(max=-1e-3),
        sum_pi_squared=torch.rand(rows, width, generator=rng),
        rollout_is_weights=2 * torch.rand(rows, width, generator=rng),
        advantages=normal(),
        reward_baselines=eighths(rows),
        component_scores=eighths(2, rows),
    )


def has_gaps(mask: Tensor) -> bool:
    """Whether some row has a 0 before a 1."""
    return bool((mask[:, 1:] > mask[:, :-1]).any()) or bool((mask[:, 0] < mask.amax(dim=1)).any())


def assert_same(ours: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal within 1e-6 of the largest value (2e-2 in bfloat16, which has eight bits)."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    scale = max(1.0, theirs.detach().abs().max().item()) if theirs.numel() else 1.0
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance * scale)
