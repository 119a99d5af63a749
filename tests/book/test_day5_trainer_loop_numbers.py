"""The hand-sized numbers that book/week1/day5_trainer_loop.md states, run with verl 0.8.0."""

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
    from types import SimpleNamespace

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


def test_balancing_keeps_the_longest_rows_of_a_rank_in_the_middle():
    """One rank: sorted by length, every second row, then the others backwards."""
    text = "\n".join(find_symbol("verl.trainer.ppo.ray_trainer:RayPPOTrainer._balance_batch").lines)
    assert "ordered_partition = partition[::2] + partition[1::2][::-1]" in text
    lengths = [3, 1, 4, 1, 5, 9]
    part = sorted(range(6), key=lambda row: (lengths[row], row))
    order = [lengths[row] for row in part[::2] + part[1::2][::-1]]
    assert order == [1, 3, 5, 9, 4, 1]


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
