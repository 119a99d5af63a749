"""The numbers and tables that book/week1/day7_gsm8k_ppo.md states, and the runs its notebook shows."""

import ast
import logging
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from minirl.config import compose
from minirl.explain import batch_arithmetic, explain_launch
from minirl.explain.catalogue import DATA, option_rows
from minirl.explain.signs import signs_in
from minirl.pin import use_verl, verl_root
from minirl.trainer import PPOTrainer

pytestmark = pytest.mark.oracle
use_verl()

PAGE = (DATA.parent / "book" / "week1" / "day7_gsm8k_ppo.md").read_text(encoding="utf-8")
QUIET = ["trainer.logger=[]", "trainer.resume_mode=disable", "trainer.val_before_train=false"]


def script(name: str = "gsm8k_ppo"):
    return explain_launch((DATA / "launch" / f"{name}.sh").read_text(encoding="utf-8"))


def test_the_script_has_45_options_and_22_are_the_default():
    options = script().options
    assert len(options) == 45 and sum(option.same for option in options) == 22
    assert "45 个选项里有 22 个与默认相同" in PAGE


def test_every_row_of_the_option_tables_says_what_the_data_say():
    rows, prefix = {}, ""
    for line in PAGE.split("(gsm8k-options)=")[1].split("(gsm8k-entry)=")[0].splitlines():
        if head := re.match(r"\| `([\w.]+\.)` 之后", line):
            prefix = head[1]
        elif prefix and line.startswith("| `"):
            name, *cells = [cell.strip().strip("`") for cell in line.strip("| ").split(" | ")]
            rows[prefix + name] = cells
    options = {option.key: option for option in script().options}
    assert rows.keys() == options.keys()
    for key, (value, default, unit, note) in rows.items():
        option = options[key]
        assert value == (option.value if "$" not in option.value else "两个 parquet"), key
        assert default.removeprefix("跟随，") == option.default.split(" = ")[-1], key
        assert unit == option.unit, key
        reader = option.reader.partition(":")[2]
        assert note.strip("`") == f"{option_rows()[key]['note']} `{reader}".strip("`"), key


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
    assert len(names) == 7
    for name in names:
        assert f'["{name[1]}"]' in source, name[1]
    config = (folder / "grpo_config.py").read_text(encoding="utf-8")
    assert re.search(r'loss_type: str = field\(\s*default="dapo"', config)


@pytest.mark.slow
def test_two_steps_of_the_official_options_give_the_same_metrics_in_verl_and_minirl():
    from minirl.verl_bridge import VerlTrainer

    logging.getLogger("minirl.config").setLevel(logging.ERROR)
    sized = ("_files", "model.path", "length", "batch_size", ".lr", "rollout.name", "gpus_per_node")
    sized += ("logger", "freq")
    kept = [f"{o.key}={o.value}" for o in script().options if not o.key.endswith(sized)]
    small = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    config = compose([*kept, *small, *QUIET, "trainer.total_training_steps=2"])
    mine, theirs = PPOTrainer(config).fit(), VerlTrainer(config).fit()
    shared = [key for key in theirs[0] if key in mine[0] and not re.search("timing|perf/", key)]
    assert len(shared) > 50
    for step in (0, 1):
        for key in shared:
            assert mine[step][key] == pytest.approx(theirs[step][key], abs=2e-4, rel=2e-3), (step, key)


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
