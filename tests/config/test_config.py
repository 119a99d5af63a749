import dataclasses
import typing
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import minirl.config
from minirl.config import compose, sort_overrides
from minirl.config.compose import defaults
from minirl.config.overrides import consumer, key_paths, minirl_keys, verl_keys
from minirl.config.schema import Config
from minirl.config.write_verl_keys import PLUS_KEYS, verl_key_paths
from minirl.pin import PIN, verl_root

# key -> why minirl's default is not verl's. The test below fails on a difference that is not listed, and on
# a listed one that is not there.
DIFFERENT_DEFAULT = {
    "data.train_files": "the task ships with the project",
    "data.val_files": "the task ships with the project",
    "data.max_prompt_length": "the tiny task's questions are short",
    "data.max_response_length": "the tiny task's answers are short",
    "data.train_batch_size": "a step takes about a second on one thread",
    "data.seed": "one seed for the whole run",
    "data.dataloader_num_workers": "worker processes cost more than they save on tiny rows",
    "actor_rollout_ref.model.path": "a warm-started model that ships with the project",
    "actor_rollout_ref.actor.strategy": "whole copies are the simplest, and the tiny model fits",
    "actor_rollout_ref.ref.strategy": "follows the actor's, which differs",
    "actor_rollout_ref.actor.fsdp_config.dtype": "exact arithmetic, which a CPU does as fast",
    "actor_rollout_ref.ref.fsdp_config.dtype": "as above",
    "critic.strategy": "as for the actor",
    "critic.fsdp.dtype": "as above",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "a quarter of the batch, as in verl's 256 of 1024",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "verl leaves it for the user to set",
    "actor_rollout_ref.actor.optim.lr": "a tiny model takes larger steps",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "verl leaves it for the user to set",
    "actor_rollout_ref.rollout.name": "verl leaves it for the user to set",
    "actor_rollout_ref.rollout.mode": "the lockstep decoder needs no service",
    "actor_rollout_ref.rollout.agent.num_workers": "one event loop, and rows need not divide",
    "actor_rollout_ref.rollout.n": "group-based estimators need siblings",
    "actor_rollout_ref.rollout.prompt_length": "follows data.max_prompt_length, which differs",
    "actor_rollout_ref.rollout.response_length": "follows data.max_response_length, which differs",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "verl leaves it for the user to set",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "one device",
    "critic.model.path": "a warm-started model that ships with the project",
    "critic.ppo_mini_batch_size": "follows the actor's, which differs",
    "critic.ppo_micro_batch_size_per_gpu": "verl leaves it for the user to set",
    "critic.forward_micro_batch_size_per_gpu": "follows ppo_micro_batch_size_per_gpu, which differs",
    "critic.optim.lr": "a tiny model takes larger steps",
    "trainer.total_epochs": "one pass over the tiny task is enough",
    "trainer.project_name": "names this project",
    "trainer.experiment_name": "names this task",
    "trainer.default_local_dir": "contains project and experiment name",
    "trainer.logger": "wandb needs an account",
    "trainer.n_gpus_per_node": "one rank",
    "trainer.device": "no accelerator assumed",
}
OWN_SECTION = "minirl"
LATER = {"actor_rollout_ref.actor.policy_loss.dro_beta": "0.9.1"}  # key -> the verl that has it


def verl_yaml_of(version: str):
    return OmegaConf.load(verl_root(version) / "verl/trainer/config/_generated_ppo_trainer.yaml")


verl_yaml = verl_yaml_of(PIN)


def leaves(tree: dict) -> list[str]:
    """Paths that hold no further keys; an empty dict counts as one."""
    paths = [path for path in key_paths(tree) if not path.endswith(".*")]
    return [path for path in paths if not any(other.startswith(path + ".") for other in paths)]


def own_leaves() -> list[str]:
    own = leaves(OmegaConf.to_container(defaults(), resolve=False))
    return [path for path in own if not path.startswith(OWN_SECTION + ".")]


def declared_with_plus(path: str) -> bool:
    return path in PLUS_KEYS or path + ".*" in PLUS_KEYS


def test_every_key_path_exists_in_verls_yaml_or_is_one_that_verl_reads_with_plus():
    for path in own_leaves():
        if not declared_with_plus(path):
            parent, _, last = path.rpartition(".")
            node = OmegaConf.select(verl_yaml_of(LATER[path]) if path in LATER else verl_yaml, parent)
            assert node is not None and last in list(node.keys()), path


def test_every_default_equals_verls_or_is_a_listed_difference():
    different = set()
    for path in own_leaves():
        if declared_with_plus(path) or path in LATER:
            continue
        parent, _, last = path.rpartition(".")
        parent_node = OmegaConf.select(verl_yaml, parent)
        theirs = "???" if OmegaConf.is_missing(parent_node, last) else OmegaConf.select(verl_yaml, path)
        if OmegaConf.select(defaults(), path) != theirs:
            different.add(path)
    assert different == set(DIFFERENT_DEFAULT)


def test_interpolated_keys_follow_the_same_source_as_in_verl():
    own = OmegaConf.to_container(defaults(), resolve=False)
    followers = [p for p in own_leaves() if str(_get(own, p)).startswith("${") and p not in DIFFERENT_DEFAULT]
    assert followers
    changed = ["actor_rollout_ref.actor.strategy=fsdp2", "data.max_prompt_length=77",
               "data.max_response_length=55", "actor_rollout_ref.rollout.n=6",
               "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_epochs=3",
               "actor_rollout_ref.actor.shuffle=true", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
               "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=999",
               "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
               "critic.ppo_micro_batch_size_per_gpu=2", "critic.ppo_max_token_len_per_gpu=888"]  # fmt: skip
    mine = compose(changed, check=False)
    theirs = OmegaConf.merge(verl_yaml, OmegaConf.from_dotlist(changed))
    follow = [
        p
        for p in own_leaves()
        if str(_get(own, p)).startswith("${") and not str(_get(own, p)).startswith("${repo")
    ]
    for path in set(follow) - {"data.seed"}:
        assert OmegaConf.select(mine, path) == OmegaConf.select(theirs, path), path


def _get(tree: dict, path: str):
    for name in path.split("."):
        tree = tree[name]
    return tree


def test_schema_and_yaml_have_the_same_keys():
    def fields(cls: type, prefix: str = "") -> list[str]:
        paths = []
        for name, kind in typing.get_type_hints(cls).items():
            if dataclasses.is_dataclass(kind):
                paths += fields(kind, f"{prefix}{name}.")
            else:
                paths.append(prefix + name)
        return paths

    from_yaml = OmegaConf.load(verl_key_file().with_name("ppo_trainer.yaml"))
    paths = [p.removesuffix("engine_kwargs.vllm") for p in leaves(OmegaConf.to_container(from_yaml))]
    assert set(fields(Config)) == {p + "engine_kwargs" if p.endswith(".") else p for p in paths}


def verl_key_file():
    return Path(minirl.config.__file__).with_name("verl_keys.txt")


def test_shipped_list_of_verl_keys_is_the_pins():
    assert verl_key_file().read_text().split() == verl_key_paths()


def test_every_verl_key_has_a_reader():
    for key in verl_keys():
        assert consumer(key), key


def test_unknown_key_is_one_line_and_suggests_the_nearest():
    for wrong, near in {
        "algorithm.adv_estimatr=grpo": "algorithm.adv_estimator",
        "rollout.n=4": "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.actor.learning_rate=1": None,
        "actor_rollout_ref.actor.optim.learning_rat=1": "actor_rollout_ref.actor.optim",
        "trainer.total_trainingsteps=3": "trainer.total_training_steps",
        "critic.fsdp.param_ofload=True": "critic.fsdp.param_offload",
    }.items():
        with pytest.raises(ValueError, match="neither minirl nor verl") as caught:
            compose([wrong])
        assert "\n" not in str(caught.value)
        if near:
            assert near in str(caught.value)


def test_key_that_only_verl_knows_is_accepted_and_listed_once_with_its_reader(caplog):
    overrides = ["actor_rollout_ref.model.use_remove_padding=True", "critic.fsdp.param_offload=False",
                 "actor_rollout_ref.actor.fsdp_config.param_offload=True", "trainer.nnodes=1"]  # fmt: skip
    compose(overrides)
    assert len(caplog.messages) == 1
    assert set(sort_overrides(overrides).only_in_verl) == {o.partition("=")[0] for o in overrides[:3]}
    for key in ("actor_rollout_ref.model.use_remove_padding", "FSDP engine of the critic"):
        assert key in caplog.messages[0]


def test_plus_is_accepted_where_verl_needs_it_and_does_not_turn_a_misspelt_key_into_a_new_one():
    config = compose(["+algorithm.filter_groups.enable=True", "+algorithm.filter_groups.metric=acc",
                      "+reward.reward_kwargs.max_resp_len=24", "+data.gen_batch_size=32"],
                     check=False)  # fmt: skip
    assert config.algorithm.filter_groups.enable is True
    assert config.reward.reward_kwargs.max_resp_len == 24
    assert config.data.gen_batch_size == 32
    with pytest.raises(ValueError, match="did you mean algorithm.filter_groups"):
        compose(["+algorithm.filter_group.enable=True"])


def test_verls_old_custom_reward_keys_are_moved(caplog):
    config = compose(["custom_reward_function.path=a.py", "custom_reward_function.name=f"])
    assert (config.reward.custom_reward_function.path, config.reward.custom_reward_function.name) == (
        "a.py",
        "f",
    )
    assert any("reward.custom_reward_function.path" in line for line in caplog.messages)


@pytest.mark.parametrize(
    "logger", ["console", "[console,wandb]", '["console","wandb"]', "['console','wandb']"]
)
def test_trainer_logger_takes_verls_spellings(logger):
    assert "console" in compose([f"trainer.logger={logger}"]).trainer.logger


def test_later_override_wins():
    assert compose(["data.train_batch_size=8", "data.train_batch_size=32"]).data.train_batch_size == 32


def test_wrong_type_names_the_key_in_one_line():
    for wrong in ("actor_rollout_ref.actor.optim.lr=abc", "data.shuffle=7.5",
                  "actor_rollout_ref.rollout.n=null", "algorithm.kl_ctrl=3"):  # fmt: skip
        with pytest.raises(ValueError, match=wrong.partition("=")[0]) as caught:
            compose([wrong])
        assert "\n" not in str(caught.value)


def test_malformed_overrides_are_refused_with_the_text():
    for wrong in ("trainer.test_freq", "~data.seed", "data.seed=1,2", "=3", "data.seed=[1"):
        with pytest.raises(ValueError) as caught:
            compose([wrong])
        assert wrong in str(caught.value) and "\n" not in str(caught.value)


def test_composed_configuration_refuses_a_new_attribute():
    config = compose()
    with pytest.raises(Exception, match="foo"):
        config.data.foo = 1
    assert "minirl.seed" in minirl_keys()


def test_shipped_files_are_found_from_any_folder_and_named_relative_inside_the_project(tmp_path, monkeypatch):
    project = Path(__file__).parents[2]
    monkeypatch.chdir(project / "tests")
    assert compose().data.train_files == "../data/gsm8k_mini/train.parquet"
    monkeypatch.chdir(tmp_path)
    for path in (compose().data.train_files, compose().actor_rollout_ref.model.path):
        assert Path(path).is_absolute() and Path(path).exists()


def test_two_compositions_share_nothing():
    first, second = compose(), compose()
    first.data.train_batch_size = 1
    assert second.data.train_batch_size == 16 and compose().data.train_batch_size == 16


GSM8K_GRPO = """algorithm.adv_estimator=grpo data.train_files=gsm8k/train.parquet
    data.val_files=gsm8k/test.parquet data.train_batch_size=1024 data.max_prompt_length=512
    data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error'
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False
    trainer.critic_warmup=0 trainer.logger=["console","wandb"] trainer.project_name='verl_grpo_example_gsm8k'
    trainer.experiment_name='qwen3_8b_function_rm' trainer.n_gpus_per_node=8 trainer.nnodes=1
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15"""
GSM8K_PPO = """algorithm.adv_estimator=gae
    data.train_files=['gsm8k/train.parquet'] data.val_files=['gsm8k/test.parquet']
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=2048
    data.filter_overlong_prompts=True data.truncation='error' actor_rollout_ref.model.path=Qwen/Qwen3-8B
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=1
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576 critic.optim.lr=1e-5
    critic.model.path=Qwen/Qwen3-8B critic.model.use_remove_padding=True
    critic.model.enable_gradient_checkpointing=True critic.ppo_max_token_len_per_gpu=98304
    critic.fsdp.param_offload=False algorithm.use_kl_in_reward=False trainer.critic_warmup=0
    trainer.logger=["console","wandb"] trainer.project_name='verl_ppo_example_gsm8k'
    trainer.experiment_name='qwen3_8b' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20
    trainer.test_freq=5 trainer.total_epochs=15"""
IGNORED = {
    "data.truncation",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
}
IGNORED_GRPO = {
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
}
IGNORED_PPO = {
    "critic.model.use_remove_padding",
    "critic.model.enable_gradient_checkpointing",
    "critic.fsdp.param_offload",
}


@pytest.mark.parametrize(
    ("line", "ignored"), [(GSM8K_GRPO, IGNORED | IGNORED_GRPO), (GSM8K_PPO, IGNORED | IGNORED_PPO)]
)
def test_verls_gsm8k_launch_lines_run_unchanged(line, ignored):
    overrides = line.split()
    config = compose(overrides)
    assert set(sort_overrides(overrides).only_in_verl) == ignored
    for text in overrides:
        key, _, value = text.partition("=")
        if key not in ignored:
            expected = yaml.safe_load(value)
            expected = float(value) if key.endswith("optim.lr") else expected  # yaml takes 1e-6 for text
            assert OmegaConf.select(config, key) == expected, key
