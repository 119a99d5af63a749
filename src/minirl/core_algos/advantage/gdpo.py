"""GDPO: several rewards (correct? well formed?), each normalised within the group before they are added.

component_scores [K, B], response_mask [B, R], index [B] (uid) -> advantages, returns [B, R] (one tensor).
Simplified against verl: the K columns are passed in; verl digs them out of non_tensor_batch itself and writes
each on the last token, only to sum the row again.
verl: verl.trainer.ppo.core_algos:compute_gdpo_outcome_advantage
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from minirl.core_algos.advantage.grpo import group_relative
from minirl.core_algos.advantage.registry import register_adv_est
from minirl.core_algos.masked import masked_whiten, spread_over_tokens


@register_adv_est("gdpo")
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    component_scores: Tensor,
    response_mask: Tensor,
    index: Sequence | Tensor,
    *,
    gdpo_reward_weights: Sequence[float] | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """A = m·whiten(Σ_k w_k A_k; m), A_k the GRPO advantage of reward k; w_k = 1 unless weights are given.

    Adding raw rewards lets the one with the widest spread drown the others; after GRPO's normalisation each
    has spread 1 within its group. verl never passes `norm_adv_by_std_in_grpo` on to it.
    Raises ValueError when the number of weights is not K.
    Paper: https://arxiv.org/abs/2601.05242. Cost: 4 passes over [B, R]: a row is one number until the
    end, and whitening weighs it by its length.
    verl: verl.trainer.ppo.core_algos:compute_gdpo_outcome_advantage
    """
    weights = [1.0] * len(component_scores) if gdpo_reward_weights is None else list(gdpo_reward_weights)
    if len(weights) != len(component_scores):
        raise ValueError(
            f"algorithm.gdpo_reward_weights has {len(weights)} entries for {len(component_scores)} keys: "
            "give one weight per entry of algorithm.gdpo_reward_keys"
        )
    total = sum(
        weight * group_relative(scores, index, epsilon, norm_adv_by_std_in_grpo)
        for weight, scores in zip(weights, component_scores, strict=True)
    )
    # in bfloat16 a constant would not equal its own mean, and whitening divides the difference by 1e-4
    whitened = masked_whiten(total.float(), response_mask.sum(dim=-1))
    advantages = spread_over_tokens(whitened.to(component_scores.dtype), response_mask)
    return advantages, advantages


def gdpo_component_scores(
    non_tensor_batch: Mapping[str, np.ndarray], gdpo_reward_keys: Sequence[str]
) -> Tensor:
    """[K, B] float32: the columns `algorithm.gdpo_reward_keys` of what compute_score returned.

    Raises ValueError when there are no keys, a key is not a column, or a column does not hold numbers.
    """
    if not gdpo_reward_keys:
        raise ValueError("algorithm.gdpo_reward_keys is empty: list the keys that compute_score returns")
    for key in gdpo_reward_keys:
        if key not in non_tensor_batch:
            raise ValueError(
                f"algorithm.gdpo_reward_keys names '{key}', but compute_score returned no such key "
                f"(there are: {', '.join(sorted(non_tensor_batch))})"
            )
    return torch.stack([_numbers(key, non_tensor_batch[key]) for key in gdpo_reward_keys])


def _numbers(key: str, column: np.ndarray) -> Tensor:
    try:
        return torch.from_numpy(np.asarray(column, dtype=np.float32))
    except (TypeError, ValueError):
        raise ValueError(
            f"algorithm.gdpo_reward_keys names '{key}', whose values are no numbers, such as {column[0]!r}: "
            "name keys for which compute_score returns a number"
        ) from None
