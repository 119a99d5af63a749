"""Combinations of options that do something else than they seem to.

in: the options of a script, the configuration they make -> out: one sentence each, in the reader's language.
simplified: the traps of the first week; each is a function, so that a test names it.
verl: verl.utils.config:validate_config, verl.trainer.ppo.utils
"""

from collections.abc import Callable, Sequence

from omegaconf import DictConfig, OmegaConf

from minirl.explain.arithmetic import batch_arithmetic

_GROUPED = (
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
)
_COUNTS = (
    "data.train_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)


def notes_on(options: Sequence, config: DictConfig) -> list[str]:
    """The notes that hold for this script."""
    unusable = [
        f"{key}={value}：要写一个正整数"
        for key in _COUNTS
        if not isinstance(value := OmegaConf.select(config, key), int) or value < 1
    ]
    if unusable:
        return unusable
    keys = {option.key for option in options}
    found = [note(keys, config) for note in NOTES]
    return [text for text in found if text]


def _clip_ratio_alone(keys: set[str], config: DictConfig) -> str:
    actor = config.actor_rollout_ref.actor
    if "actor_rollout_ref.actor.clip_ratio" in keys and actor.clip_ratio_low == actor.clip_ratio_high == 0.2:
        if actor.clip_ratio != 0.2:
            return "只写 clip_ratio 不起作用：clip_ratio_low / clip_ratio_high 默认 0.2，优先用它们"
    return ""


def _mini_above_train(keys: set[str], config: DictConfig) -> str:
    mini, prompts = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.data.train_batch_size
    if mini > prompts:
        # verl checks this only where micro-batches are counted in rows: ActorConfig.validate
        late = config.actor_rollout_ref.actor.use_dynamic_bsz
        when = "到切 mini-batch 时断言失败" if late else "启动就报错"
        return f"ppo_mini_batch_size={mini} 大于 train_batch_size={prompts}：都数提示词，与 n 无关；{when}"
    return ""


def _uneven(keys: set[str], config: DictConfig) -> str:
    numbers = batch_arithmetic(config)
    rows, ranks = numbers["mini_batch_rows"], numbers["dp"]
    if rows % ranks:
        return f"一个 mini-batch 有 {rows} 条轨迹，不能被 {ranks} 个数据并行的 rank 整除"
    return ""


def _no_ref(keys: set[str], config: DictConfig) -> str:
    uses = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    if not uses and any(key.startswith("actor_rollout_ref.ref.") for key in keys):
        return "写了 ref.*，但两个 KL 开关都没开：不会建参考策略，这些选项不起作用"
    return ""


def _idle_kl(keys: set[str], config: DictConfig) -> str:
    idle = []
    if not config.algorithm.use_kl_in_reward and "algorithm.kl_ctrl.kl_coef" in keys:
        idle.append("algorithm.kl_ctrl.kl_coef 要 algorithm.use_kl_in_reward=True 才有人用")
    if not config.actor_rollout_ref.actor.use_kl_loss and "actor_rollout_ref.actor.kl_loss_coef" in keys:
        idle.append("actor_rollout_ref.actor.kl_loss_coef 要 use_kl_loss=True 才有人用")
    return "；".join(idle)


def _twice_kl(keys: set[str], config: DictConfig) -> str:
    if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        return "两个 KL 开关都开了：奖励里扣一次，loss 里再加一次"
    return ""


def _micro_ignored(keys: set[str], config: DictConfig) -> str:
    actor = config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz and "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu" in keys:
        return "use_dynamic_bsz=True 时按 token 上限切 micro-batch，ppo_micro_batch_size_per_gpu 不起作用"
    return ""


def _dynamic_differs(keys: set[str], config: DictConfig) -> str:
    refs = config.actor_rollout_ref
    if refs.actor.use_dynamic_bsz != refs.rollout.log_prob_use_dynamic_bsz:
        return "actor.use_dynamic_bsz 与 rollout.log_prob_use_dynamic_bsz 必须相同，否则 worker 断言失败"
    return ""


def _lonely_group(keys: set[str], config: DictConfig) -> str:
    name = config.algorithm.adv_estimator
    if name in _GROUPED and config.actor_rollout_ref.rollout.n == 1:
        return f"adv_estimator={name} 要和同组的响应比，rollout.n=1 时组里只有自己：退化，且不报错"
    return ""


def _critic_unused(keys: set[str], config: DictConfig) -> str:
    used = (
        config.critic.enable if config.critic.enable is not None else config.algorithm.adv_estimator == "gae"
    )
    if not used and any(key.startswith("critic.") for key in keys):
        return (
            f"写了 critic.*，但 adv_estimator={config.algorithm.adv_estimator} 不建 critic：这些选项不起作用"
        )
    return ""


NOTES: tuple[Callable[[set[str], DictConfig], str], ...] = (
    _clip_ratio_alone,
    _mini_above_train,
    _uneven,
    _no_ref,
    _idle_kl,
    _twice_kl,
    _micro_ignored,
    _dynamic_differs,
    _lonely_group,
    _critic_unused,
)
