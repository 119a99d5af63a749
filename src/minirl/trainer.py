"""PPOTrainer: the control flow of one training run, and nothing else.

One batch passes ten stations, in `fit`'s order; each is a short method with verl's name for it. All
arithmetic is in core_algos, all models are in workers.
Simplified: rewards are computed here, after the rollout; verl's default path does it inside the rollout call.
verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from minirl import checkpoint
from minirl.balance import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance
from minirl.config import apply_bypass_mode, need_critic, need_reference_policy, validate
from minirl.core_algos.advantage import estimate_advantage
from minirl.core_algos.advantage.gdpo import gdpo_component_scores
from minirl.core_algos.agg_loss import agg_loss
from minirl.core_algos.kl import apply_kl_penalty, get_kl_controller
from minirl.core_algos.names import check_names
from minirl.core_algos.pf_ppo import pf_ppo_indices
from minirl.core_algos.rollout_correction import (
    compute_rollout_correction_and_rejection_mask,
    correction_options,
)
from minirl.data.dataset import create_dataloaders
from minirl.extern import import_external_libs
from minirl.metrics import (
    calculate_debug_metrics,
    compute_data_metrics,
    compute_gdpo_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
    format_log_line,
    reduce_metrics,
    rename_dict,
    val_metrics_update,
)
from minirl.protocol import DataProto
from minirl.reward.manager import extract_reward, load_reward_manager
from minirl.rollout.load import load_rollout
from minirl.single_controller.place import place_workers
from minirl.trace import station
from minirl.workers.actor import ActorWorker
from minirl.workers.critic import CriticWorker
from minirl.workers.model import load_causal_lm, load_tokenizer
from minirl.workers.ref import RefWorker
from minirl.workers.teacher import TeacherWorker

_log = logging.getLogger("minirl.trainer")


def _station(name: str) -> Callable:
    """Mark a method `(self, data, ...) -> data` as a station, for `minirl.trace` to look at what it did."""

    def wrap(method):
        @functools.wraps(method)
        def run(self, data=None, *args, **kwargs):
            with station(name, data) as seen:
                result = method(self, data, *args, **kwargs)
                seen.done(result)
            return result

        return run

    return wrap


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block to `timing_raw[name]`. verl: verl.utils.profiler.performance:marked_timer"""
    start = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


class PPOTrainer:
    """One training run.

    Args:
        config: from `minirl.config.compose`.
        compute_score: replaces the configured reward function, for notebooks: see `minirl.reward.manager`.

    Attributes:
        history: the metrics of every step so far, as they were logged.

    Raises:
        ValueError: an impossible configuration, a missing file or column; one line, before any model is
        loaded.
    """

    def __init__(self, config: DictConfig, *, compute_score: Callable | None = None) -> None:
        validate(config)
        import_external_libs(config.actor_rollout_ref.model.external_lib)
        check_names(config)
        self.config = config
        torch.set_num_threads(config.minirl.num_threads)
        self.use_critic = need_critic(config)
        self.use_reference_policy = need_reference_policy(config)
        self.tokenizer = load_tokenizer(
            config.actor_rollout_ref.model.tokenizer_path or config.actor_rollout_ref.model.path
        )
        self.train_dataloader, self.val_dataloader = create_dataloaders(config, self.tokenizer)
        self.total_training_steps = (
            config.trainer.total_training_steps or len(self.train_dataloader) * config.trainer.total_epochs
        )
        for optim in (config.actor_rollout_ref.actor.optim, config.critic.optim):
            optim.total_training_steps = self.total_training_steps
        if config.algorithm.rollout_correction.bypass_mode:
            apply_bypass_mode(config)  # before the workers take their copy
        self.reward_manager = load_reward_manager(config, self.tokenizer, compute_score=compute_score)
        self.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
        self.global_steps = 0
        self.batches_drawn = 0  # from the dataloader; more than steps where groups are filtered
        self.kept: DataProto | None = None  # groups with a signal, while there are too few for a step
        self.history: list[dict[str, float]] = []
        self.init_workers()

    def init_workers(self) -> None:
        """Build the models that this configuration needs. verl: RayPPOTrainer.init_workers"""
        config, models = self.config, self.config.actor_rollout_ref
        roles = {"actor": functools.partial(ActorWorker, models, distillation=config.distillation)}
        if self.use_reference_policy:
            roles["ref"] = functools.partial(RefWorker, models)
        if self.use_critic:
            roles["critic"] = functools.partial(CriticWorker, config.critic)
        if config.distillation.enabled:
            roles["teacher"] = functools.partial(TeacherWorker, config)
        groups = place_workers(config, roles)
        self.actor_wg, self.ref_wg = groups["actor"], groups.get("ref")
        self.critic_wg, self.teacher_wg = groups.get("critic"), groups.get("teacher")
        dtype = models.actor.fsdp_config.model_dtype
        model = load_causal_lm(models.model.path, dtype=dtype, device=config.trainer.device)
        self.rollout = load_rollout(models.rollout, model, self.tokenizer, config.minirl.rollout)

    # -- the loop --------------------------------------------------------------------------------------------

    def fit(self) -> list[dict[str, float]]:
        """Train; returns the metrics of every step. verl: RayPPOTrainer.fit"""
        self.global_steps = self.batches_drawn = 0
        self._load_checkpoint()
        self._update_weights()  # the rollout starts from the actor's weights
        if self.config.trainer.val_before_train and self.global_steps == 0:
            self._log(self._validate())
            if self.config.trainer.val_only:
                return self.history

        progress = tqdm(total=self.total_training_steps, initial=self.global_steps, desc="Training Progress")
        metrics: dict[str, float] = {}
        timing_raw: dict[str, float] = {}
        self.global_steps += 1  # the first step is 1
        for epoch, batch_dict in self._batches():
            is_last_step = self.global_steps >= self.total_training_steps
            with marked_timer("step", timing_raw):
                batch = self._load(batch_dict)
                gen_batch = self._get_gen_batch(batch)
                batch = self._generate_sequences(gen_batch, batch, metrics, timing_raw)
                with marked_timer("reward", timing_raw):
                    batch = self._compute_reward(batch)
                if self.config.algorithm.filter_groups.enable:
                    batch = self._filter_groups(batch, metrics)
                    if batch is None:
                        self.rollout.wake_up()
                        continue  # too few groups with a signal: sample the next prompts
                batch = self._compute_log_probs(batch, metrics, timing_raw)
                if self.use_critic:
                    with marked_timer("values", timing_raw):
                        batch = self._compute_values(batch)
                with marked_timer("adv", timing_raw):
                    batch = self._compute_advantage(batch, metrics)
                if self.use_critic:
                    with marked_timer("update_critic", timing_raw):
                        metrics.update(reduce_metrics(self._update_critic(batch).meta_info["metrics"]))
                if self.config.trainer.critic_warmup > self.global_steps:
                    self._update_weights(batch)  # nothing new to hand over, but the rollout must wake up
                else:
                    with marked_timer("update_actor", timing_raw):
                        metrics.update(reduce_metrics(self._update_actor(batch).meta_info["metrics"]))
                    if self._is_due(self.config.trainer.save_freq, is_last_step):
                        with marked_timer("save_checkpoint", timing_raw):
                            self._save_checkpoint()
                    with marked_timer("update_weights", timing_raw):
                        self._update_weights(batch)

            if self._is_due(self.config.trainer.test_freq, is_last_step):
                with marked_timer("testing", timing_raw):
                    metrics.update(self._validate())
            metrics.update({"training/global_step": self.global_steps, "training/epoch": epoch})
            metrics.update(self._batch_metrics(batch, metrics, timing_raw))
            self._log(metrics)
            progress.set_postfix(reward=f"{metrics['critic/rewards/mean']:.3f}")
            progress.update(1)
            if is_last_step:
                break
            self.global_steps += 1
            metrics, timing_raw = {}, {}
        else:
            self._data_ended()
        progress.close()
        return self.history

    # -- the ten stations ------------------------------------------------------------------------------------

    @_station("load")
    def _load(self, batch_dict: dict) -> DataProto:
        """1. Split what the dataloader gives into tensors and object arrays; name every prompt."""
        batch = DataProto.from_single_dict(batch_dict)
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        # before the repeat: siblings share a uid, and group estimators find them by it
        batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch))], dtype=object)
        return batch

    @_station("gen_batch")
    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """2. Move what generation needs out, keep what scoring needs, repeat each prompt n times."""
        reward_keys = {"data_source", "reward_model", "extra_info", "uid"} & batch.non_tensor_batch.keys()
        gen_batch = batch.pop(non_tensor_batch_keys=list(batch.non_tensor_batch.keys() - reward_keys))
        gen_batch.non_tensor_batch.update(batch.non_tensor_batch)
        gen_batch.meta_info |= {"global_steps": self.global_steps, "rollout_seed": self.config.minirl.seed}
        return gen_batch.repeat(self.config.actor_rollout_ref.rollout.n, interleave=True)

    @_station("rollout")
    def _generate_sequences(
        self, gen_batch: DataProto, batch: DataProto, metrics: dict, timing_raw: dict
    ) -> DataProto:
        """3. One response per row; the two halves of the batch united, and spread over the ranks."""
        n = self.config.actor_rollout_ref.rollout.n
        with marked_timer("gen", timing_raw):
            output = self.rollout.generate_sequences(gen_batch)
            timing_raw.update(output.meta_info.pop("timing"))
        if self.config.algorithm.adv_estimator == "remax":
            batch.batch["reward_baselines"] = self._greedy_scores(gen_batch[::n])
        self.rollout.sleep()  # nothing is generated until the next weights arrive: free its memory
        batch = batch.repeat(n, interleave=True).union(output)
        if self.config.trainer.balance_batch:
            self._balance_batch(batch, metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        return batch

    def _greedy_scores(self, gen_batch: DataProto) -> torch.Tensor:
        """ReMax's baseline: the score of the greedy answer to each prompt, [b].

        verl: inside RayPPOTrainer.fit
        """
        gen_batch.non_tensor_batch["__do_sample__"] = np.zeros(len(gen_batch), dtype=bool)
        output = self.rollout.generate_sequences(gen_batch)
        output.non_tensor_batch = {**gen_batch.non_tensor_batch, **output.non_tensor_batch}
        return self.reward_manager(output).batch["rm_scores"].sum(-1)

    def _balance_batch(self, batch: DataProto, metrics: dict) -> None:
        """Reorder rows so that every rank gets a similar number of tokens.

        verl: RayPPOTrainer._balance_batch
        """
        lengths = batch.batch["attention_mask"].sum(-1)
        workload = calculate_workload(lengths).tolist()
        partitions = get_seqlen_balanced_partitions(workload, self.actor_wg.world_size, equal_size=True)
        # small micro-batches at both ends, as verl orders them for its pipelines
        partitions = [sorted(part, key=lambda row: (workload[row], row)) for part in partitions]
        partitions = [part[::2] + part[1::2][::-1] for part in partitions]
        batch.reorder(torch.tensor([row for part in partitions for row in part]))
        metrics.update(log_seqlen_unbalance(lengths.tolist(), partitions, prefix="global_seqlen"))

    @_station("reward")
    def _compute_reward(self, batch: DataProto) -> DataProto:
        """4. Score every response; the score lands on its last token.

        verl: RayPPOTrainer._compute_reward_colocate
        """
        return batch.union(self.reward_manager(batch))

    @_station("log_prob")
    def _compute_log_probs(self, batch: DataProto, metrics: dict, timing_raw: dict) -> DataProto:
        """5. How likely the trained policy, and the reference, find the tokens that the rollout sampled."""
        if self.config.algorithm.rollout_correction.bypass_mode:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]  # two policies instead of three
        else:
            with marked_timer("old_log_prob", timing_raw):
                batch = batch.union(self._compute_old_log_prob(batch, metrics))
            if "rollout_log_probs" in batch.batch:
                metrics.update(calculate_debug_metrics(batch))
        if self.use_reference_policy:
            with marked_timer("ref", timing_raw):
                batch = batch.union(self.ref_wg.compute_ref_log_prob(batch))
        if self.teacher_wg is not None:
            with marked_timer("teacher", timing_raw):
                batch = batch.union(self.teacher_wg.compute_teacher_logprobs(batch))
        return batch

    def _compute_old_log_prob(self, batch: DataProto, metrics: dict) -> DataProto:
        """The anchor of PPO's ratio; the entropies are only for the log.

        verl: RayPPOTrainer._compute_old_log_prob
        """
        old_log_prob = self.actor_wg.compute_log_prob(batch)
        actor = self.config.actor_rollout_ref.actor
        entropys = old_log_prob.batch.pop("entropys")
        entropy = agg_loss(
            entropys,
            batch.batch["response_mask"],
            actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor,
        )
        metrics.update({"actor/entropy": entropy.item(), "perf/mfu/actor_infer": 0.0})
        return old_log_prob

    @_station("values")
    def _compute_values(self, batch: DataProto) -> DataProto:
        """6. What the critic expects from every position on. verl: RayPPOTrainer._compute_values"""
        return batch.union(self.critic_wg.compute_values(batch))

    @_station("advantage")
    def _compute_advantage(self, batch: DataProto, metrics: dict) -> DataProto:
        """7. Scores become rewards (minus KL, where asked for), rewards become advantages."""
        algorithm = self.config.algorithm
        scores, extra = extract_reward(batch)
        batch.batch["token_level_scores"] = scores
        batch.non_tensor_batch.update({key: np.array(values) for key, values in extra.items()})
        rewards = scores
        if algorithm.use_kl_in_reward:
            rewards, kl_metrics = apply_kl_penalty(
                scores,
                batch.batch["old_log_probs"],
                batch.batch["ref_log_prob"],
                batch.batch["response_mask"],
                kl_ctrl=self.kl_ctrl_in_reward,
                kl_penalty_name=algorithm.kl_penalty,
            )
            metrics.update(kl_metrics)
        batch.batch["token_level_rewards"] = rewards
        if "rollout_log_probs" in batch.batch and not algorithm.rollout_correction.bypass_mode:
            self._correct_rollout(batch, metrics)
        return compute_advantage(batch, algorithm, seed=self.config.minirl.seed + self.global_steps)

    def _correct_rollout(self, batch: DataProto, metrics: dict) -> None:
        """Weights and mask for the gap between the policy that sampled and the one that trains.

        The metrics are computed even with both switches off: they tell whether a correction is needed.
        verl: verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_add_to_batch
        """
        weights, mask, corr_metrics = compute_rollout_correction_and_rejection_mask(
            batch.batch["old_log_probs"],
            batch.batch["rollout_log_probs"],
            batch.batch["response_mask"],
            **correction_options(self.config.algorithm.rollout_correction),
        )
        if not mask.any():
            options = self.config.algorithm.rollout_correction
            raise ValueError(
                f"algorithm.rollout_correction.rollout_rs={options.rollout_rs} with rollout_rs_threshold="
                f"{options.rollout_rs_threshold} rejected every token of step {self.global_steps}: widen it "
                f"(rollout_corr/kl is {corr_metrics['rollout_corr/kl']:.2g})"
            )
        batch.batch["response_mask"] = mask  # a rejected token is as if it had not been generated
        if weights is not None:
            batch.batch["rollout_is_weights"] = weights
        metrics.update(corr_metrics)

    @_station("update_critic")
    def _update_critic(self, batch: DataProto) -> DataProto:
        """8. Fit the values to the returns. verl: RayPPOTrainer._update_critic"""
        output = self.critic_wg.update_critic(self._with_training_meta(batch, self.config.critic))
        return _named_metrics(output, "critic")

    @_station("update_actor")
    def _update_actor(self, batch: DataProto) -> DataProto:
        """9. Make good tokens likelier: (train_batch_size / ppo_mini_batch_size) * ppo_epochs optimizer
        steps.
        """
        actor = self.config.actor_rollout_ref.actor
        data = self._with_training_meta(batch, actor)
        data.meta_info["calculate_entropy"] = actor.calculate_entropy or actor.entropy_coeff != 0.0
        return _named_metrics(self.actor_wg.update_actor(data), "actor")

    @_station("sync")
    def _update_weights(self, batch: DataProto | None = None) -> DataProto | None:
        """10. Hand the actor's weights to the rollout, which also wakes it.

        verl: CheckpointEngineManager.update_weights
        """
        self.rollout.update_weights(self.actor_wg.named_weights(), version=self.global_steps)
        return batch

    # -- around the stations ---------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[int, dict]]:
        """(epoch, batch) from where the run stands, in the order an undisturbed run has."""
        drawn, self.batches_drawn = self.batches_drawn, 0
        for epoch in range(self.config.trainer.total_epochs):
            for batch_dict in self.train_dataloader:
                self.batches_drawn += 1
                if self.batches_drawn > drawn:
                    yield epoch, batch_dict

    def _data_ended(self) -> None:
        """Say that the data gave out before the last step; verl ends such a run without a word.

        Raises:
            ValueError: not one step was made.
        """
        done = self.global_steps - 1
        message = (
            f"trainer.total_epochs={self.config.trainer.total_epochs} is over after {done} of "
            f"{self.total_training_steps} steps ({self.batches_drawn} batches drawn): raise it"
        )
        if self.config.algorithm.filter_groups.enable:
            message += ", or choose a filter_groups.metric in which more groups differ"
        if done == 0:
            raise ValueError(message)
        _log.warning(message)

    def _filter_groups(self, batch: DataProto, metrics: dict) -> DataProto | None:
        """DAPO's dynamic sampling: keep the groups whose responses differ in `filter_groups.metric`.

        A group of equal scores has advantages 0 and teaches nothing. Returns a full batch, or None while
        there are fewer than `train_batch_size` groups. verl 0.8.0 has the option but its trainer does not
        read it; the loop is in the verl-recipe repository (RayDAPOTrainer), and native from 0.9 on.

        Raises:
            ValueError: `max_num_gen_batches` batches did not give enough groups.
        """
        options, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        uids, values = batch.non_tensor_batch["uid"], filter_values(batch, options.metric)
        spread = {uid: np.ptp(values[uids == uid]) for uid in dict.fromkeys(uids)}
        alone = self.config.actor_rollout_ref.rollout.n == 1
        batch.meta_info.pop("global_token_num")  # counted again below, for the rows that stay
        batch = batch.select_idxs([i for i, uid in enumerate(uids) if spread[uid] > 0 or alone])
        self.kept = batch if self.kept is None else DataProto.concat([self.kept, batch])
        uids = self.kept.non_tensor_batch["uid"]
        groups = list(dict.fromkeys(uids))
        metrics["train/num_gen_batches"] = metrics.get("train/num_gen_batches", 0) + 1
        if len(groups) < wanted:
            if 0 < options.max_num_gen_batches <= metrics["train/num_gen_batches"]:
                raise ValueError(
                    f"algorithm.filter_groups: {options.max_num_gen_batches} batches gave {len(groups)} "
                    f"groups that differ in {options.metric}, {wanted} are needed: raise max_num_gen_batches"
                )
            return None
        chosen = set(groups[:wanted])
        batch, self.kept = self.kept.select_idxs([i for i, uid in enumerate(uids) if uid in chosen]), None
        if self.config.trainer.balance_batch:
            self._balance_batch(batch, metrics)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        return batch

    def _with_training_meta(self, batch: DataProto, config: DictConfig) -> DataProto:
        """The same rows, with what the training worker needs to know. Sizes turn from prompts into
        trajectories.
        """
        rows = config.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        meta = {
            "global_steps": self.global_steps,
            "mini_batch_size": rows,
            "global_batch_size": rows,
            "epochs": config.ppo_epochs,
            "seed": config.data_loader_seed,
            "shuffle": config.shuffle,
        }
        return DataProto(batch.batch, meta_info=batch.meta_info | meta)

    def _validate(self) -> dict[str, float]:
        """Greedy answers to the validation set, scored. verl: RayPPOTrainer._validate"""
        sources, uids, turns, infos = [], [], [], {}
        for batch_dict in self.val_dataloader:
            batch = DataProto.from_single_dict(batch_dict)
            batch.non_tensor_batch["uid"] = np.array(
                [str(uuid.uuid4()) for _ in range(len(batch))], dtype=object
            )
            batch = batch.repeat(self.config.actor_rollout_ref.rollout.val_kwargs.n, interleave=True)
            output = self.rollout.generate_sequences(
                DataProto(
                    non_tensor_batch={
                        key: batch.non_tensor_batch.pop(key)
                        for key in ("raw_prompt", "agent_name")
                        if key in batch.non_tensor_batch
                    },
                    meta_info={
                        "validate": True,
                        "global_steps": self.global_steps,
                        "rollout_seed": self.config.minirl.seed,
                    },
                )
            )
            output.meta_info.pop("timing")
            batch = batch.union(output)
            scores, extra = extract_reward(self.reward_manager(batch))
            for key, values in {"reward": scores.sum(-1).tolist(), **extra}.items():
                infos.setdefault(key, []).extend(list(values))
            sources.extend(batch.non_tensor_batch["data_source"])
            uids.extend(batch.non_tensor_batch["uid"])
            turns.append(batch.non_tensor_batch["__num_turns__"])
        return val_metrics_update(np.array(sources), uids, infos, turns)

    def _batch_metrics(self, batch: DataProto, metrics: dict, timing_raw: dict) -> dict[str, float]:
        ranks = self.actor_wg.world_size
        algorithm = self.config.algorithm
        components = algorithm.gdpo_reward_keys if algorithm.adv_estimator == "gdpo" else []
        return {
            **compute_data_metrics(batch, use_critic=self.use_critic),
            **compute_gdpo_metrics(batch, components),
            **compute_timing_metrics(batch, timing_raw),
            **compute_throughout_metrics(batch, timing_raw, n_gpus=ranks),
            **compute_variance_proxy_metrics(batch, gradient_norm=metrics.get("actor/grad_norm")),
        }

    def _is_due(self, freq: int, is_last_step: bool) -> bool:
        return freq > 0 and (is_last_step or self.global_steps % freq == 0)

    def _log(self, metrics: dict[str, float]) -> None:
        self.history.append({"step": self.global_steps, **metrics})
        if "console" in self.config.trainer.logger:
            tqdm.write(format_log_line(metrics, self.global_steps))

    def _save_checkpoint(self) -> None:
        """verl: RayPPOTrainer._save_checkpoint"""
        checkpoint.save(
            Path(self.config.trainer.default_local_dir),
            self.global_steps,
            self._trained_workers(),
            {
                "batches_drawn": self.batches_drawn,
                "kl_coef": self.kl_ctrl_in_reward.value,
                "config": OmegaConf.to_container(self.config, resolve=True),
            },
            keep=self.config.trainer.max_actor_ckpt_to_keep,
        )

    def _load_checkpoint(self) -> None:
        """Go on where an earlier run stopped. verl: RayPPOTrainer._load_checkpoint

        Raises:
            ValueError: `resume_from_path` is no checkpoint, or the checkpoint is from another configuration.
        """
        trainer = self.config.trainer
        if trainer.resume_mode == "disable":
            return
        if trainer.resume_mode == "resume_path":
            folder = Path(trainer.resume_from_path)
        else:
            folder = checkpoint.find_latest(Path(trainer.default_local_dir))
        if folder is None:
            return
        state = checkpoint.load(
            folder, self._trained_workers(), OmegaConf.to_container(self.config, resolve=True)
        )
        self.global_steps, self.batches_drawn = state["global_steps"], state["batches_drawn"]
        self.kl_ctrl_in_reward.value = state["kl_coef"]

    def _trained_workers(self) -> dict:
        return {"actor": self.actor_wg} | ({"critic": self.critic_wg} if self.use_critic else {})


def filter_values(batch: DataProto, metric: str) -> np.ndarray:
    """[B]: what a group must differ in to be kept: a column that compute_score returned, or the row's reward.

    `acc` is the usual choice: a shaped score differs even where all answers are wrong. `reward` is verl
    0.9's name, the two `seq_` are the recipe's; `score` is the row's reward where there is no such column.

    Raises:
        ValueError: no such column, or one that holds no numbers.
    """
    key, columns = f"algorithm.filter_groups.metric={metric}", batch.meta_info["reward_extra_keys"]
    rewards = ("score", "reward", "seq_reward", "seq_final_reward")
    if metric not in columns and metric not in rewards:
        raise ValueError(f"{key}: choose one of {', '.join(dict.fromkeys([*columns, *rewards]))}")
    if metric not in columns:
        return batch.batch["rm_scores"].sum(-1).numpy()
    try:
        return np.asarray(batch.non_tensor_batch[metric], dtype=np.float64)
    except (TypeError, ValueError):
        value = batch.non_tensor_batch[metric].tolist()[0]
        raise ValueError(
            f"{key}: compute_score returned {value!r} there, and only numbers can differ"
        ) from None


def compute_advantage(batch: DataProto, algorithm: DictConfig, *, seed: int = 0) -> DataProto:
    """advantages and returns [B, R] by `algorithm.adv_estimator`.

    verl: verl.trainer.ppo.ray_trainer:compute_advantage

    Every estimator is handed all there is and takes what its signature names.
    """
    tensors, optional = batch.batch, {}
    for key in ("values", "old_log_probs", "reward_baselines", "sum_pi_squared", "rollout_is_weights"):
        optional[key] = tensors.get(key, None)
    if algorithm.adv_estimator == "gdpo":
        optional["component_scores"] = gdpo_component_scores(
            batch.non_tensor_batch, algorithm.gdpo_reward_keys
        )
    advantages, returns = estimate_advantage(
        algorithm.adv_estimator,
        token_level_rewards=tensors["token_level_rewards"],
        response_mask=tensors["response_mask"],
        index=batch.non_tensor_batch.get("uid"),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        gdpo_reward_weights=algorithm.gdpo_reward_weights,
        config=algorithm,  # for a reader's own estimator, written in verl's manner
        **optional,
    )
    batch.batch["advantages"] = advantages
    batch.batch["returns"] = returns
    if algorithm.adv_estimator == "gae" and algorithm.use_pf_ppo:
        generator = torch.Generator().manual_seed(seed)  # of its own, so that a resumed run draws the same
        rows = pf_ppo_indices(tensors["token_level_scores"], generator=generator, **algorithm.pf_ppo)
        batch = batch.select_idxs(rows)
    return batch


def _named_metrics(output: DataProto, role: str) -> DataProto:
    """verl's names: the role in front of what the worker calls `loss`, `grad_norm`, `lr`, ..."""
    metrics = rename_dict(output.meta_info["metrics"], f"{role}/")
    metrics[f"perf/mfu/{role}"] = [
        0.0
    ]  # model FLOPs utilisation: verl reports 0 where it does not know the peak
    return DataProto(meta_info={"metrics": metrics})
