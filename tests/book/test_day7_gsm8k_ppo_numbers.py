"""The numbers and tables that book/week1/day7_gsm8k_ppo.md states, and the runs its notebook shows."""

import ast
import logging
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from runs import QUIET

from minirl.config import compose
from minirl.explain import batch_arithmetic, explain_launch
from minirl.explain.catalogue import DATA, option_rows
from minirl.explain.signs import signs_in
from minirl.pin import use_verl, verl_root
from minirl.trainer import PPOTrainer

pytestmark = pytest.mark.oracle
use_verl()

PAGE = (DATA.parent / "book" / "week1" / "day7_gsm8k_ppo.md").read_text(encoding="utf-8")


def script(name: str = "gsm8k_ppo"):
    return explain_launch((DATA / "launch" / f"{name}.sh").read_text(encoding="utf-8"))


def test_the_script_has_45_options_and_22_are_the_default():
    options = script().options
    assert len(options) == 45 and sum(option.same for option in options) == 22
    assert "45 个选项里有 22 个与默认相同" in PAGE


def table_rows() -> dict[str, list[str]]:
    """{option: the other cells}, in the page's order; an option that stands twice is an error."""
    rows = {}
    for line in PAGE.split("(gsm8k-options)=")[1].split("(gsm8k-entry)=")[0].splitlines():
        if line.startswith("| `"):
            name, *cells = [cell.strip().strip("`") for cell in line.strip("| ").split(" | ")]
            assert name not in rows, name
            rows[name] = cells
    return rows


def test_every_row_of_the_option_tables_says_what_the_data_say():
    rows = table_rows()
    options = {option.key: option for option in script().options}
    assert rows.keys() == options.keys()
    for key, (value, default, unit, note) in rows.items():
        option = options[key]
        assert value == (option.value if "$" not in option.value else "两个 parquet"), key
        assert default.removeprefix("跟随，") == option.default.split(" = ")[-1], key
        assert unit == option.unit, key
        reader = option.reader.partition(":")[2]
        assert note.strip("`") == f"{option_rows()[key]['note']} `{reader}".strip("`"), key


def test_options_that_enter_the_arithmetic_of_the_batch_stand_among_those_that_change_training():
    """Doubled one by one: whatever moves a count of the batch is not in the group of memory and speed."""
    part = PAGE.split("### 二、只管显存和速度")[1].split("### 三、")[0]
    memory_only = [key for key in table_rows() if f"| `{key}` |" in part]
    assert len(memory_only) == 18 and "45 个选项里有 18 个只管显存和速度" in PAGE
    text = (DATA / "launch" / "gsm8k_ppo.sh").read_text(encoding="utf-8").rstrip()
    base, moved = batch_arithmetic(script().config), set()
    for option in script().options:
        if option.value.isdigit() and int(option.value) > 0:
            doubled = explain_launch(f"{text} {option.key}={2 * int(option.value)}").config
            if batch_arithmetic(doubled) != base:
                moved.add(option.key)
    assert len(moved) == 5 and not moved & set(memory_only)


def test_the_memory_of_one_card_by_hand():
    from transformers import AutoModelForTokenClassification, Qwen3Config, Qwen3ForCausalLM

    shape = dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36)
    heads = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    model = Qwen3Config(**shape, **heads, tie_word_embeddings=False, num_labels=1)  # Qwen3-8B
    with torch.device("meta"):
        models = Qwen3ForCausalLM(model), AutoModelForTokenClassification.from_config(model)
    actor, critic = (sum(weight.numel() for weight in m.parameters()) for m in models)
    assert [round(count / 1e9, 1) for count in (actor, critic)] == [8.2, 7.6]
    config = script().config
    cards = config.trainer.n_gpus_per_node * config.trainer.nnodes
    assert config.actor_rollout_ref.actor.fsdp_config.model_dtype == config.critic.fsdp.model_dtype == "fp32"
    assert cards == 8 and config.actor_rollout_ref.rollout.dtype == "bfloat16"
    rollout = config.actor_rollout_ref.rollout
    two = rollout.tensor_model_parallel_size
    gb = {
        "actor": 12 * actor / cards / 1e9,  # 4 bytes of parameter, 8 of Adam
        "critic": 12 * critic / cards / 1e9,
        "actor 梯度": 4 * actor / cards / 1e9,
        "critic 梯度": 4 * critic / cards / 1e9,
        "logits": config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu * 151936 * 2 / 1e9,
        "weights": 2 * actor / two / 1e9,
    }
    gb["KV"] = rollout.gpu_memory_utilization * 80 - gb["weights"]
    resident = gb["actor"] + gb["critic"]
    columns = {
        "生成": resident + gb["weights"] + gb["KV"],
        "前向": resident + gb["logits"],
        "更新 critic": resident + gb["critic 梯度"],
        "更新 actor": resident + gb["actor 梯度"] + gb["logits"],
    }
    table = PAGE.split("| 放着什么 |")[1].split("\n\n")[0]
    for name, cell in (
        ("actor 参数", f"| {4 * actor / cards / 1e9:.1f} GB |"),
        ("actor 的 Adam 状态", f"| {8 * actor / cards / 1e9:.1f} GB |"),
        ("actor 梯度", f"| {gb['actor 梯度']:.1f} GB |"),
        ("critic 的同样三样", "、".join(f"{k * critic / cards / 1e9:.1f}" for k in (4, 8, 4)) + " GB"),
        ("logits", f"**至少** {gb['logits']:.1f} GB"),
        ("推理引擎的权重", f"| {gb['weights']:.1f} GB |"),
        ("KV cache", f"**至多** {gb['KV']:.1f} GB"),
    ):
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
        assert cell in row, name
    picture = PAGE.split('<svg viewBox="0 0 580')[1].split("</svg>")[0]
    assert re.findall(r'font-weight="bold"[^>]*>([\d.]+)', picture) == [f"{v:.1f}" for v in columns.values()]
    inside = re.findall(
        r">(actor 梯度|critic 梯度|actor|critic|logits|推理引擎权重|KV)[^<>]*?(?: |多 |少 )([\d.]+)<", picture
    )
    gb["推理引擎权重"] = gb["weights"]
    assert len(inside) == 2 * len(columns) + 6  # actor and critic in every column, and six more blocks
    assert [number for _, number in inside] == [f"{gb[name]:.1f}" for name, _ in inside]
    assert columns["生成"] < 80


def test_offload_moves_a_model_in_when_it_works_and_out_when_it_is_done():
    from types import SimpleNamespace

    from verl.utils.device import get_device_name
    from verl.workers.engine.base import BaseEngineCtx

    moves = []
    engine = SimpleNamespace(
        is_param_offload_enabled=True, is_optimizer_offload_enabled=True, to=lambda **kw: moves.append(kw)
    )
    for mode, optimizer in (("train", True), ("eval", False)):
        moves.clear()
        with BaseEngineCtx(engine, mode):
            pass
        assert [move["device"] for move in moves] == [get_device_name(), "cpu"]
        assert all(move["model"] and move["optimizer"] is optimizer for move in moves)


def test_a_token_budget_below_the_longest_trajectory_is_refused():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import prepare_micro_batches

    ids = torch.nested.nested_tensor([torch.ones(3072), torch.ones(5)], layout=torch.jagged)
    data = TensorDict({"input_ids": ids}, batch_size=2)
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=3071)
    with pytest.raises(AssertionError, match="max_token_len must be greater"):
        prepare_micro_batches(data)


def test_log_probs_of_the_rollout_add_the_metrics_rollout_corr():
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    one = script("gsm8k_ppo_one_gpu").config
    assert (
        one.actor_rollout_ref.rollout.calculate_log_probs and not one.algorithm.rollout_correction.bypass_mode
    )
    columns = {name: -torch.rand(2, 3) for name in ("old_log_probs", "rollout_log_probs")}
    batch = DataProto.from_single_dict({**columns, "response_mask": torch.ones(2, 3)})
    _, metrics = compute_rollout_correction_and_add_to_batch(batch, one.algorithm.rollout_correction)
    assert len(metrics) > 5 and all(name.startswith("rollout_corr/") for name in metrics)


def test_the_longest_trajectory_fits_eight_times_into_the_token_budget():
    config = script().config
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest == 3072 and config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu // longest == 8
    assert 7473 - 7473 // 1024 * 1024 == 305


def test_truncation_is_stored_and_never_read_again():
    readers = []
    for package in ("utils/dataset/rl_dataset.py", "experimental/agent_loop/agent_loop.py"):
        tree = ast.parse((verl_root() / "verl" / package).read_text(encoding="utf-8"))
        readers += [
            node.ctx.__class__.__name__
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "truncation"
        ]
    assert readers == ["Store"]


def test_full_rows_fill_four_micro_batches_of_eight():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import prepare_micro_batches

    rows, width = 32, 3072
    ids = torch.nested.nested_tensor([torch.ones(width)] * rows, layout=torch.jagged)
    data = TensorDict({"input_ids": ids}, batch_size=rows)
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=24576)
    parts, _ = prepare_micro_batches(data)
    assert [len(part) for part in parts] == [8] * 4


def test_nothing_in_the_package_reads_the_column_ability():
    text = re.compile(r"""["']ability["']""")
    files = (verl_root() / "verl").rglob("*.py")
    assert not [path for path in files if text.search(path.read_text(encoding="utf-8"))]


def test_the_defaults_that_follow_or_stay_null():
    config = script().config
    assert config.actor_rollout_ref.rollout.prompt_length == config.data.max_prompt_length == 1024
    assert config.actor_rollout_ref.rollout.response_length == config.data.max_response_length == 2048
    assert config.data.filter_overlong_prompts_workers == 1
    assert config.data.val_batch_size is None and config.data.shuffle


def test_what_else_differs_from_trl():
    import inspect

    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    folder = Path(find_spec("trl").submodule_search_locations[0]) / "trainer"
    assert "if self.num_generations < 2:" in (folder / "grpo_config.py").read_text(encoding="utf-8")
    assert "/ (std_rewards + 1e-4)" in (folder / "grpo_trainer.py").read_text(encoding="utf-8")
    assert inspect.signature(compute_grpo_outcome_advantage).parameters["epsilon"].default == 1e-6
    assert script().config.actor_rollout_ref.actor.clip_ratio_c == 3.0


def test_the_versions_are_the_wheel_s_own():
    metadata = next(verl_root().glob("verl-*.dist-info/METADATA")).read_text(encoding="utf-8")
    for line in (
        "Requires-Python: >=3.10",
        "Requires-Dist: numpy<2.0.0",
        'vllm<=0.12.0,>=0.8.5; extra == "vllm"',
        'flash-attn; extra == "gpu"',
    ):
        assert line in metadata


def test_the_one_gpu_script_is_accepted_by_the_pin_and_makes_four_updates():
    one = script("gsm8k_ppo_one_gpu")
    assert [o.key for o in one.options if o.problem or o.default is None] == [] and one.notes == []
    numbers = batch_arithmetic(one.config)
    assert (numbers["trajectories"], numbers["optimizer_steps"], numbers["rows_per_rank"]) == (256, 4, 64)
    assert 7473 // one.config.data.train_batch_size == 29
    assert 256 % one.config.actor_rollout_ref.rollout.agent.num_workers == 0


def test_trl_s_loss_and_gradient_on_one_batch_are_verl_s():
    from types import SimpleNamespace

    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    from minirl import trl_bridge

    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    old = -torch.rand(4, 4)
    new = (old + 0.5 * torch.randn(4, 4)).requires_grad_()
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).expand(4, 4) * mask
    clip = dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    for loss_type, mode in trl_bridge.LOSS_AGG_MODE.items():
        theirs = trl_bridge.grpo_loss(old, new, advantages, mask, loss_type=loss_type, **clip)
        info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": 4}
        config = SimpleNamespace(
            **clip, clip_ratio=0.2, global_batch_info=info, get=lambda key, default: default
        )
        verls, _ = compute_policy_loss_vanilla(old, new, advantages, mask, mode, config)
        gradients = [torch.autograd.grad(loss, new)[0] for loss in (theirs, verls)]
        torch.testing.assert_close(theirs, verls, msg=loss_type)
        torch.testing.assert_close(*gradients, msg=loss_type)
    with pytest.raises(ValueError, match="loss_type=ppo"):
        trl_bridge.grpo_loss(old, new, advantages, mask, loss_type="ppo", **clip)
    with pytest.raises(ValueError, match="one advantage a trajectory"):
        trl_bridge.grpo_loss(old, new, torch.rand(4, 4), mask, loss_type="grpo", **clip)


def test_trl_s_metric_names_and_default_loss_are_in_its_source():
    folder = Path(find_spec("trl").submodule_search_locations[0]) / "trainer"
    source = (folder / "grpo_trainer.py").read_text(encoding="utf-8")
    table = PAGE.split("| 问什么 | TRL | verl |")[1].split("\n\n")[0]
    names = [re.match(r"`([\w/]+)`", row.split(" | ")[1]) for row in table.strip().splitlines()[1:]]
    assert len(names) == 4
    for name in names:
        assert f'["{name[1]}"]' in source, name[1]
    config = (folder / "grpo_config.py").read_text(encoding="utf-8")
    assert re.search(r'loss_type: str = field\(\s*default="dapo"', config)


@pytest.mark.slow
def test_two_steps_of_the_official_options_give_the_same_metrics_in_verl_and_minirl(caplog):
    from minirl.verl_bridge import VerlTrainer

    caplog.set_level(logging.ERROR, logger="minirl.config")
    sized = ("_files", "model.path", "length", "batch_size", ".lr", "rollout.name", "gpus_per_node")
    sized += ("logger", "freq")
    kept = [f"{o.key}={o.value}" for o in script().options if not o.key.endswith(sized)]
    small = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    config = compose([*kept, *small, *QUIET, "trainer.total_training_steps=2"])
    mine, theirs = PPOTrainer(config).fit(), VerlTrainer(config).fit()
    shared = [key for key in theirs[0] if key in mine[0] and not re.search("timing|perf/", key)]
    assert len(shared) > 50
    assert 80 < len(theirs[0].keys() - {"step"}) < 90  # “八十多个数”
    for step in (0, 1):
        for key in shared:
            assert mine[step][key] == pytest.approx(theirs[step][key], abs=2e-4, rel=2e-3), (step, key)


@pytest.mark.slow
def test_the_ratio_of_the_critic_s_two_losses_is_the_number_of_micro_batches(caplog):
    """Cut by rows, as the bridge does; verl's critic cuts by tokens, then the number differs a little."""
    from minirl.verl_bridge import VerlTrainer

    caplog.set_level(logging.ERROR, logger="minirl.config")
    small = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
    small += ["actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=gae", *QUIET]
    for rows in (16, 4):
        limit = f"critic.ppo_micro_batch_size_per_gpu={rows}"
        (step,) = VerlTrainer(compose([*small, limit, "trainer.total_training_steps=1"])).fit()
        assert step["critic/loss"] / step["critic/vf_loss"] == pytest.approx(16 / rows, rel=1e-4)


@pytest.mark.slow
def test_the_sick_runs_of_the_notebook_show_their_signs_and_the_healthy_one_none():
    watch = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.calculate_log_probs=true", *QUIET]
    watch.append("trainer.total_training_steps=8")

    def run(*overrides, forget_sync=False):
        trainer = PPOTrainer(compose([*watch, *overrides]))
        if forget_sync:
            trainer._update_weights = lambda batch=None: trainer.rollout.wake_up()
        return signs_in(trainer.fit())

    assert run() == []
    assert "actor/ppo_kl" in {sign.metric for sign in run("actor_rollout_ref.actor.optim.lr=3e-3")}
    assert [s.metric for s in run(forget_sync=True)] == ["training/rollout_probs_diff_mean"]
