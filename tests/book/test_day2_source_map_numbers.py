"""The numbers and the runnable claims of book/week1/day2_source_map.md, against the pinned verl."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from minirl.pin import LATER, find_symbol, use_verl, verl_root

pytestmark = pytest.mark.oracle

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "book/week1/day2_source_map.md").read_text(encoding="utf-8")


def _hand_made_batch():
    spec = importlib.util.spec_from_file_location("day2_batch", Path(__file__).with_name("day2_batch.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hand = _hand_made_batch()


@pytest.fixture(scope="module")
def batch():
    return hand.with_advantages()


def _table_rows(first_cell: str) -> list[list[str]]:
    found = re.findall(rf"^\| {first_cell} \|.*$", PAGE, re.M)
    assert len(found) == 1, (first_cell, found)
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_the_table_on_the_page_is_what_verl_computes(batch):
    groups: dict[str, str] = {}
    for i, (name, tokens) in enumerate(hand.rows()):
        cells = _table_rows(str(i))
        uid = batch.non_tensor_batch["uid"][i]
        assert groups.setdefault(uid, name) == name == cells[1]
        assert cells[2] == hand.PROMPTS[name]
        assert cells[3].replace("■", hand.EOS).split() == tokens
        assert int(cells[4]) == batch.batch["response_mask"][i].sum().item()
        assert float(cells[5]) == batch.batch["token_level_scores"][i].sum().item()
        mask = batch.batch["response_mask"][i].bool()
        advantages = batch.batch["advantages"][i]
        assert torch.allclose(advantages[mask], torch.tensor(float(cells[6].replace("−", "-"))), atol=1e-5)
        assert not advantages[~mask].any()
    assert len(groups) == 2


def test_the_strip_on_the_page_is_row_4(batch):
    row, (name, tokens) = 4, hand.rows()[4]
    prompt = hand.PROMPTS[name].split()
    wide = ["·"] * (hand.P - len(prompt)) + prompt + tokens + ["·"] * (hand.R - len(tokens))
    assert [c.replace("■", hand.EOS) for c in _table_rows("`input_ids`")[1:]] == wide
    assert [int(c) for c in _table_rows("`attention_mask`")[1:]] == batch.batch["attention_mask"][
        row
    ].tolist()
    for key in ("response_mask", "rm_scores", "advantages"):
        cells = _table_rows(f"`{key}`")[1:]
        assert cells[: hand.P] == [""] * hand.P
        shown = torch.tensor([float(c) for c in cells[hand.P :]])
        assert torch.allclose(shown, batch.batch[key][row].float(), atol=1e-5), key


def test_112_cells_hold_78_tokens_of_which_38_are_generated(batch):
    assert batch.batch["attention_mask"].numel() == 112
    assert batch.batch["attention_mask"].sum() == 78
    assert batch.batch["response_mask"].sum() == 38


def test_siblings_share_a_uid(batch):
    uids = batch.non_tensor_batch["uid"]
    assert len(set(uids[:4])) == 1 and len(set(uids[4:])) == 1 and uids[0] != uids[4]


def test_gen_batch_takes_the_prompt_and_copies_the_reward_keys():
    loaded = hand.loaded()
    gen_batch = hand.gen_batch_of(loaded)
    kept = {"data_source", "reward_model", "extra_info", "uid"}
    assert gen_batch.batch is None and len(gen_batch) == 2
    assert set(loaded.non_tensor_batch) == kept
    assert set(gen_batch.non_tensor_batch) == kept | {"raw_prompt", "index"}


def test_repeat_shares_meta_info():
    loaded = hand.loaded()
    repeated = loaded.repeat(4, interleave=True)
    repeated.meta_info["seen"] = True
    assert loaded.meta_info["seen"]


def test_union_without_repeat_fails():
    loaded = hand.loaded()
    output = hand.rolled_out(hand.gen_batch_of(loaded).repeat(hand.N, interleave=True))
    with pytest.raises(AssertionError, match="identical batch size"):
        loaded.union(output)


def test_reordering_rows_does_not_change_advantages(batch):
    from verl.trainer.ppo.ray_trainer import compute_advantage

    order = torch.tensor([5, 0, 7, 2, 4, 1, 6, 3])
    shuffled = batch.select(
        batch_keys=["token_level_rewards", "response_mask"], non_tensor_batch_keys=["uid"], deepcopy=True
    )
    shuffled.reorder(order)
    shuffled = compute_advantage(shuffled, adv_estimator="grpo")
    assert torch.equal(shuffled.batch["advantages"], batch.batch["advantages"][order])


def test_from_single_dict_sorts_by_type_and_refuses_lists():
    use_verl()
    from verl.protocol import DataProto

    data = DataProto.from_single_dict({"t": torch.zeros(2), "o": np.array(["x", "y"], dtype=object)})
    assert list(data.batch.keys()) == ["t"] and list(data.non_tensor_batch) == ["o"] and data.meta_info == {}
    with pytest.raises(ValueError, match="Unsupported type"):
        DataProto.from_single_dict({"l": [1, 2]})


def _pinned_config():
    from hydra import compose, initialize_config_dir

    folder = verl_root() / "verl/trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.name=vllm"])


def test_defaults_of_the_pin():
    config = _pinned_config()
    assert config.algorithm.adv_estimator == "gae"
    assert not config.algorithm.use_kl_in_reward and not config.actor_rollout_ref.actor.use_kl_loss
    assert config.critic.enable is None and config.trainer.balance_batch
    assert config.actor_rollout_ref.rollout.load_format == "dummy"
    assert config.actor_rollout_ref.actor.shuffle is False
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "naive"


@pytest.mark.parametrize(
    ("estimator", "enable", "in_reward", "kl_loss", "critic", "ref"),
    [
        ("gae", None, False, False, True, False),
        ("grpo", None, False, False, False, False),
        ("grpo", None, False, True, False, True),
        ("gae", None, True, False, True, True),
        ("grpo", True, False, False, True, False),
        ("gae", False, False, False, False, False),
    ],
)
def test_who_exists_for_which_configuration(estimator, enable, in_reward, kl_loss, critic, ref):
    use_verl()
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    config = _pinned_config()
    config.algorithm.adv_estimator = estimator
    config.critic.enable = enable
    config.algorithm.use_kl_in_reward = in_reward
    config.actor_rollout_ref.actor.use_kl_loss = kl_loss
    assert need_critic(config) is critic
    assert bool(need_reference_policy(config)) is ref


def test_critic_calls_return_futures_and_actor_calls_do_not():
    worker = "verl.workers.engine_workers:"
    for name in ("TrainingWorker.infer_batch", "TrainingWorker.train_mini_batch"):
        assert "blocking=False" in find_symbol(worker + name).lines[0], name
    for name in ("compute_log_prob", "update_actor", "compute_ref_log_prob"):
        assert "blocking" not in find_symbol(worker + "ActorRolloutRefWorker." + name).lines[0], name
    signature = "\n".join(find_symbol("verl.single_controller.base.decorator:register").lines)
    assert "blocking=True" in signature


def test_the_later_version_starts_another_trainer():
    config = yaml.safe_load(
        (verl_root(LATER) / "verl/trainer/config/ppo_trainer.yaml").read_text(encoding="utf-8")
    )
    assert config["trainer"]["use_v1"] is True
    assert "use_v1" not in (verl_root() / "verl/trainer/config/ppo_trainer.yaml").read_text(encoding="utf-8")
