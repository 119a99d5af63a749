"""`fsdp_config.dtype=bfloat16`: the forward pass multiplies in bfloat16, everything kept is float32."""

from functools import partial

import pytest
import torch
from runs import small, steady
from workers import tiny

from minirl.config import compose
from minirl.pin import find_symbol
from minirl.trainer import PPOTrainer
from minirl.workers.losses import ppo_loss, value_loss
from minirl.workers.model import compute_in, forward_log_probs, forward_values
from minirl.workers.training_worker import TrainingWorker

CONFIG = compose([])


def worker(role: str, dtype: str) -> TrainingWorker:
    if role == "actor":
        config = CONFIG.actor_rollout_ref.actor
        forward, loss, model = partial(forward_log_probs, temperature=0.7), ppo_loss, tiny.causal_lm()
    else:
        config, forward, loss, model = CONFIG.critic, forward_values, value_loss, tiny.value_model()
    return TrainingWorker(
        model, forward, name=role, loss_fn=partial(loss, config), optim=config.optim, dtype=dtype
    )


def gradients(w: TrainingWorker) -> torch.Tensor:
    """Of the whole batch's loss, before clipping and step."""
    batch = tiny.batch()
    batch.meta_info |= {"batch_num_tokens": int(batch.batch["response_mask"].sum()), "dp_size": 1}
    out = w.forward_fn(w.module, batch)
    assert all(value.dtype == torch.float32 for value in out.values())
    loss, _ = w.loss_fn(out, batch)
    assert loss.dtype == torch.float32
    loss.backward()
    return torch.cat([p.grad.flatten() for p in w.parameters])


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_are_near_those_of_float32_but_not_the_same(role):
    exact, rounded = gradients(worker(role, "float32")), gradients(worker(role, "bfloat16"))
    assert exact.dtype == rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert torch.nn.functional.cosine_similarity(rounded, exact, dim=0) > 0.995
    assert 0.95 < rounded.norm() / exact.norm() < 1.05


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_update_changes_float32_weights_and_reports_losses_near_float32s(role):
    start = torch.cat([p.detach().flatten() for p in worker(role, "float32").parameters])
    ends, losses = [], []
    for dtype in ("float32", "bfloat16"):
        w = worker(role, dtype)
        metrics = w.train_mini_batch(tiny.batch())
        assert all(torch.isfinite(torch.tensor(v)).all() for v in metrics.values()), metrics
        assert all(p.dtype == torch.float32 for p in w.parameters)
        assert all(slot["exp_avg"].dtype == torch.float32 for slot in w.optimizer.state.values())
        ends.append(torch.cat([p.detach().flatten() for p in w.parameters]))
        losses.append(torch.tensor(metrics["loss"]))
        assert not torch.equal(ends[-1], start)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.02)
    # Adam's first steps have the size of the learning rate whatever the gradient's, so a sign may differ
    assert torch.nn.functional.cosine_similarity(ends[1] - start, ends[0] - start, dim=0) > 0.95


def test_log_probs_and_temperature_are_computed_in_float32_from_bfloat16_logits():
    model, batch = tiny.causal_lm().eval(), tiny.batch()
    compute_in("bfloat16", model)
    with torch.no_grad():
        out = forward_log_probs(model, batch, temperature=0.7, calculate_entropy=True, keep_logits=True)
        logits = model(
            **{k: batch.batch[k] for k in ("input_ids", "attention_mask", "position_ids")}, use_cache=False
        ).logits
    assert logits.dtype == torch.bfloat16 and out["logits"].dtype == torch.float32
    width = out["logits"].shape[1]
    labels = batch.batch["responses"][:, :width, None]
    want = (
        (logits.float() / 0.7).log_softmax(-1)[:, tiny.P - 1 : tiny.P - 1 + width].gather(-1, labels)[..., 0]
    )
    mask = batch.batch["response_mask"][:, :width].bool()
    torch.testing.assert_close(out["log_probs"][:, :width][mask], want[mask], rtol=1e-6, atol=1e-6)


def test_the_fsdp_engine_of_the_pin_reads_mixed_precision_where_minirl_reads_dtype():
    engine = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
    source = "\n".join(find_symbol(engine).lines)
    assert 'mixed_precision_config.get("param_dtype", "bf16")' in source
    assert "engine_config.model_dtype" in source and "engine_config.dtype" not in source


def test_float32_leaves_the_forward_pass_alone():
    model = tiny.causal_lm()
    compute_in("float32", model)
    assert "forward" not in vars(model)


def test_a_run_in_bfloat16_is_near_the_one_in_float32_and_keeps_its_weights_in_float32():
    bf16 = [
        "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
        "actor_rollout_ref.ref.fsdp_config.dtype=bfloat16",
        "critic.fsdp.dtype=bfloat16",
    ]
    options = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True"]
    rounded = PPOTrainer(
        small(*options, *bf16, "actor_rollout_ref.rollout.calculate_log_probs=True", steps=2)
    )
    exact = PPOTrainer(small(*options, steps=2))
    (got, *_), (want, *_) = steady(rounded.fit()), steady(exact.fit())
    for key in ("actor/entropy", "actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/kl_loss"):
        assert got[key] == pytest.approx(want[key], rel=0.1, abs=1e-3), key
    assert got["critic/score/mean"] == want["critic/score/mean"]  # the rollout samples in float32
    # what it sampled is scored in bfloat16 when training: the gap that rollout correction is about
    assert 0 < got["training/rollout_probs_diff_mean"] < 0.02
    assert all(torch.isfinite(torch.tensor(float(v))) for v in got.values() if isinstance(v, int | float))
    for role in (rounded.actor_wg, rounded.critic_wg):
        assert {p.dtype for p in role.workers[0].module.parameters()} == {torch.float32}
