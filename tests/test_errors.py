"""A user's error, whatever it is, ends the command with one line that names the field and the remedy.

Each case is a real run of `minirl.main_ppo` on a tiny model: exit code 2, nothing but one line on stderr.
"""

import json
import shutil

import pandas as pd
import pytest
import tiny_run
import torch

from minirl import main_ppo

GRPO = "algorithm.adv_estimator=grpo"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_run.make(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def quiet():
    """transformers' own remarks also go to stderr; they are not what is tested."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def fails(capsys, *overrides: str) -> str:
    """Run, expect a user's error, return its line."""
    capsys.readouterr()
    code = main_ppo.main([*overrides, "trainer.logger=[]", "trainer.val_before_train=false"])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Training Progress")]
    assert code == 2, lines
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_the_base_run_itself_succeeds(base, capsys):
    assert main_ppo.main([*base, GRPO]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step:")]
    assert [line.split(" - ")[0] for line in lines] == ["step:0", "step:1", "step:2"]


def write_rows(tmp_path, change) -> str:
    rows = [tiny_run.row(i) for i in range(8)]
    for row in rows:
        change(row)
    pd.DataFrame(rows).to_parquet(tmp_path / "changed.parquet")
    return str(tmp_path / "changed.parquet")


def test_misspelt_option(base, capsys):
    line = fails(capsys, *base, "trainer.total_epoch=3")
    assert "trainer.total_epoch" in line and "did you mean trainer.total_epochs?" in line


def test_impossible_batch_arithmetic(base, capsys):
    line = fails(capsys, *base, "data.train_batch_size=5")
    assert "data.train_batch_size=5" in line and "ppo_mini_batch_size=2" in line


def test_chunk_not_divisible(base, capsys):
    line = fails(capsys, *base, "trainer.n_gpus_per_node=3")
    assert "4 x 2 = 8" in line and "3 ranks" in line


def test_missing_data_file(base, capsys):
    assert "nowhere.parquet: no such file" in fails(capsys, *base, "data.train_files=nowhere.parquet")


def test_missing_column(base, capsys, tmp_path):
    path = write_rows(tmp_path, lambda row: row.pop("prompt"))
    line = fails(capsys, *base, f"data.train_files={path}")
    assert "no column 'prompt'" in line and "data.prompt_key" in line


def test_missing_ground_truth(base, capsys, tmp_path):
    path = write_rows(tmp_path, lambda row: row["reward_model"].pop("ground_truth"))
    assert "ground_truth" in fails(capsys, *base, GRPO, f"data.train_files={path}")


def test_unknown_data_source(base, capsys, tmp_path):
    path = write_rows(tmp_path, lambda row: row.update(data_source="mine"))
    line = fails(capsys, *base, GRPO, f"data.train_files={path}")
    assert "data_source='mine'" in line and "custom_reward_function.path" in line


def test_fewer_prompts_than_a_batch(base, capsys, tmp_path):
    path = write_rows(tmp_path, lambda row: None)
    line = fails(capsys, *base, f"data.train_files={path}", "data.train_batch_size=10")
    assert "data.train_batch_size=10" in line and "8 prompts" in line


def test_prompt_longer_than_allowed(base, capsys):
    line = fails(capsys, *base, GRPO, "data.max_prompt_length=4")
    assert "data.max_prompt_length is 4" in line and "filter_overlong_prompts" in line


def test_missing_model(base, capsys):
    assert "/nowhere" in fails(capsys, *base, "actor_rollout_ref.model.path=/nowhere")


def test_tokenizer_without_pad(base, capsys, tmp_path):
    tiny_run.save_model(tmp_path / "nopad", pad_token=None)
    line = fails(capsys, *base, f"actor_rollout_ref.model.path={tmp_path}/nopad")
    assert "no pad token" in line


@pytest.mark.parametrize(
    ("body", "part"), [("1 / 0", "ZeroDivisionError"), ("float('nan')", "nan"), ("{'acc': 1}", "'score'")]
)
def test_reward_function_that_raises_or_returns_no_number(base, capsys, tmp_path, body, part):
    path = tmp_path / "bad_reward.py"
    path.write_text(f"def compute_score(**kw):\n    return {body}\n")
    line = fails(capsys, *base, GRPO, f"reward.custom_reward_function.path={path}")
    assert part in line and "reward function compute_score" in line and "row 0" in line


def test_reward_function_that_is_not_there(base, capsys, tmp_path):
    line = fails(capsys, *base, f"reward.custom_reward_function.path={tmp_path}/none.py")
    assert "reward.custom_reward_function.path" in line and "no such file" in line


def test_no_gpu_for_the_gpu_preset(base, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "preset gpu" in fails(capsys, "--preset", "gpu")


@pytest.fixture(scope="module")
def checkpoint(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    run = [*base, GRPO, "trainer.save_freq=1", "trainer.total_training_steps=1", "trainer.logger=[]"]
    assert main_ppo.main([*run, f"trainer.default_local_dir={folder}"]) == 0
    return folder / "global_step_1"


def resume(folder) -> list[str]:
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]


def test_torn_checkpoint(base, capsys, checkpoint, tmp_path):
    torn = shutil.copytree(checkpoint, tmp_path / "torn")
    largest = max((p for p in torn.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    line = fails(capsys, *base, GRPO, *resume(torn))
    assert "torn" in line and largest.name in line


def test_checkpoint_that_is_not_one(base, capsys, tmp_path):
    assert str(tmp_path) in fails(capsys, *base, GRPO, *resume(tmp_path))


def test_checkpoint_from_another_config(base, capsys, checkpoint):
    line = fails(capsys, *base, "algorithm.adv_estimator=gae", *resume(checkpoint))
    assert "critic" in line or "adv_estimator" in line


def test_broken_checkpoint_manifest(base, capsys, checkpoint, tmp_path):
    torn = shutil.copytree(checkpoint, tmp_path / "torn")
    manifest = torn / "trainer.json"
    assert json.loads(manifest.read_text())
    manifest.write_text(manifest.read_text()[:-5])
    assert "torn" in fails(capsys, *base, GRPO, *resume(torn))


def test_non_finite_loss_stops_before_the_weights_change(base, capsys):
    line = fails(capsys, *base, GRPO, "actor_rollout_ref.actor.entropy_coeff=inf")
    assert "step 1" in line and "weights have not been changed" in line
