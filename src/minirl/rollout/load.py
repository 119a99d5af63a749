"""Which rollout a configuration names.

verl: verl.workers.rollout.replica:RolloutReplicaRegistry
"""

from __future__ import annotations

from omegaconf import DictConfig
from torch import nn
from transformers import PreTrainedTokenizerBase

from minirl.rollout.base import Rollout
from minirl.rollout.server import RolloutServer


def load_rollout(
    config: DictConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    service: DictConfig | None = None,
) -> Rollout:
    """The rollout of `actor_rollout_ref.rollout.{name,mode}`, holding a copy of the actor's weights.

    Args:
        config: `actor_rollout_ref.rollout`.
        service: `minirl.rollout`; needed unless the builtin rollout runs in mode sync.

    Raises:
        ValueError: an unknown backend.
    """
    if config.name == "builtin" and config.mode == "sync":
        from minirl.rollout.builtin import BuiltinRollout

        return BuiltinRollout(config, model, tokenizer)
    from minirl.rollout.agent_loop_manager import AgentLoopManager

    assert service is not None, "a rollout service needs the section minirl.rollout"
    servers = [load_server(config, model, tokenizer) for _ in range(service.num_replicas)]
    return AgentLoopManager(config, servers, tokenizer, service)


def load_server(config: DictConfig, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> RolloutServer:
    """One replica of `actor_rollout_ref.rollout.name`.

    Raises:
        ValueError: an unknown backend.
    """
    if config.name == "builtin":
        from minirl.rollout.builtin_server import BuiltinServer

        return BuiltinServer(config, model, tokenizer)
    if config.name == "vllm":
        from minirl.rollout.vllm import VLLMServer

        # vLLM loads the checkpoint itself; the first sync brings the actor's weights
        return VLLMServer(config, model.name_or_path, tokenizer.eos_token_id)
    raise ValueError(f"actor_rollout_ref.rollout.name={config.name!r}: use builtin or vllm")
