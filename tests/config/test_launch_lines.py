"""verl's public launch lines on minirl: every option either arrives, or is named with what it would do."""

import math
from pathlib import Path

import pytest
import tiny_run
import yaml
from omegaconf import OmegaConf

from minirl.config import compose, sort_overrides
from minirl.config.overrides import effect, minirl_keys, verl_keys
from minirl.trainer import PPOTrainer

LINES = yaml.safe_load(Path(__file__).with_name("launch_lines.yml").read_text(encoding="utf-8"))
AS_IT_STANDS = [line for line in LINES if "refused" not in line]


def name(line: dict) -> str:
    return line["script"]


def options(line: dict) -> dict[str, str]:
    """key -> value as the line writes them; a key given twice has its last value."""
    return dict(text.lstrip("+").split("=", 1) for text in line["overrides"])


def in_minirl(key: str) -> bool:
    return key in minirl_keys() or any(key.startswith(path[:-1]) for path in minirl_keys() if path[-1] == "*")


def parsed(value: str) -> object:
    """A shell word as its reader takes it: 1e-6 is a number there, text in yaml."""
    try:
        return float(value)
    except ValueError:
        return yaml.safe_load(value)


def plain(value: object) -> object:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def test_the_lines_cover_ppo_grpo_and_their_relatives():
    scripts = {(line["repo"], line["script"]) for line in LINES}
    estimators = {options(line)["algorithm.adv_estimator"] for line in LINES}
    losses = {options(line).get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla") for line in LINES}
    assert len(scripts) == len(LINES) >= 16
    assert estimators >= {"gae", "grpo", "rloo", "remax", "reinforce_plus_plus", "gpg", "gdpo"}
    assert losses >= {"vanilla", "gspo", "sapo", "cispo", "geo_mean", "gpg", "dppo_tv"}


@pytest.mark.parametrize("line", AS_IT_STANDS, ids=name)
def test_every_option_arrives_or_is_named_once_with_its_reader_and_effect(line, caplog):
    config = compose(line["overrides"])  # its full sizes: the batch arithmetic holds
    ignored = sort_overrides(line["overrides"]).only_in_verl
    notice = [text for text in caplog.messages if text.startswith("known to verl, not implemented")]
    assert len(notice) == (1 if ignored else 0)
    for key, value in options(line).items():
        if in_minirl(key):
            assert key not in ignored
            assert plain(OmegaConf.select(config, key)) == parsed(value), key
        else:
            assert key in verl_keys() or key.rpartition(".")[0] + ".*" in verl_keys()
            assert notice[0].count(f"{key} (read by verl's {ignored[key]}: {effect(key)})") == 1
            assert effect(key)
    assert set(ignored) == {key for key in options(line) if not in_minirl(key)}
    assert any("ignored: wandb" in text for text in caplog.messages) == (
        "wandb" in options(line)["trainer.logger"]
    )


@pytest.mark.parametrize("line", [line for line in LINES if "refused" in line], ids=name)
def test_a_line_that_cannot_work_is_refused_in_one_line_that_says_what_to_change(line):
    with pytest.raises(ValueError) as caught:
        compose(line["overrides"])
    assert line["refused"] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("line", LINES, ids=name)
def test_a_misspelt_option_is_an_error_that_names_the_right_one(line):
    key = next(key for key in options(line) if key.startswith("actor_rollout_ref.actor.optim"))
    wrong = key.replace("optim", "optm")
    with pytest.raises(ValueError, match=f"unknown key {wrong}.*did you mean {key}"):
        compose([text.replace(key, wrong) for text in line["overrides"]])


def known(text: str) -> bool:
    try:
        sort_overrides([text])
    except ValueError:
        return False
    return True


SCORE = "def compute_score(**row):\n    return {'score': 1.0, 'accuracy_reward': 1.0, 'format_reward': 0.0}\n"


def tiny(line: dict, folder: Path, *, ranks: int) -> list[str]:
    """The line with our paths and sizes, one step on the CPU. Keys that are gone from verl are left out."""
    values = options(line)
    (folder / "score.py").write_text(SCORE)
    mini, whole = (
        int(values[key]) for key in ("actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size")
    )
    n = int(values.get("actor_rollout_ref.rollout.n", 4))
    changed = [
        *tiny_run.make(folder),
        "trainer.total_training_steps=1",
        f"data.train_batch_size={8 if mini == whole else 16}",  # one mini-batch as in the line, or two
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"actor_rollout_ref.rollout.n={min(n, 4)}",
        "actor_rollout_ref.rollout.name=builtin",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]
    if "data.gen_batch_size" in values:
        changed.append("data.gen_batch_size=24")
    if "distillation.enabled" in values:
        changed.append(f"distillation.teacher_models.teacher_model.model_path={folder}/lm")
    if "reward.custom_reward_function.path" in values:
        changed.append(f"reward.custom_reward_function.path={folder}/score.py")
    return [*filter(known, line["overrides"]), *changed]


def one_step(line: dict, folder: Path, *, ranks: int) -> None:
    values = options(line)
    step = PPOTrainer(compose(tiny(line, folder, ranks=ranks))).fit()[-1]
    assert step["training/global_step"] == 1
    assert math.isfinite(step["actor/loss"])
    if (
        "actor_rollout_ref.actor.optim.lr_warmup_steps" not in values
    ):  # the line's own number, in the optimizer
        assert step["actor/lr"] == float(values["actor_rollout_ref.actor.optim.lr"])
    if values["algorithm.adv_estimator"] == "gae":
        assert step["critic/lr"] == float(values["critic.optim.lr"])


GSM8K = ["examples/ppo_trainer/run_qwen3_8b_fsdp.sh", "examples/grpo_trainer/run_qwen3_8b_fsdp.sh"]
ALSO = [*GSM8K, "examples/rloo_trainer/run_qwen3_8b_fsdp.sh"]


@pytest.mark.parametrize("line", [line for line in LINES if name(line) in ALSO], ids=name)
def test_ppo_grpo_and_rloo_lines_train_a_step_on_their_eight_ranks(line, tmp_path):
    one_step(line, tmp_path, ranks=8)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if name(line) not in ALSO], ids=name)
def test_every_other_line_trains_a_step(line, tmp_path):
    one_step(line, tmp_path, ranks=2)
