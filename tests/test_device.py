"""No tensor is made on the wrong device: whole steps on a GPU that is not there (see pretend_cuda.py)."""

import pytest
import torch
from pretend_cuda import GpuTensor, pretend_cuda
from runs import small

from minirl.trainer import PPOTrainer


def test_the_pretended_gpu_refuses_what_a_gpu_refuses():
    with pretend_cuda():
        gpu, cpu = torch.zeros(3, 2, device="cuda"), torch.ones(3, 2)
        assert gpu.device.type == "cuda" and (gpu + 1).device.type == "cuda"
        assert gpu[torch.tensor([0, 2])].shape == (2, 2)  # a CPU index is allowed
        assert gpu.cpu().device.type == "cpu" and type(gpu.cpu()) is torch.Tensor
        with pytest.raises(RuntimeError, match="tensors on cuda:0 and cpu"):
            gpu + cpu
        with pytest.raises(RuntimeError, match="indexed by one on cuda"):
            cpu[torch.tensor([0], device="cuda")]
        with pytest.raises(TypeError, match="numpy"):
            gpu.numpy()


RUNS = {
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"],
    "grpo": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true",
             "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.entropy_coeff=0.01",
             "actor_rollout_ref.rollout.calculate_log_probs=true",
             "actor_rollout_ref.rollout.temperature=0.6", "actor_rollout_ref.rollout.top_p=0.9"],
    "remax": ["algorithm.adv_estimator=remax"],
    "optimal_token_baseline": ["algorithm.adv_estimator=optimal_token_baseline",
                               "actor_rollout_ref.actor.calculate_sum_pi_squared=true"],
    "clip_cov": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"],
    "bypass": ["algorithm.adv_estimator=grpo", "algorithm.rollout_correction.bypass_mode=true",
               "algorithm.rollout_correction.rollout_is=token",
               "actor_rollout_ref.rollout.calculate_log_probs=true"],
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_step_on_cuda_keeps_models_there_and_gives_the_cpus_numbers(name):
    options = [*RUNS[name], "data.val_max_samples=4"]
    want = PPOTrainer(small(*options, steps=1)).fit()[-1]
    with pretend_cuda():
        trainer = PPOTrainer(small(*options, "trainer.device=cuda", steps=1))
        got = trainer.fit()[-1]
    for group in (trainer.actor_wg, trainer.ref_wg, trainer.critic_wg):
        if group is not None:
            assert all(type(p.data) is GpuTensor for p in group.workers[0].module.parameters())
    for key in ("actor/loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"):
        assert got[key] == pytest.approx(want[key], rel=1e-3, abs=1e-6), key
