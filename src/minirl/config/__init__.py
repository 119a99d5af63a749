"""Configuration with verl's key paths: Hydra composes ppo_trainer.yaml, dataclasses give the types.

in: command-line overrides ("a.b=c") -> out: a DictConfig, checked before anything is loaded.
simplified: one yaml; verl composes about thirty (actor, critic, engine, ...), switched by groups.
verl: verl.trainer.main_ppo:main
"""

from minirl.config.algorithms import apply_bypass_mode
from minirl.config.compose import compose
from minirl.config.overrides import Overrides, sort_overrides
from minirl.config.validate import need_critic, need_reference_policy, validate

__all__ = [
    "Overrides",
    "apply_bypass_mode",
    "compose",
    "need_critic",
    "need_reference_policy",
    "sort_overrides",
    "validate",
]
