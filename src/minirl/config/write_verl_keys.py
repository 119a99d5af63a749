"""Writes verl_keys.txt: every key path of the pinned verl's PPO configuration.

in: verl's generated yaml files (FSDP, Megatron, VeOmni, TorchTitan) -> out: one key path a line.
Run `python -m minirl.config.write_verl_keys` after changing the pin; a test compares.
verl: verl.trainer.config
"""

from pathlib import Path

from omegaconf import OmegaConf

from minirl.config.overrides import key_paths
from minirl.pin import verl_root

# read by verl with .get() or declared in its dataclasses, absent from its yaml: verl wants "+" before them
PLUS_KEYS = (
    "data.gen_batch_size",
    "actor_rollout_ref.rollout.seed",
    "algorithm.filter_groups.enable",
    "algorithm.filter_groups.metric",
    "algorithm.filter_groups.max_num_gen_batches",
    "algorithm.gdpo_reward_keys",
    "algorithm.gdpo_reward_weights",
    "actor_rollout_ref.actor.megatron.override_transformer_config.*",  # handed to Megatron as they are
    "actor_rollout_ref.ref.megatron.override_transformer_config.*",
    "critic.megatron.override_transformer_config.*",
    "reward.reward_kwargs.*",
    "reward.custom_reward_function.reward_kwargs.*",
)
# Hydra's own: the group that chooses the engine, and its run settings
HYDRA_KEYS = ("model_engine", "hydra.*")


def verl_key_paths() -> list[str]:
    """All key paths of the pinned verl, sorted. Raises ValueError when the pin is not installed."""
    folder = verl_root() / "verl" / "trainer" / "config"
    keys = set(PLUS_KEYS) | set(HYDRA_KEYS)
    for path in sorted(folder.glob("_generated_ppo_*trainer.yaml")):
        keys.update(key_paths(OmegaConf.to_container(OmegaConf.load(path), resolve=False)))
    return sorted(key for key in keys if not key.endswith("_target_"))


if __name__ == "__main__":
    Path(__file__).with_name("verl_keys.txt").write_text("\n".join(verl_key_paths()) + "\n")
