"""Which rollout a configuration names.

verl: verl.workers.rollout.replica:RolloutReplicaRegistry
"""

from __future__ import annotations

from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedTokenizerBase

from minirl.rollout.base import Rollout


def load_rollout(config: DictConfig, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """The backend of `actor_rollout_ref.rollout.name`, holding a copy of the actor's weights.

    Raises:
        ValueError: an unknown backend.
    """
    if config.name == "builtin":
        from minirl.rollout.builtin import BuiltinRollout

        return BuiltinRollout(config, model, tokenizer)
    raise ValueError(
        f"actor_rollout_ref.rollout.name={config.name!r}: minirl has one backend so far, builtin"
    )
