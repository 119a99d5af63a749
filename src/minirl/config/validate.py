"""Checks the configuration before anything is loaded, with the numbers in the message.

in: the composed configuration -> out: nothing, or ValueError.
simplified: no tensor, pipeline or sequence parallelism, so ranks = nnodes x n_gpus_per_node.
verl: verl.utils.config:validate_config, verl.workers.config.actor:ActorConfig
"""

import difflib
from collections.abc import Iterable

from omegaconf import DictConfig

from minirl.config.algorithms import check_algorithms

_LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",  # from verl 0.9.1
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
_STRATEGIES = ("ddp", "fsdp", "fsdp2")
_DTYPES = ("float32", "bfloat16")  # float16 needs its loss scaled, which no worker does
_CHOICES = {
    "actor_rollout_ref.actor.strategy": _STRATEGIES,
    "actor_rollout_ref.ref.strategy": _STRATEGIES,
    "critic.strategy": _STRATEGIES,
    "actor_rollout_ref.actor.fsdp_config.dtype": _DTYPES,
    "actor_rollout_ref.ref.fsdp_config.dtype": _DTYPES,
    "critic.fsdp.dtype": _DTYPES,
    "actor_rollout_ref.actor.loss_agg_mode": _LOSS_AGG_MODES,
    "critic.loss_agg_mode": _LOSS_AGG_MODES,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.optim.lr_scheduler_type": ("constant", "cosine"),
    "actor_rollout_ref.rollout.name": ("builtin", "vllm"),
    "actor_rollout_ref.rollout.mode": ("sync", "async"),
    # vLLM has raw_logits and processed_logits too, which are no log-probs
    "actor_rollout_ref.rollout.logprobs_mode": ("processed_logprobs", "raw_logprobs"),
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": ("left", "middle", "right"),
    "reward.reward_manager.name": ("naive", "dapo", "gdpo"),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.rollout_is": (None, "token", "sequence"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "minirl.placement": ("local", "ray"),
}
_POSITIVE = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "critic.ppo_mini_batch_size",
    "critic.ppo_epochs",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "minirl.num_threads",
    "minirl.worker_timeout",
    "minirl.rollout.num_replicas",
    "minirl.rollout.max_in_flight",
)


def need_critic(config: DictConfig) -> bool:
    """Whether a critic is trained. verl: verl.trainer.ppo.utils:need_critic"""
    if config.critic.enable is not None:
        return config.critic.enable
    return config.algorithm.adv_estimator == "gae"


def need_reference_policy(config: DictConfig) -> bool:
    """Whether the reference model is loaded. verl: verl.trainer.ppo.utils:need_reference_policy"""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def validate(config: DictConfig) -> None:
    """Raise ValueError for a value outside its choices or for batch sizes that do not fit each other.

    verl: verl.utils.config:validate_config
    """
    for key, choices in _CHOICES.items():
        _one_of(key, _select(config, key), choices)
    for key in _POSITIVE:
        if _select(config, key) < 1:
            raise ValueError(f"{key}={_select(config, key)}: must be at least 1")

    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    n = config.actor_rollout_ref.rollout.n
    if config.data.gen_batch_size is not None and config.data.gen_batch_size < 1:
        raise ValueError(f"data.gen_batch_size={config.data.gen_batch_size}: must be at least 1, or null")
    for key, prompts in dict([_generated(config), _trained(config)]).items():
        if prompts * n % ranks:
            raise ValueError(
                f"{key} x actor_rollout_ref.rollout.n = {prompts} x {n} = {prompts * n} "
                f"trajectories do not split evenly over {ranks} ranks "
                f"(trainer.nnodes x trainer.n_gpus_per_node); make the product a multiple of {ranks}"
            )

    actor, rollout, ref = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "ref"))
    _check_update("actor_rollout_ref.actor", actor, config, ranks)
    if actor.use_dynamic_bsz != rollout.log_prob_use_dynamic_bsz:
        raise ValueError(
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz="
            f"{rollout.log_prob_use_dynamic_bsz} must equal "
            f"actor_rollout_ref.actor.use_dynamic_bsz={actor.use_dynamic_bsz}: one worker runs both"
        )
    _check_inference("actor_rollout_ref.rollout", rollout, config)
    if need_reference_policy(config):
        _check_inference("actor_rollout_ref.ref", ref, config)
    if need_critic(config):
        _check_update("critic", config.critic, config, ranks)
    _check_sampling(config)
    _check_service(config)
    check_algorithms(config, has_critic=need_critic(config))
    if config.trainer.resume_mode == "resume_path" and not config.trainer.resume_from_path:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path=<checkpoint folder>")


def _select(config: DictConfig, key: str):
    node = config
    for name in key.split("."):
        node = node[name]
    return node


def _one_of(key: str, value: object, choices: Iterable[object]) -> None:
    if value in choices:
        return
    names = [str(choice) for choice in choices]
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{key}={value}: must be one of {', '.join(names)}{hint}")


def _generated(config: DictConfig) -> tuple[str, int]:
    """How many prompts the rollout gets at once, and by which key."""
    key = "train_batch_size" if config.data.gen_batch_size is None else "gen_batch_size"
    return f"data.{key}", config.data[key]


def _trained(config: DictConfig) -> tuple[str, int]:
    """How many prompts an update gets: filtering fills train_batch_size up, else it is what was generated."""
    if config.algorithm.filter_groups.enable:
        return "data.train_batch_size", config.data.train_batch_size
    return _generated(config)


def _check_update(section: str, node: DictConfig, config: DictConfig, ranks: int) -> None:
    """ppo_mini_batch_size counts prompts over all ranks, micro sizes count trajectories on one rank."""
    (key, prompts), n = _trained(config), config.actor_rollout_ref.rollout.n
    mini, micro = node.ppo_mini_batch_size, node.ppo_micro_batch_size_per_gpu
    if prompts < mini:
        raise ValueError(
            f"{section}.ppo_mini_batch_size={mini} prompts is more than {key}={prompts}; "
            "lower the first or raise the second"
        )
    if prompts % mini:
        raise ValueError(
            f"{key}={prompts} is not a multiple of {section}.ppo_mini_batch_size={mini} "
            f"(both in prompts): {prompts % mini} prompts would be left over"
        )
    if mini * n % ranks:
        raise ValueError(
            f"{section}.ppo_mini_batch_size x rollout.n = {mini} x {n} = {mini * n} trajectories do not "
            f"split evenly over {ranks} ranks; make the product a multiple of {ranks}"
        )
    if node.use_dynamic_bsz:
        _check_token_budget(f"{section}.ppo_max_token_len_per_gpu", node.ppo_max_token_len_per_gpu, config)
        return
    if micro is None or micro < 1:
        raise ValueError(
            f"{section}.ppo_micro_batch_size_per_gpu={micro}: set it to at least 1, "
            f"or set actor_rollout_ref.actor.use_dynamic_bsz=true"
        )
    rows = mini * n // ranks
    if rows % min(micro, rows):
        raise ValueError(
            f"{section}: a mini-batch has {mini} x {n} / {ranks} = {rows} trajectories per rank, which is "
            f"not a multiple of ppo_micro_batch_size_per_gpu={micro}; choose a divisor of {rows}"
        )


def _check_inference(section: str, node: DictConfig, config: DictConfig) -> None:
    if node.log_prob_use_dynamic_bsz:
        _check_token_budget(
            f"{section}.log_prob_max_token_len_per_gpu", node.log_prob_max_token_len_per_gpu, config
        )
    elif node.log_prob_micro_batch_size_per_gpu is None or node.log_prob_micro_batch_size_per_gpu < 1:
        raise ValueError(
            f"{section}.log_prob_micro_batch_size_per_gpu={node.log_prob_micro_batch_size_per_gpu}: "
            "set it to at least 1"
        )


def _check_token_budget(key: str, tokens: int, config: DictConfig) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    if tokens < longest:
        raise ValueError(
            f"{key}={tokens} cannot hold one trajectory of data.max_prompt_length + data.max_response_length "
            f"= {longest} tokens; raise it to at least {longest}"
        )


def _check_service(config: DictConfig) -> None:
    rollout, service = config.actor_rollout_ref.rollout, config.minirl.rollout
    if service.timeout <= 0:
        raise ValueError(f"minirl.rollout.timeout={service.timeout}: must be above 0 seconds")
    if service.max_retries < 0:
        raise ValueError(f"minirl.rollout.max_retries={service.max_retries}: must be at least 0")
    lockstep = rollout.name == "builtin" and rollout.mode == "sync"
    if lockstep and rollout.agent.default_agent_loop != "single_turn_agent":
        raise ValueError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={rollout.agent.default_agent_loop}: agent "
            "loops run in the rollout service; set actor_rollout_ref.rollout.mode=async"
        )


def _check_sampling(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.do_sample and rollout.temperature <= 0:
        raise ValueError(
            f"actor_rollout_ref.rollout.temperature={rollout.temperature}: training divides logits by it, "
            "so it must be above 0"
        )
    for where, node in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        if not 0 < node.top_p <= 1:
            raise ValueError(f"actor_rollout_ref.{where}.top_p={node.top_p}: must be above 0 and at most 1")
        if rollout.name == "vllm" and node.do_sample and not 0.01 <= node.temperature <= 2:
            raise ValueError(
                f"actor_rollout_ref.{where}.temperature={node.temperature}: vLLM samples at 0.01 to 2 only"
            )
        if node.top_k == 0 or node.top_k < -1:
            raise ValueError(
                f"actor_rollout_ref.{where}.top_k={node.top_k}: must be at least 1, or -1 for all tokens"
            )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature <= 0:
        raise ValueError(
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true needs val_kwargs.temperature above 0; "
            f"it is {rollout.val_kwargs.temperature}"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        raise ValueError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} cannot hold "
            f"data.max_prompt_length + data.max_response_length = {longest} tokens; raise it, or leave it "
            "null for the model's own"
        )
    if not 0 < rollout.gpu_memory_utilization <= 1:
        raise ValueError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}: "
            "a share of the GPU's memory, above 0 and at most 1"
        )
