"""Every key of the configuration is read by some run: a key that nothing reads must not be offered."""

import sys

import pytest
import tiny_run
from omegaconf import DictConfig, OmegaConf

from minirl import main_ppo
from minirl.config import compose, validate
from minirl.config.compose import defaults
from minirl.config.overrides import key_paths

pytestmark = pytest.mark.slow

A, ALGO, ROLLOUT = "actor_rollout_ref.actor", "algorithm", "actor_rollout_ref.rollout"
# keys without a reader yet, each with the reason
VLLM = "read by the vLLM backend only, which needs vLLM"
UNREAD = {
    **{
        f"{ROLLOUT}.{key}": VLLM
        for key in (
            "dtype", "gpu_memory_utilization", "enforce_eager", "free_cache_engine", "engine_kwargs.vllm",
            "tensor_model_parallel_size", "max_num_batched_tokens", "max_model_len", "max_num_seqs",
            "enable_prefix_caching", "logprobs_mode",
        )
    },
    "minirl.worker_timeout": "read by the Ray placement only, which starts processes",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": "must equal the actor's, so only validate looks at it",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": "the actor worker uses ppo_max_token_len_per_gpu for both",
}  # fmt: skip
TEACHER = [
    "algorithm.adv_estimator=grpo",
    "distillation.enabled=true",
    "distillation.teacher_models.teacher_model.model_path=${actor_rollout_ref.model.path}",
]
RUNS = [
    ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true", "algorithm.use_kl_in_reward=true",
     "algorithm.kl_ctrl.type=adaptive", f"{A}.use_dynamic_bsz=true", f"{A}.optim.lr_scheduler_type=cosine",
     "critic.optim.lr_scheduler_type=cosine", "trainer.test_freq=2"],
    ["algorithm.adv_estimator=grpo", f"{A}.use_kl_loss=true", f"{A}.use_dynamic_bsz=true",
     f"{A}.clip_ratio_low=null", f"{A}.clip_ratio_high=null", "reward.reward_manager.name=dapo",
     f"{ROLLOUT}.calculate_log_probs=true", "data.filter_overlong_prompts=true", "trainer.save_freq=1"],
    [f"{A}.policy_loss.loss_mode=clip_cov", "algorithm.adv_estimator=grpo"],
    [f"{A}.policy_loss.loss_mode=kl_cov", "algorithm.adv_estimator=grpo"],
    [f"{A}.policy_loss.loss_mode=sapo", "algorithm.adv_estimator=grpo"],
    [f"{A}.policy_loss.loss_mode=dro", f"{A}.policy_loss.dro_beta=0.1", "algorithm.adv_estimator=grpo"],
    ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]",
     "algorithm.gdpo_reward_weights=[1.0]"],
    ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.mode=async",
     f"{ROLLOUT}.agent.default_agent_loop=tool_agent"],
    [*TEACHER, "distillation.distillation_loss.loss_mode=forward_kl_topk",
     "distillation.distillation_loss.topk=4"],
    [*TEACHER, "distillation.distillation_loss.use_policy_gradient=true"],
    ["algorithm.adv_estimator=grpo", f"{ALGO}.filter_groups.enable=true", "data.gen_batch_size=2",
     f"{ALGO}.filter_groups.metric=score", f"{ROLLOUT}.n=1", f"{A}.ppo_micro_batch_size_per_gpu=1"],
    ["algorithm.adv_estimator=grpo", f"{ALGO}.rollout_correction.bypass_mode=true",
     f"{ROLLOUT}.calculate_log_probs=true"],
]  # fmt: skip


@pytest.fixture
def read_keys(monkeypatch) -> set[str]:
    """Full paths of the keys that are looked up while the fixture is in place."""
    seen: set[str] = set()

    def recording(method):
        def lookup(self, key, *args, **kwargs):
            if isinstance(key, str) and not key.startswith("_"):
                seen.add(self._get_full_key(key))
            return method(self, key, *args, **kwargs)

        return lookup

    for name in ("__getattr__", "__getitem__", "get"):
        monkeypatch.setattr(DictConfig, name, recording(getattr(DictConfig, name)))
    return seen


def test_every_key_is_read_by_some_run(tmp_path, monkeypatch, read_keys):
    for check in ("validate", "check_names"):  # to check is not to read
        monkeypatch.setattr(f"minirl.trainer.{check}", lambda config: None)
    # through sys.modules, as the package's attribute `compose` is the function
    monkeypatch.setattr(sys.modules["minirl.config.compose"], "validate", lambda config: None)
    code = tmp_path / "mine.py"
    code.write_text(
        "from minirl.data.dataset import RLHFDataset\n"
        "def score(bonus, **kw):\n    return float(bonus)\n"
        "class Mine(RLHFDataset):\n    pass\n"
    )
    base = [
        *tiny_run.make(tmp_path),
        "trainer.logger=[]",
        f"reward.custom_reward_function.path={code}",
        "reward.custom_reward_function.name=score",
        "reward.custom_reward_function.reward_kwargs.bonus=1",
        f"data.custom_cls.path={code}",
        "data.custom_cls.name=Mine",
    ]
    for number, run in enumerate(RUNS):
        assert main_ppo.main([*base, *run, f"trainer.default_local_dir={tmp_path}/{number}"]) == 0, run
    resumed = [*base, *RUNS[1], "trainer.resume_mode=resume_path", "trainer.total_training_steps=3"]
    assert main_ppo.main([*resumed, f"trainer.resume_from_path={tmp_path}/1/global_step_2"]) == 0

    tree = OmegaConf.to_container(defaults(), resolve=False)
    paths = [path for path in key_paths(tree) if not path.endswith(".*")]
    leaves = {path for path in paths if not any(other.startswith(path + ".") for other in paths)}
    unread = {leaf for leaf in leaves if leaf not in read_keys}
    # read under another name: through an interpolation, or in the copy that bypass mode gives the loss
    unread -= {"trainer.project_name", "trainer.experiment_name", "data.max_response_length"}
    copied = f"{A}.policy_loss.rollout_correction."
    unread -= {key.replace(copied, "algorithm.rollout_correction.") for key in read_keys if copied in key}
    assert unread == {leaf for leaf in leaves if any(leaf == k or leaf.startswith(k + ".") for k in UNREAD)}


def test_the_runs_above_are_valid_configurations():
    for run in RUNS:
        validate(compose(run))
