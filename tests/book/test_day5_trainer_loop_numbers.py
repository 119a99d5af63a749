"""The hand-sized numbers that book/week1/day5_trainer_loop.md states, run with verl 0.8.0."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minirl.pin import LATER, find_symbol, use_verl, verl_root

pytestmark = pytest.mark.oracle
use_verl()

# row 1: two tokens of loss 1; row 2: six tokens of loss 3
MASK = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
LOSS = torch.tensor([[1.0], [3.0]]).expand(2, 6)


def test_the_four_ways_to_average_two_micro_batches():
    from verl.trainer.ppo.core_algos import agg_loss

    def mean(rows, **info):
        return agg_loss(LOSS[rows], MASK[rows], "token-mean", **info).item()

    own = [mean([0]), mean([1])]
    assert mean([0, 1]) == pytest.approx(2.5)
    assert sum(own) / 2 == pytest.approx(2.0)
    assert sum(own) == pytest.approx(4.0)
    tokens = int(MASK.sum())
    shares = [mean([row], batch_num_tokens=tokens, global_batch_size=2, dp_size=1) for row in (0, 1)]
    assert shares == pytest.approx([2 / 8, 18 / 8])
    assert sum(shares) == pytest.approx(2.5)


def test_verl_s_value_loss_adds_up_to_the_third_row_and_minirl_s_to_the_last():
    from verl.trainer.ppo.core_algos import compute_value_loss as verl_loss

    from minirl.core_algos.value_loss import compute_value_loss as minirl_loss

    returns = torch.zeros(2, 6)
    values = (2 * LOSS).sqrt()  # half a squared error of 1 and of 3
    given = {"cliprange_value": 0.5, "loss_agg_mode": "token-mean"}

    def total(loss, **info):
        rows = [{"vpreds": values[[i]], "values": values[[i]], "returns": returns[[i]]} for i in (0, 1)]
        return sum(
            loss(**row, response_mask=MASK[[i]], **given, **info)[0].item() for i, row in enumerate(rows)
        )

    assert total(verl_loss) == pytest.approx(4.0)
    assert total(minirl_loss, batch_num_tokens=8, global_batch_size=2) == pytest.approx(2.5)


def test_the_default_batch_of_the_picture():
    from minirl import config

    cfg = config.compose([])
    prompts, mini = cfg.data.train_batch_size, cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    n = cfg.actor_rollout_ref.rollout.n
    assert (prompts, mini, n) == (16, 4, 8)
    assert (prompts * n, mini * n, prompts // mini) == (128, 32, 4)


def test_loss_is_zero_with_a_gradient_when_the_ratio_is_one():
    from minirl.core_algos.policy_loss import get_policy_loss_fn

    log_prob = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]], requires_grad=True)
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    loss, metrics = get_policy_loss_fn("vanilla")(
        log_prob.detach(),
        log_prob,
        torch.tensor([[1.0, 1.0], [-1.0, -1.0]]),
        torch.ones(2, 2),
        loss_agg_mode="token-mean",
        config=config,
    )
    loss.backward()
    assert loss.item() == 0.0
    assert metrics["actor/ppo_kl"] == 0.0
    assert log_prob.grad.norm() > 0


def test_micro_batches_that_do_not_divide_are_refused():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import prepare_micro_batches

    data = TensorDict({"input_ids": torch.zeros(6, 2)}, batch_size=6)
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=4)
    with pytest.raises(AssertionError, match="divisible"):
        prepare_micro_batches(data)


def balanced(lengths: list[int], ranks: int) -> list[int]:
    """The lengths in the order that verl's `_balance_batch` leaves them in."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    attention_mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    batch = DataProto.from_single_dict({"attention_mask": attention_mask})
    trainer = SimpleNamespace(_get_dp_size=lambda group, role: ranks, actor_rollout_wg=None)
    RayPPOTrainer._balance_batch(trainer, batch, metrics={})
    return batch.batch["attention_mask"].sum(-1).tolist()


def test_balancing_keeps_the_longest_rows_of_a_rank_in_the_middle():
    """One rank: sorted by length, every second row, then the others backwards."""
    assert balanced([3, 1, 4, 2, 5, 9], ranks=1) == [1, 3, 5, 9, 4, 2]


def test_unshuffled_the_first_and_the_last_mini_batch_hold_the_short_rows():
    order = balanced(list(range(1, 17)), ranks=1)
    minis = [sum(order[start : start + 4]) / 4 for start in range(0, 16, 4)]
    assert max(minis[0], minis[3]) < min(minis[1], minis[2])


def test_the_example_of_cutting_by_tokens():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import prepare_micro_batches

    lengths = [900, 1200, 1500]
    mask = (torch.arange(1500) < torch.tensor(lengths)[:, None]).long()
    data = TensorDict({"input_ids": mask, "attention_mask": mask}, batch_size=3)
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=3000)
    _, rows = prepare_micro_batches(data)
    assert [[lengths[row] for row in block] for block in rows] == [[900, 1200], [1500]]


@pytest.fixture
def update(monkeypatch):
    """verl's `TrainingWorker` on one process without a group, around an engine that counts its calls.

    Cut and order are verl's; the engine's value loss is that of every micro-batch's own rows.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers import engine_workers
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

    class CountingEngine(BaseEngine):
        def __init__(self):
            self.calls = []

        def train_mode(self, **kwargs):
            return nullcontext()

        def get_data_parallel_size(self):
            return 1

        def get_data_parallel_rank(self):
            return 0

        def get_data_parallel_group(self):
            return None

        def is_mp_src_rank_with_outputs(self):
            return True

        def optimizer_zero_grad(self):
            self.calls.append("zero_grad")

        def optimizer_step(self):
            self.calls.append("step")
            return 1.0

        def lr_scheduler_step(self):
            self.calls.append("lr")
            return 1e-5

        def forward_backward_batch(self, data, loss_function, forward_only=False):
            micro_batches, indices = prepare_micro_batches(data)
            outputs = []
            for micro in micro_batches:
                self.calls.append("backward")
                loss = micro["row"].float().mean().item()
                outputs.append({"loss": loss, "metrics": {"critic/vf_loss": loss}})
            return postprocess_batch_func(outputs, indices, data)

    # without a process group verl's gathering is that of one rank: a list with one entry
    device = SimpleNamespace(max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0)
    monkeypatch.setattr(engine_workers, "get_torch_device", lambda: device)
    monkeypatch.setattr(
        engine_workers, "allgather_dict_into_dict", lambda data, group: {k: [v] for k, v in data.items()}
    )
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    worker = object.__new__(engine_workers.TrainingWorker)
    worker.engine, worker.loss_fn, worker.device_name, worker.flops_counter = (
        CountingEngine(),
        max,
        "cpu",
        None,
    )
    worker.engine.get_data_parallel_group = lambda: "one rank"
    worker.model_config = {}
    worker.engine_config = SimpleNamespace(
        forward_only=False,
        use_dynamic_bsz=False,
        max_token_len_per_gpu=None,
        micro_batch_size_per_gpu=8,
        use_fused_kernels=False,
    )

    def train(epochs: int):
        from tensordict import TensorDict

        data = TensorDict({"row": torch.arange(128)}, batch_size=128)
        tu.assign_non_tensor(
            data, mini_batch_size=32, epochs=epochs, seed=1, dataloader_kwargs={"shuffle": False}
        )
        tu.assign_non_tensor(data, global_token_num=None)
        output = engine_workers.TrainingWorker.train_mini_batch(worker, data)
        return worker.engine.calls, tu.get(output, "metrics")

    return train


@pytest.mark.parametrize(("epochs", "backward", "steps"), [(1, 16, 4), (2, 32, 8)])
def test_three_loops_count_backward_passes_steps_and_one_step_of_the_learning_rate(
    update, epochs, backward, steps
):
    calls, _ = update(epochs)
    assert (calls.count("backward"), calls.count("step"), calls.count("lr")) == (backward, steps, 1)
    assert calls[:6] == ["zero_grad", *["backward"] * 4, "step"]
    assert calls[-1] == "lr"


def test_loss_over_vf_loss_in_the_log_is_the_number_of_blocks_of_a_mini_batch(update):
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    _, metrics = update(1)
    logged = reduce_metrics(rename_dict(metrics, "critic/"))
    assert logged["critic/loss"] / logged["critic/vf_loss"] == pytest.approx(4)


def test_explained_variance_of_day_3_s_five_tokens():
    from verl import DataProto
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    returns = torch.tensor([[0.60625, 0.6125, 0.825, 0.95, 1.0]])
    values = torch.tensor([[0.5, 0.6, 0.4, 0.7, 0.9]])
    assert (returns - values).var().item() == pytest.approx(0.0262, abs=5e-5)
    assert returns.var().item() == pytest.approx(0.0340, abs=5e-5)

    def explained(values):
        ones = torch.ones(1, 5)
        zeros = dict.fromkeys(("token_level_scores", "token_level_rewards", "advantages"), torch.zeros(1, 5))
        given = {
            "prompts": torch.ones(1, 1),
            "responses": ones,
            "response_mask": ones,
            "attention_mask": torch.ones(1, 6),
        }
        batch = DataProto.from_single_dict({**given, **zeros, "returns": returns, "values": values})
        batch.non_tensor_batch["__num_turns__"] = np.array([2])
        return compute_data_metrics(batch)["critic/vf_explained_var"]

    assert explained(values) == pytest.approx(0.23, abs=0.005)
    assert explained(returns) == pytest.approx(1)
    assert explained(returns.mean().expand(1, 5)) == pytest.approx(0, abs=1e-3)
    assert explained(1 - returns) < 0


def test_adam_hardly_minds_a_constant_factor_but_minds_one_that_changes():
    def walk(factors):
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
        for gradient, factor in zip([1.0, -0.5, 1.0, -0.5, 1.0, -0.5], factors, strict=True):
            weight.grad = torch.tensor([gradient * factor])
            optimizer.step()
        return weight.item()

    assert walk([4] * 6) == pytest.approx(walk([1] * 6), rel=1e-4)
    assert abs(walk([4, 1] * 3) - walk([1] * 6)) > 0.1 * abs(walk([1] * 6))


def test_the_later_version_gives_the_value_loss_its_global_counts():
    spec = "verl.workers.utils.losses:value_loss"
    here, later = ("\n".join(find_symbol(spec, *version).lines) for version in ((), (LATER,)))
    for name in (
        "dp_size=dp_size",
        "batch_num_tokens=batch_num_tokens",
        "global_batch_size=global_batch_size",
    ):
        assert name in later and name not in here


def test_the_later_version_still_cuts_the_critic_by_tokens():
    spec = "verl.trainer.ppo.ray_trainer:RayPPOTrainer.init_workers"
    for version in ((), (LATER,)):
        source = "\n".join(find_symbol(spec, *version).lines)
        handed = {line.split("=")[0].strip() for line in source.splitlines() if "engine_config." in line}
        assert handed == {"engine_config.infer_max_token_len_per_gpu", "engine_config.max_token_len_per_gpu"}


def test_validation_is_greedy_and_samples_one_by_default():
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(verl_root() / "verl/trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm"])
    rollout = config.actor_rollout_ref.rollout
    assert rollout.val_kwargs.do_sample is False and rollout.val_kwargs.n == 1
    assert rollout.do_sample is True
