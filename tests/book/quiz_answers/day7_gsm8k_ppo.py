"""Answers of data/quiz/day7_gsm8k_ppo.yml, computed with verl 0.8.0."""

from functools import lru_cache

import pytest
import torch
from tensordict import TensorDict

from minirl.explain import explain_launch
from minirl.explain.arithmetic import batch_arithmetic
from minirl.explain.catalogue import DATA
from minirl.explain.signs import signs_in
from minirl.pin import find_symbol, use_verl, verl_root

use_verl()


def source(spec: str) -> str:
    return "\n".join(find_symbol(spec).lines)


@lru_cache(maxsize=8)
def composed(*overrides: str):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(verl_root() / "verl" / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm", *overrides])


def official(*more: str):
    text = (DATA / "launch" / "gsm8k_ppo.sh").read_text(encoding="utf-8")
    return explain_launch(text.rstrip() + " " + " ".join(more)).config


def rows_of_one_gpu(config) -> list[int]:
    """What one rank's mini-batch iterator yields, by verl's make_iterator, after train_mini_batch's check."""
    from verl.utils import tensordict_utils as tu

    n, ranks = config.actor_rollout_ref.rollout.n, config.trainer.n_gpus_per_node
    actor = config.actor_rollout_ref.actor
    check = "assert mini_batch_size % self.engine.get_data_parallel_size() == 0"
    assert check in source("verl.workers.engine_workers:TrainingWorker.train_mini_batch")
    assert actor.ppo_mini_batch_size * n % ranks == 0
    rows = config.data.train_batch_size * n // ranks
    cut = tu.make_iterator(
        TensorDict({"row": torch.arange(rows)}, batch_size=rows),
        mini_batch_size=actor.ppo_mini_batch_size * n // ranks,
        epochs=actor.ppo_epochs,
        seed=1,
        dataloader_kwargs={"shuffle": False},
    )
    return [len(part) for part in cut]


def q_which_script_does_not_divide():
    sizes = {"a": (1024, 512), "b": (1000, 100), "c": (512, 512), "d": (96, 24)}
    failed = []
    for key, (train, mini) in sizes.items():
        assert train % 8 == 0  # every card gets as many rows: the dispatch and the agent loop raise nothing
        config = official(
            f"data.train_batch_size={train}", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}"
        )
        try:
            assert sum(rows_of_one_gpu(config)) == train // 8
        except AssertionError:
            failed.append(key)
    (answer,) = failed
    return answer


def q_burst_at_update_critic():
    from types import SimpleNamespace

    from verl.utils.device import get_device_name
    from verl.workers.engine.base import BaseEngineCtx

    moves = []
    critic = SimpleNamespace(
        is_param_offload_enabled=True, is_optimizer_offload_enabled=True, to=lambda **kw: moves.append(kw)
    )
    with BaseEngineCtx(critic, "train"):  # b: while the critic is updated, all of it is on the card
        (move,) = moves
        assert move["device"] == get_device_name() and move["model"] and move["optimizer"]
    assert moves[-1]["device"] == "cpu" and moves[-1]["model"] and moves[-1]["optimizer"]  # a: idle, so away
    # c: the mean of a micro-batch is its own, so the number of micro-batches scales the gradient
    assert "batch_num_tokens" not in source("verl.workers.utils.losses:value_loss")
    # d: the inference engine sleeps at level 2 while weights are trained
    assert "sleep_level = 2" in source(
        "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer._sleep_hybrid"
    )
    fit = source("verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit")
    assert fit.index("checkpoint_manager.sleep_replicas()") < fit.index("self._update_critic(batch)")
    return "a"


def q_steps_in_a_run():
    from torchdata.stateful_dataloader import StatefulDataLoader

    text = source("verl.trainer.ppo.ray_trainer:RayPPOTrainer._create_dataloader")
    assert (
        "drop_last=True" in text and "len(self.train_dataloader) * self.config.trainer.total_epochs" in text
    )
    loader = StatefulDataLoader(dataset=range(7473), batch_size=1024, drop_last=True)
    return len(loader) * 15


def q_dynamic_switch_mismatch():
    config = composed("actor_rollout_ref.actor.use_dynamic_bsz=True")
    return str(config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz)


def q_plus_on_a_known_key():
    from hydra.errors import ConfigCompositionException

    with pytest.raises(ConfigCompositionException) as error:
        composed("+data.train_batch_size=64")
    assert "Could not append to config" in str(error.value)
    assert composed("++data.train_batch_size=64").data.train_batch_size == 64
    return "b"


def q_ref_without_kl():
    from verl.trainer.ppo.utils import need_reference_policy

    assert not need_reference_policy(official())
    text = source("verl.trainer.main_ppo:TaskRunner.add_actor_rollout_worker")
    assert "need_reference_policy(config) and not ref_in_actor" in text
    return "c"


def critic_dataclass(*overrides: str):
    from verl.utils.config import omega_conf_to_dataclass

    model = str(DATA / "tiny_lm")
    paths = [f"critic.model.path={model}", f"critic.model.tokenizer_path={model}"]
    return omega_conf_to_dataclass(composed(*paths, *overrides).critic)


def q_critic_cut():
    critic = critic_dataclass("critic.use_dynamic_bsz=False", "critic.ppo_micro_batch_size_per_gpu=4")
    assert critic.engine.use_dynamic_bsz and critic.engine.micro_batch_size_per_gpu is None
    build = source("verl.trainer.ppo.ray_trainer:RayPPOTrainer.init_workers")
    assert "engine_config.max_token_len_per_gpu = critic_cfg.ppo_max_token_len_per_gpu" in build
    assert "engine_config.use_dynamic_bsz" not in build
    assert "engine_config.micro_batch_size_per_gpu" not in build
    assert "use_dynamic_bsz=self.engine_config.use_dynamic_bsz" in source(
        "verl.workers.engine_workers:TrainingWorker.train_batch"
    )
    return "c"


def q_only_memory():
    """Options c, e, f enter the arithmetic of the batch or the rollout; a, b, d only the engine."""
    base = batch_arithmetic(official())
    trained = {
        "a": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=49152",
        "b": "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "c": "actor_rollout_ref.actor.ppo_mini_batch_size=512",
        "d": "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "f": "actor_rollout_ref.rollout.n=2",
    }
    same = {key for key, text in trained.items() if batch_arithmetic(official(text)) == base}
    widths = [official(f"data.max_response_length={r}").actor_rollout_ref.rollout for r in (2048, 4096)]
    assert widths[0].response_length != widths[1].response_length  # e: what the rollout may write
    assert "batch_num_tokens" in source("verl.workers.utils.losses:ppo_loss")  # a: the global denominator
    return same


def q_read_a_log_line():
    from verl.utils.logger.aggregate_logger import concat_dict_to_str

    return concat_dict_to_str({"actor/lr": 1e-06, "note": "warm", "critic/score/mean": 0.25}, step=3)


def q_sick_without_sync():
    """A history as described: the only sign is the gap between the two engines."""
    history = [
        {
            "step": i,
            "actor/ppo_kl": 0.01,
            "actor/grad_norm": 0.5,
            "training/rollout_probs_diff_mean": 0.01 * i,
            "critic/score/mean": 0.3,
        }
        for i in range(1, 11)
    ]
    (sign,) = signs_in(history)
    assert sign.metric == "training/rollout_probs_diff_mean"
    return "b"


def q_zero_score_at_start():
    from verl.utils.reward_score import default_compute_score

    def score(text):
        return default_compute_score("openai/gsm8k", text, "72")

    assert score("so the answer is 72") == 0 and score("so the answer is\n#### 72") == 1
    return "b"


def q_mini_above_train():
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass

    sizes = ["actor_rollout_ref.actor.ppo_mini_batch_size=64", "actor_rollout_ref.rollout.n=8"]

    def validate(*more):
        actor = omega_conf_to_dataclass(composed(*sizes, *more).actor_rollout_ref.actor)
        actor.validate(8, 32, {"use_remove_padding": True})

    validate("actor_rollout_ref.actor.use_dynamic_bsz=True")  # nothing is raised
    with pytest.raises(ValueError, match="must be >="):
        validate("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4")
    data = TensorDict({"row": torch.arange(32 * 8 // 8)}, batch_size=32 * 8 // 8)  # one card of eight
    with pytest.raises(AssertionError):
        tu.make_iterator(data, mini_batch_size=64 * 8 // 8, epochs=1, seed=1, dataloader_kwargs={})
    return "b"
