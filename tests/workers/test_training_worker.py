"""What an update may depend on, and what it may not."""

import copy
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from workers import tiny

from minirl.config import compose
from minirl.core_algos.agg_loss import LOSS_AGG_MODES
from minirl.single_controller.decorator import Dispatch, register
from minirl.single_controller.local import LocalWorkerGroup
from minirl.workers.losses import ppo_loss, value_loss
from minirl.workers.model import forward_log_probs, forward_values
from minirl.workers.training_worker import TrainingWorker

CONFIG = compose(["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.entropy_coeff=0.01"])


def actor_forward(module, data, **flags):
    return forward_log_probs(module, data, temperature=1.0, calculate_entropy=True)


def make_actor(mode="token-mean", **kwargs) -> TrainingWorker:
    actor = OmegaConf.merge(
        CONFIG, {"actor_rollout_ref": {"actor": {"loss_agg_mode": mode}}}
    ).actor_rollout_ref.actor
    return TrainingWorker(
        tiny.causal_lm(),
        actor_forward,
        name="actor",
        loss_fn=partial(ppo_loss, actor),
        optim=actor.optim,
        **kwargs,
    )


def make_critic(mode="token-mean", **kwargs) -> TrainingWorker:
    critic = OmegaConf.merge(CONFIG, {"critic": {"loss_agg_mode": mode}}).critic
    return TrainingWorker(
        tiny.value_model(),
        forward_values,
        name="critic",
        loss_fn=partial(value_loss, critic),
        optim=critic.optim,
        **kwargs,
    )


def weights(worker: TrainingWorker) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in worker.parameters])


@pytest.mark.parametrize("make", [make_actor, make_critic])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("micro", [{"micro_batch_size": 1}, {"micro_batch_size": 2}, {"max_token_len": 30}])
def test_micro_batch_size_changes_memory_and_nothing_else(make, mode, micro):
    whole, cut = make(mode), make(mode, **micro)
    got, want = cut.train_mini_batch(tiny.batch()), whole.train_mini_batch(tiny.batch())
    assert weights(whole).shape == weights(cut).shape
    torch.testing.assert_close(weights(cut), weights(whole), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(torch.tensor(got["loss"]), torch.tensor(want["loss"]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.tensor(got["grad_norm"]), torch.tensor(want["grad_norm"]), rtol=1e-3, atol=1e-5
    )


def test_padding_width_does_not_change_the_update():
    narrow, wide = make_actor(), make_actor()
    batch, padded = tiny.batch(), tiny.batch()
    extra = 5
    for key, value in padded.batch.items():
        right = torch.nn.functional.pad(value, (0, extra))
        padded.batch[key] = right if value.shape[1] != tiny.P else torch.nn.functional.pad(value, (extra, 0))
    padded.batch["prompts"] = torch.nn.functional.pad(batch.batch["prompts"], (extra, 0))
    for key in ("input_ids", "attention_mask", "position_ids"):
        padded.batch[key] = torch.nn.functional.pad(batch.batch[key], (extra, extra))
    narrow.train_mini_batch(batch)
    wide.train_mini_batch(padded)
    torch.testing.assert_close(weights(wide), weights(narrow), rtol=1e-4, atol=2e-5)


def test_one_optimizer_step_per_mini_batch_and_epoch():
    worker = make_actor()
    metrics = worker.train_mini_batch(tiny.batch())
    assert len(metrics["grad_norm"]) == 2 * 2  # (8 rows / 4) mini-batches, 2 epochs
    assert len(metrics["lr"]) == 1  # the schedule moves once per update call


def test_first_step_has_ratio_one_and_no_clipping_when_old_is_the_model_itself():
    worker, batch = make_actor(), tiny.batch()
    batch.batch["old_log_probs"] = worker.infer_batch(batch)["log_probs"]
    batch.meta_info |= {"mini_batch_size": 8, "global_batch_size": 8, "epochs": 1}
    metrics = worker.train_mini_batch(batch)
    assert metrics["actor/pg_clipfrac"] == [0.0]
    assert abs(metrics["actor/ppo_kl"][0]) < 1e-6


def test_infer_batch_gives_rows_back_in_their_order_with_token_sized_micro_batches():
    batch = tiny.batch()
    want = make_actor().infer_batch(batch)["log_probs"]
    got = make_actor(max_token_len=25).infer_batch(batch)["log_probs"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["advantages", "old_log_probs"])
def test_non_finite_loss_stops_before_the_weights_change_and_names_the_key(key):
    worker, batch = make_actor(), tiny.batch()
    batch.meta_info["global_steps"] = 3
    batch.batch[key][1, 0] = float("nan")
    before = weights(worker)
    with pytest.raises(FloatingPointError, match=f"step 3.*{key}.*1"):
        worker.train_mini_batch(batch)
    assert torch.equal(weights(worker), before)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_mini_batch_without_a_token_leaves_the_weights_alone_whatever_adam_remembers(mode):
    worker, batch = make_actor(mode=mode), tiny.batch()
    worker.train_mini_batch(batch)  # now the optimizer has momentum
    before = weights(worker)
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    metrics = worker.train_mini_batch(batch)
    assert metrics["actor/pg_loss"] == [0.0] * 4 and metrics["grad_norm"] == [0.0] * 4
    assert torch.equal(weights(worker), before)


def test_rows_that_do_not_divide_are_refused_with_the_numbers():
    batch = tiny.batch(rows=6)
    batch.meta_info["mini_batch_size"] = 4
    with pytest.raises(ValueError, match="6 trajectories.*mini-batches of 4"):
        make_actor().train_mini_batch(batch)
    batch.meta_info["mini_batch_size"] = 6
    with pytest.raises(ValueError, match="6 trajectories.*micro-batches of 4"):
        make_actor(micro_batch_size=4).train_mini_batch(batch)


class Trained(TrainingWorker):
    def __init__(self, module, *, group):
        actor = CONFIG.actor_rollout_ref.actor
        super().__init__(
            copy.deepcopy(module),
            actor_forward,
            name="actor",
            loss_fn=partial(ppo_loss, actor),
            optim=actor.optim,
            group=group,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data):
        return self.train_mini_batch(data)


def test_two_virtual_ranks_end_with_the_weights_of_one():
    # interleaved, so that rank 0's and rank 1's first mini-batches together are the single rank's first
    batch = tiny.batch()
    halves = batch.select_idxs([0, 1, 4, 5, 2, 3, 6, 7])
    one = LocalWorkerGroup(Trained, tiny.causal_lm())
    two = LocalWorkerGroup(Trained, tiny.causal_lm(), world_size=2)
    one.update(batch)
    two.update(halves)
    torch.testing.assert_close(weights(two.workers[0]), weights(one.workers[0]), rtol=1e-4, atol=2e-5)
    assert torch.equal(weights(two.workers[0]), weights(two.workers[1]))


def test_cosine_schedule_warms_up_and_ends_at_the_minimum():
    from minirl.workers.training_worker import build_lr_scheduler

    optim = OmegaConf.merge(
        CONFIG.actor_rollout_ref.actor.optim,
        {
            "lr_scheduler_type": "cosine",
            "lr_warmup_steps": 2,
            "total_training_steps": 10,
            "min_lr_ratio": 0.1,
        },
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = build_lr_scheduler(optimizer, optim)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:3] == [0.0, 0.5, 1.0]
    assert schedule.get_last_lr()[0] == pytest.approx(0.1)
