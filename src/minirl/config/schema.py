"""Types of every configuration key, as dataclasses; the values are in ppo_trainer.yaml and nowhere else.

in: nothing -> out: `Config`, the schema that `minirl.config.compose` merges the yaml and the overrides into.
simplified: one tree, where verl instantiates a frozen dataclass per worker through `_target_`.
verl: verl.workers.config, verl.trainer.config.algorithm:AlgoConfig
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING


@dataclass
class CustomCls:
    path: str | None = MISSING
    name: str | None = MISSING


@dataclass
class Data:
    train_files: Any = MISSING  # str or list[str]
    val_files: Any = MISSING
    train_max_samples: int = MISSING
    val_max_samples: int = MISSING
    prompt_key: str = MISSING
    reward_fn_key: str = MISSING
    max_prompt_length: int = MISSING
    max_response_length: int = MISSING
    train_batch_size: int = MISSING
    gen_batch_size: int | None = MISSING
    val_batch_size: int | None = MISSING
    shuffle: bool = MISSING
    seed: int | None = MISSING
    validation_shuffle: bool = MISSING
    dataloader_num_workers: int = MISSING
    filter_overlong_prompts: bool = MISSING
    custom_cls: CustomCls = MISSING
    apply_chat_template_kwargs: dict[str, Any] = MISSING


@dataclass
class Model:
    path: str = MISSING
    tokenizer_path: str | None = MISSING
    external_lib: Any = MISSING  # str, list[str] or null


@dataclass
class CriticModel:
    path: str = MISSING


@dataclass
class Optim:
    lr: float = MISSING
    lr_warmup_steps: int = MISSING
    lr_warmup_steps_ratio: float = MISSING
    total_training_steps: int = MISSING
    weight_decay: float = MISSING
    betas: list[float] = MISSING
    clip_grad: float = MISSING
    min_lr_ratio: float = MISSING
    num_cycles: float = MISSING
    lr_scheduler_type: str = MISSING


@dataclass
class Engine:
    model_dtype: str = MISSING
    dtype: str = MISSING


@dataclass
class PolicyLoss:
    loss_mode: str = MISSING
    clip_cov_ratio: float = MISSING
    clip_cov_lb: float = MISSING
    clip_cov_ub: float = MISSING
    kl_cov_ratio: float = MISSING
    ppo_kl_coef: float = MISSING
    dro_beta: float | None = MISSING


@dataclass
class Actor:
    strategy: str = MISSING
    ppo_mini_batch_size: int = MISSING
    ppo_micro_batch_size_per_gpu: int | None = MISSING
    use_dynamic_bsz: bool = MISSING
    ppo_max_token_len_per_gpu: int = MISSING
    clip_ratio: float = MISSING
    clip_ratio_low: float | None = MISSING
    clip_ratio_high: float | None = MISSING
    clip_ratio_c: float = MISSING
    tau_pos: float = MISSING
    tau_neg: float = MISSING
    policy_loss: PolicyLoss = MISSING
    loss_agg_mode: str = MISSING
    loss_scale_factor: int | None = MISSING
    entropy_coeff: float = MISSING
    calculate_entropy: bool = MISSING
    calculate_sum_pi_squared: bool = MISSING
    use_kl_loss: bool = MISSING
    kl_loss_coef: float = MISSING
    kl_loss_type: str = MISSING
    ppo_epochs: int = MISSING
    shuffle: bool = MISSING
    data_loader_seed: int = MISSING
    optim: Optim = MISSING
    fsdp_config: Engine = MISSING


@dataclass
class Ref:
    strategy: str = MISSING
    log_prob_micro_batch_size_per_gpu: int | None = MISSING
    log_prob_use_dynamic_bsz: bool = MISSING
    log_prob_max_token_len_per_gpu: int = MISSING
    fsdp_config: Engine = MISSING


@dataclass
class Sampling:
    top_k: int = MISSING
    top_p: float = MISSING
    temperature: float = MISSING
    n: int = MISSING
    do_sample: bool = MISSING


@dataclass
class Agent:
    num_workers: int = MISSING
    default_agent_loop: str = MISSING


@dataclass
class MultiTurn:
    max_assistant_turns: int | None = MISSING
    max_user_turns: int | None = MISSING
    max_parallel_calls: int = MISSING
    max_tool_response_length: int = MISSING
    tool_response_truncate_side: str = MISSING
    function_tool_path: str | None = MISSING


@dataclass
class Rollout:
    name: str = MISSING
    mode: str = MISSING
    n: int = MISSING
    temperature: float = MISSING
    top_k: int = MISSING
    top_p: float = MISSING
    do_sample: bool = MISSING
    prompt_length: int = MISSING
    response_length: int = MISSING
    ignore_eos: bool = MISSING
    calculate_log_probs: bool = MISSING
    log_prob_micro_batch_size_per_gpu: int | None = MISSING
    log_prob_use_dynamic_bsz: bool = MISSING
    log_prob_max_token_len_per_gpu: int = MISSING
    val_kwargs: Sampling = MISSING
    agent: Agent = MISSING
    multi_turn: MultiTurn = MISSING
    dtype: str = MISSING
    gpu_memory_utilization: float = MISSING
    enforce_eager: bool = MISSING
    free_cache_engine: bool = MISSING
    tensor_model_parallel_size: int = MISSING
    max_num_batched_tokens: int = MISSING
    max_model_len: int | None = MISSING
    max_num_seqs: int = MISSING
    enable_prefix_caching: bool = MISSING
    logprobs_mode: str = MISSING
    engine_kwargs: dict[str, Any] = MISSING


@dataclass
class ActorRolloutRef:
    model: Model = MISSING
    actor: Actor = MISSING
    ref: Ref = MISSING
    rollout: Rollout = MISSING


@dataclass
class Critic:
    enable: bool | None = MISSING
    strategy: str = MISSING
    model: CriticModel = MISSING
    ppo_mini_batch_size: int = MISSING
    ppo_micro_batch_size_per_gpu: int | None = MISSING
    forward_micro_batch_size_per_gpu: int | None = MISSING
    use_dynamic_bsz: bool = MISSING
    ppo_max_token_len_per_gpu: int = MISSING
    ppo_epochs: int = MISSING
    shuffle: bool = MISSING
    data_loader_seed: int = MISSING
    cliprange_value: float = MISSING
    loss_agg_mode: str = MISSING
    optim: Optim = MISSING
    fsdp: Engine = MISSING


@dataclass
class CustomRewardFunction:
    path: str | None = MISSING
    name: str = MISSING
    reward_kwargs: dict[str, Any] = MISSING


@dataclass
class RewardManager:
    name: str = MISSING


@dataclass
class Reward:
    custom_reward_function: CustomRewardFunction = MISSING
    reward_manager: RewardManager = MISSING
    reward_kwargs: dict[str, Any] = MISSING


@dataclass
class KLCtrl:
    type: str = MISSING
    kl_coef: float = MISSING
    horizon: int = MISSING
    target_kl: float = MISSING


@dataclass
class PFPPO:
    reweight_method: str = MISSING
    weight_pow: float = MISSING


@dataclass
class RolloutCorrection:
    rollout_is: str | None = MISSING
    rollout_is_threshold: Any = MISSING  # a number, or "low_high"
    rollout_is_batch_normalize: bool = MISSING
    rollout_rs: str | None = MISSING
    rollout_rs_threshold: Any = MISSING
    bypass_mode: bool = MISSING
    loss_type: str = MISSING


@dataclass
class FilterGroups:
    enable: bool = MISSING
    metric: str | None = MISSING
    max_num_gen_batches: int = MISSING


@dataclass
class Algorithm:
    adv_estimator: str = MISSING
    gamma: float = MISSING
    lam: float = MISSING
    norm_adv_by_std_in_grpo: bool = MISSING
    use_kl_in_reward: bool = MISSING
    kl_penalty: str = MISSING
    kl_ctrl: KLCtrl = MISSING
    use_pf_ppo: bool = MISSING
    pf_ppo: PFPPO = MISSING
    rollout_correction: RolloutCorrection = MISSING
    filter_groups: FilterGroups = MISSING
    gdpo_reward_keys: list[str] | None = MISSING
    gdpo_reward_weights: list[float] | None = MISSING


@dataclass
class DistillationLoss:
    loss_mode: str = MISSING
    topk: int = MISSING
    use_task_rewards: bool = MISSING
    distillation_loss_coef: float = MISSING
    loss_max_clamp: float | None = MISSING
    log_prob_min_clamp: float | None = MISSING
    use_policy_gradient: bool = MISSING
    policy_loss_mode: str = MISSING
    clip_ratio: float = MISSING
    clip_ratio_low: float = MISSING
    clip_ratio_high: float = MISSING


@dataclass
class TeacherModel:
    model_path: str | None = MISSING


@dataclass
class TeacherModels:
    teacher_model: TeacherModel = MISSING


@dataclass
class Distillation:
    enabled: bool = MISSING
    distillation_loss: DistillationLoss = MISSING
    teacher_models: TeacherModels = MISSING


@dataclass
class Trainer:
    total_epochs: int = MISSING
    total_training_steps: int | None = MISSING
    project_name: str = MISSING
    experiment_name: str = MISSING
    logger: Any = MISSING  # str or list[str]
    nnodes: int = MISSING
    n_gpus_per_node: int = MISSING
    device: str = MISSING
    balance_batch: bool = MISSING
    critic_warmup: int = MISSING
    val_before_train: bool = MISSING
    val_only: bool = MISSING
    test_freq: int = MISSING
    save_freq: int = MISSING
    resume_mode: str = MISSING
    resume_from_path: str | None = MISSING
    default_local_dir: str = MISSING
    max_actor_ckpt_to_keep: int | None = MISSING


@dataclass
class RolloutService:
    num_replicas: int = MISSING
    timeout: float = MISSING
    max_retries: int = MISSING
    max_in_flight: int = MISSING


@dataclass
class MiniRL:
    seed: int = MISSING
    placement: str = MISSING
    num_threads: int = MISSING
    worker_timeout: float = MISSING
    rollout: RolloutService = MISSING


@dataclass
class Config:
    data: Data = MISSING
    actor_rollout_ref: ActorRolloutRef = MISSING
    critic: Critic = MISSING
    reward: Reward = MISSING
    algorithm: Algorithm = MISSING
    distillation: Distillation = MISSING
    trainer: Trainer = MISSING
    minirl: MiniRL = MISSING
