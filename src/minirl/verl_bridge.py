"""verl's own `RayPPOTrainer.fit()`, driven on this machine by minirl's workers and sampler.

The control flow, dataset, dataloader, padding code, advantage code, losses and metrics are the pinned verl's;
models, optimizers, sampling and scoring are minirl's. So the code that the chapters explain is what runs.
Stand-ins: Ray worker groups, the rollout servers, the weight sync. The only file that imports verl.
verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from minirl.pin import use_verl, verl_root
from minirl.protocol import DataProto
from minirl.reward.manager import load_reward_manager
from minirl.rollout.load import load_rollout
from minirl.trace import station
from minirl.workers.actor import ActorWorker
from minirl.workers.critic import CriticWorker
from minirl.workers.model import load_tokenizer
from minirl.workers.ref import RefWorker
from minirl.workers.training_worker import TrainingWorker, memory_metrics

use_verl()

import verl.utils.attention_utils as attention_utils  # noqa: E402
import verl.utils.npu_flash_attn_utils as torch_unpadding  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from verl import DataProto as VerlDataProto  # noqa: E402
from verl.trainer.ppo import ray_trainer  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.utils.metric import Metric  # noqa: E402
from verl.utils.py_functional import append_to_dict  # noqa: E402
from verl.workers.engine.utils import prepare_micro_batches  # noqa: E402
from verl.workers.utils.losses import ppo_loss, value_loss  # noqa: E402

# verl un-pads with flash_attn's kernels, which need a GPU; it ships the same four functions in plain torch
attention_utils._get_attention_functions = lambda: (
    torch_unpadding.index_first_axis,
    torch_unpadding.pad_input,
    torch_unpadding.rearrange,
    torch_unpadding.unpad_input,
)


def verl_config(config: DictConfig) -> DictConfig:
    """verl's own composed configuration, with every key that minirl's configuration shares with it set
    alike.
    """
    with initialize_config_dir(str(verl_root() / "verl" / "trainer" / "config"), version_base=None):
        theirs = compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm"])
    with open_dict(theirs):
        for key, value in _leaves(OmegaConf.to_container(config, resolve=True)):
            known = OmegaConf.select(theirs, key, default=_leaves) is not _leaves
            known |= key.startswith("algorithm.gdpo_reward_")  # read, though absent from the yaml
            if known and key not in ("actor_rollout_ref.rollout.name", "actor_rollout_ref.rollout.mode"):
                OmegaConf.update(theirs, key, value)
        theirs.actor_rollout_ref.rollout.agent.num_workers = 1  # rows need not divide by agent workers
        theirs.trainer.logger = ["console"]
    return theirs


def _leaves(node: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class VerlTrainer:
    """The pinned `RayPPOTrainer` around minirl's workers.

    Args:
        config: minirl's configuration; verl's is derived from it.
        compute_score: as for `minirl.trainer.PPOTrainer`.

    Attributes:
        trainer: the `RayPPOTrainer` itself.
        history: the metrics of every logged step.
    """

    def __init__(self, config: DictConfig, *, compute_score: Callable | None = None) -> None:
        torch.set_num_threads(config.minirl.num_threads)
        self.config = verl_config(config)
        self.seed = config.minirl.seed
        self.history: list[dict[str, float]] = []
        self.tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        self.reward_manager = load_reward_manager(config, self.tokenizer, compute_score=compute_score)
        self.actor = ActorWorker(config.actor_rollout_ref)
        self.rollout = load_rollout(
            config.actor_rollout_ref.rollout, self.actor.module, self.tokenizer, config.minirl.rollout
        )
        self.trainer = self._assemble(config)

    def _assemble(self, config: DictConfig) -> ray_trainer.RayPPOTrainer:
        """What `RayPPOTrainer.__init__` and `init_workers` leave behind, without Ray."""
        trainer = object.__new__(ray_trainer.RayPPOTrainer)
        trainer.config = self.config
        trainer.tokenizer, trainer.processor = self.tokenizer, None
        trainer.use_rm = trainer.ref_in_actor = trainer.use_prefix_grouper = trainer.use_teacher_policy = (
            False
        )
        trainer.distillation_config = None
        trainer.use_critic = ray_trainer.need_critic(self.config)
        trainer.use_reference_policy = ray_trainer.need_reference_policy(self.config)
        trainer._init_dump_executor()
        trainer._create_dataloader(None, None, None, None)
        if self.config.algorithm.use_kl_in_reward:
            trainer.kl_ctrl_in_reward = ray_trainer.core_algos.get_kl_controller(
                self.config.algorithm.kl_ctrl
            )

        actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        trainer.actor_rollout_wg = WorkerGroup(self.actor, functools.partial(ppo_loss, config=actor_config))
        if trainer.use_reference_policy:
            trainer.ref_policy_wg = WorkerGroup(RefWorker(config.actor_rollout_ref))
        if trainer.use_critic:
            critic = CriticWorker(config.critic)
            trainer.critic_wg = WorkerGroup(critic, functools.partial(value_loss, config=self.config.critic))
        trainer.async_rollout_manager = types.SimpleNamespace(generate_sequences=self._generate_sequences)
        trainer.checkpoint_manager = types.SimpleNamespace(
            update_weights=self._update_weights, sleep_replicas=self.rollout.sleep
        )
        trainer.llm_server_manager = None
        trainer.resource_pool_manager = types.SimpleNamespace(get_n_gpus=lambda: 1)
        return trainer

    def fit(self) -> list[dict[str, float]]:
        """Run verl's `fit()`; returns the metrics of every step."""
        with ExitStack() as patches:
            patches.enter_context(mock.patch("verl.utils.tracking.Tracking", self._tracking))
            for patch in Walk(self.trainer).patches():
                patches.enter_context(patch)
            self.trainer.fit()
        return self.history

    def _tracking(self, **_) -> types.SimpleNamespace:
        """Keeps what verl logs instead of printing it."""
        return types.SimpleNamespace(log=lambda data, step: self.history.append({"step": step, **data}))

    def _generate_sequences(self, gen_batch: VerlDataProto) -> VerlDataProto:
        """Stands in for `AgentLoopManager`: responses and, as on verl's default path, their scores."""
        ours = DataProto(
            gen_batch.batch, gen_batch.non_tensor_batch, {**gen_batch.meta_info, "rollout_seed": self.seed}
        )
        output = self.rollout.generate_sequences(ours)
        scored = DataProto(output.batch, {**gen_batch.non_tensor_batch, **output.non_tensor_batch})
        output = output.union(self.reward_manager(scored))
        return VerlDataProto(output.batch, output.non_tensor_batch, output.meta_info)

    def _update_weights(self, global_steps: int | None = None) -> None:
        """Stands in for `CheckpointEngineManager.update_weights`, which also wakes the rollout."""
        self.rollout.update_weights(self.actor.named_weights(), version=global_steps)


class Walk:
    """Follows verl's `fit()` from call to call, and tells `minirl.trace` where each station ends.

    `fit()` unites what a call returns only after the call, so the batch after a station is put together here.
    """

    def __init__(self, trainer: ray_trainer.RayPPOTrainer) -> None:
        self.trainer = trainer
        self.batch: VerlDataProto | None = None  # as the last station left it
        self.open = None
        self.validating = False

    def patches(self) -> Iterator:
        trainer, manager = self.trainer, self.trainer.async_rollout_manager
        for owner, name, hook in [
            (trainer, "_validate", self._validate),
            (trainer, "_get_gen_batch", self._get_gen_batch),
            (manager, "generate_sequences", self._generate_sequences),
            (ray_trainer, "extract_reward", self._extract_reward),
            (trainer, "_compute_old_log_prob", self._compute_old_log_prob),
            (trainer, "_compute_ref_log_prob", self._compute_ref_log_prob),
            (trainer, "_compute_values", self._compute_values),
            (ray_trainer, "compute_advantage", self._compute_advantage),
            (trainer, "_update_critic", functools.partial(self._update, "update_critic")),
            (trainer, "_update_actor", functools.partial(self._update, "update_actor")),
            (trainer.checkpoint_manager, "update_weights", self._update_weights),
        ]:
            original = getattr(owner, name, None)
            if original is not None:
                yield mock.patch.object(owner, name, functools.partial(hook, original))

    def _enter(self, name: str, batch) -> None:
        self.open = station(name, batch)
        self.open.__enter__()

    def _leave(self, batch: VerlDataProto) -> None:
        self.open.done(batch)
        self.batch = batch

    def _united(self, result: VerlDataProto, *, without: str = "") -> VerlDataProto:
        batch = self.batch.batch.clone(recurse=False)
        batch.update({key: value for key, value in result.batch.items() if key != without})
        return VerlDataProto(batch, dict(self.batch.non_tensor_batch), dict(self.batch.meta_info))

    def _validate(self, original, *args):
        self.validating = True
        result = original(*args)
        self.validating = False
        return result

    def _get_gen_batch(self, original, batch):
        if self.validating:
            return original(batch)
        self._enter("load", {})
        self._leave(batch)
        self._enter("gen_batch", batch)  # ends after the repeat, in generate_sequences
        return original(batch)

    def _generate_sequences(self, original, gen_batch):
        if self.validating:
            return original(gen_batch)
        self._leave(gen_batch)
        self._enter("rollout", gen_batch)  # ends when the reward is extracted from the united, balanced batch
        return original(gen_batch)

    def _extract_reward(self, original, batch):
        if self.validating:
            return original(batch)
        self._leave(batch)
        self._enter("reward", batch)
        result = original(batch)
        self._leave(batch)
        self._enter("log_prob", batch)
        return result

    def _compute_old_log_prob(self, original, batch):
        self.batch = batch
        result, mfu = original(batch)
        self.batch = self._united(result, without="entropys")  # fit pops the entropies before it unites
        if not self.trainer.use_reference_policy:
            self._after_log_probs()
        return result, mfu

    def _compute_ref_log_prob(self, original, batch):
        result = original(batch)
        self.batch = self._united(result)
        self._after_log_probs()
        return result

    def _after_log_probs(self) -> None:
        self._leave(self.batch)
        self._enter("values" if self.trainer.use_critic else "advantage", self.batch)

    def _compute_values(self, original, batch):
        result = original(batch)
        self._leave(self._united(result))
        self._enter("advantage", self.batch)
        return result

    def _compute_advantage(self, original, batch, **kwargs):
        result = original(batch, **kwargs)
        self._leave(result)
        return result

    def _update(self, name: str, original, batch):
        with station(name, batch) as seen:
            result = original(batch)
            seen.done(result)
        return result

    def _update_weights(self, original, *args):
        with station("sync", self.batch) as seen:
            original(*args)
            seen.done(self.batch)


class WorkerGroup:
    """Stands in for a Ray worker group of one rank: verl's calls on a minirl worker.

    verl: verl.workers.engine_workers:TrainingWorker
    """

    _dispatch_info = {"actor": [0]}

    def __init__(self, worker: TrainingWorker, loss_fn: Callable | None = None) -> None:
        self.worker, self.loss_fn = worker, loss_fn

    def compute_log_prob(self, data):
        flags = {key: tu.get(data, key) for key in ("calculate_entropy", "calculate_sum_pi_squared")}
        return self._infer(data, **flags)

    def compute_ref_log_prob(self, data):
        return self._infer(data)

    def infer_batch(self, data):
        output = self._infer(data)
        return types.SimpleNamespace(get=lambda: output)

    def update_actor(self, data):
        return self._train(data)

    def train_mini_batch(self, data):
        output = self._train(data)
        return types.SimpleNamespace(get=lambda: output)

    def _infer(self, data, **flags):
        padded = _padded(data)
        output = {k: _no_padding(v, padded) for k, v in self.worker.infer_batch(padded, **flags).items()}
        return tu.get_tensordict(output, {"metrics": {"mfu": 0.0}})

    def _train(self, data):
        """verl's mini- and micro-batches and losses, minirl's forward pass, optimizer and schedule."""
        size, epochs = tu.pop(data, "mini_batch_size"), tu.pop(data, "epochs")
        seed, kwargs = tu.pop(data, "seed"), tu.pop(data, "dataloader_kwargs")
        worker, metrics = self.worker, {}
        worker.module.train()
        mini_batches = list(tu.make_iterator(data, size, epochs, seed=seed, dataloader_kwargs=kwargs))
        for i, mini_batch in enumerate(mini_batches):
            tu.assign_non_tensor(
                mini_batch,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=min(worker.micro_batch_size or size, size),
                batch_num_tokens=mini_batch["loss_mask"].sum().item(),
                dp_size=1,
            )
            worker.optimizer.zero_grad()
            step: dict = {}
            total = 0.0
            for micro in prepare_micro_batches(mini_batch)[0]:
                padded = _padded(micro)
                output = {
                    k: _no_padding(v, padded) for k, v in worker.forward_fn(worker.module, padded).items()
                }
                loss, micro_metrics = self.loss_fn(model_output=output, data=micro)
                loss.backward()
                total += loss.item()
                append_to_dict(step, micro_metrics)
            step = {k: v.aggregate() if isinstance(v, Metric) else v for k, v in step.items()}
            grad_norm = torch.nn.utils.clip_grad_norm_(worker.parameters, max_norm=worker.clip_grad)
            worker.optimizer.step()
            step |= {"loss": total, "grad_norm": grad_norm.item(), "mfu": 0.0}
            if i == len(mini_batches) - 1:
                worker.lr_scheduler.step()
                step["lr"] = worker.lr_scheduler.get_last_lr()[0]
            append_to_dict(metrics, step | memory_metrics(worker.parameters[0].device))
        return tu.get_tensordict({}, {"metrics": metrics})


def _padded(data) -> DataProto:
    """verl's no-padding TensorDict as padded rows: prompts, responses and attention_mask are still in it."""
    mask = data["attention_mask"]
    tensors = {
        "prompts": data["prompts"],
        "responses": data["responses"],
        "response_mask": data["response_mask"],
        "attention_mask": mask,
        "input_ids": torch.cat([data["prompts"], data["responses"]], 1),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0) * mask,
    }
    meta = {
        "temperature": tu.get(data, "temperature", 1.0),
        "calculate_entropy": tu.get(data, "calculate_entropy", False),
    }
    return DataProto.from_dict(tensors, meta_info=meta)


def _no_padding(values: Tensor, padded: DataProto) -> Tensor:
    """[B, R] as verl's engines give it: jagged over prompt and response, one position to the left."""
    width = padded.batch["prompts"].shape[1]
    mask = padded.batch["attention_mask"]
    rows = []
    for row, prompt, response in zip(values, mask[:, :width].sum(1), mask[:, width:].sum(1), strict=True):
        rows.append(torch.nn.functional.pad(row[:response], (int(prompt) - 1, 1)))
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
