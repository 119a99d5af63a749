import sys
import types

import pandas as pd
import pytest
import torch

from minirl import presets
from minirl.config import compose
from minirl.data import gsm8k, gsm_symbolic


def set_memory(monkeypatch, gib: float) -> None:
    found = types.SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that says it has a GPU, with the model and GSM8K in a local folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    set_memory(monkeypatch, 80)
    monkeypatch.setattr(presets, "has_vllm", lambda: False)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        pd.DataFrame([gsm8k.to_row("1+1?", "#### 2", split, 0)]).to_parquet(
            tmp_path / "gsm8k" / f"{split}.parquet"
        )
    return tmp_path


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_cpu_preset_is_the_default_configuration():
    assert compose(presets.get("cpu").overrides) == compose()


def test_auto_says_what_it_chose_and_why(no_gpu):
    preset = presets.auto()
    assert preset.name == "cpu" and "no GPU" in preset.reason


def test_gpu_preset_without_gpu_is_one_line(no_gpu):
    with pytest.raises(ValueError, match="preset gpu: PyTorch sees no GPU; use preset cpu") as caught:
        presets.get("gpu")
    assert "\n" not in str(caught.value)


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match="tpu.*cpu, gpu, auto"):
        presets.get("tpu")


def test_gpu_preset_composes_and_puts_model_and_data_on_the_gpu(gpu):
    preset = presets.auto(str(gpu))
    assert preset.name == "gpu" and "Test GPU" in preset.reason
    config = compose(preset.overrides)  # every key exists, the batch arithmetic works
    assert config.trainer.device == "cuda"
    assert config.actor_rollout_ref.model.path == config.critic.model.path == str(gpu)
    assert config.data.train_files == str(gpu / "gsm8k" / "train.parquet")


def test_gpu_preset_is_bfloat16_with_a_critic_where_there_is_room(gpu, monkeypatch):
    config = compose(presets.get("gpu", str(gpu)).overrides)
    assert config.algorithm.adv_estimator == "gae"
    for engine in (config.actor_rollout_ref.actor.fsdp_config, config.critic.fsdp):
        assert (engine.dtype, engine.model_dtype) == ("bfloat16", "fp32")
    set_memory(monkeypatch, 24)
    smaller = presets.get("gpu", str(gpu))
    assert compose(smaller.overrides).algorithm.adv_estimator == "grpo"
    assert "24 GiB" in smaller.reason and "no room for a critic, so GRPO" in smaller.reason


def test_auto_takes_the_tiny_model_where_the_gpu_is_too_small_and_gpu_refuses(gpu, monkeypatch):
    set_memory(monkeypatch, 8)
    preset = presets.auto(str(gpu))
    assert preset.name == "cpu" and "8 GiB is too small" in preset.reason
    with pytest.raises(ValueError, match="8 GiB is too small.*it takes 14.4 GiB"):
        presets.get("gpu", str(gpu))


def test_vllm_is_chosen_where_its_gpu_build_is_installed(gpu, monkeypatch):
    assert "builtin rollout (no GPU build of vLLM is installed)" in presets.auto(str(gpu)).reason
    monkeypatch.setattr(presets, "has_vllm", lambda: True)
    chosen = presets.auto(str(gpu))
    assert (
        compose(chosen.overrides).actor_rollout_ref.rollout.name == "vllm"
        and "vllm rollout;" in chosen.reason
    )


@pytest.mark.parametrize(("installed", "answer"), [("0.32.0", True), ("0.32.0+cpu", False), (None, False)])
def test_the_cpu_build_of_vllm_does_not_count(monkeypatch, installed, answer):
    def version(name):
        if installed is None:
            raise presets.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(presets, "version", version)
    assert presets.has_vllm() is answer


class Generated(list):
    """What reasoning_gym.create_dataset gives, as far as it is used."""

    def __init__(self, name, *, size, seed):
        assert name == "gsm_symbolic"
        answers = range(seed * 4000, seed * 4000 + size)  # the first of seed 1 are among those of seed 0
        super().__init__({"question": f"What is {i}?", "answer": str(i), "metadata": {}} for i in answers)


def test_without_a_hub_the_problems_are_generated_and_none_of_the_test_is_in_the_training(
    gpu, monkeypatch, tmp_path
):
    for split in ("train", "test"):
        (gpu / "gsm8k" / f"{split}.parquet").unlink()
    monkeypatch.setattr(gsm8k, "_fetch", lambda source, split: 1 / 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=Generated))
    preset = presets.get("gpu", str(gpu))
    config = compose(preset.overrides)
    assert "gsm_symbolic from reasoning-gym" in preset.reason
    train, test = pd.read_parquet(config.data.train_files), pd.read_parquet(config.data.val_files)
    assert len(train) == gsm_symbolic.SIZES["train"] and train["reward_model"][7]["ground_truth"] == "7"
    questions = [{row[0]["content"] for row in table["prompt"]} for table in (train, test)]
    assert not questions[0] & questions[1]
    assert len(test) == gsm_symbolic.SIZES["test"] - 96


def test_without_hub_and_generator_the_error_names_both(gpu, monkeypatch, tmp_path):
    for split in ("train", "test"):
        (gpu / "gsm8k" / f"{split}.parquet").unlink()
    monkeypatch.setattr(gsm8k, "_fetch", lambda source, split: 1 / 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="could not fetch GSM8K.*pip install reasoning-gym") as caught:
        presets.get("gpu", str(gpu))
    assert "\n" not in str(caught.value)


def test_environment_variable_is_the_same_setting_as_the_argument(gpu, monkeypatch):
    monkeypatch.setenv("MINIRL_MODEL", str(gpu))
    assert presets.get("gpu") == presets.get("gpu", str(gpu))


def test_users_overrides_come_after_the_presets_and_win(gpu, capsys):
    args = types.SimpleNamespace(preset="gpu", model=str(gpu), overrides=["data.train_batch_size=32"])
    assert compose(presets.overrides_of(args)).data.train_batch_size == 32
    assert "preset gpu: Test GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "endpoint"), [("hub", None), ("https://mirror.example", "https://mirror.example")]
)
def test_hub_and_mirror_go_through_the_hub_client(monkeypatch, source, endpoint):
    asked = []

    def snapshot_download(repo, *, endpoint, ignore_patterns):
        asked.append((repo, endpoint))
        return "folder"

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download)
    )
    assert presets.fetch_model(source) == "folder"
    assert asked == [(presets.MODEL, endpoint)]


def test_unreachable_hub_says_what_else_to_set(monkeypatch):
    def snapshot_download(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download)
    )
    with pytest.raises(ValueError, match="could not fetch.*mirror.*folder") as caught:
        presets.fetch_model("hub")
    assert "\n" not in str(caught.value)


def test_modelscope_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ValueError, match="pip install modelscope"):
        presets.fetch_model("modelscope")


def test_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        presets.fetch_model(str(tmp_path))


def test_gsm8k_row_has_verls_schema_and_a_plain_number_as_truth():
    row = gsm8k.to_row("How many?", "1,000 + 2 = 1,002\n#### 1,002", "train", 3)
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1002"}
    assert row["data_source"] == "openai/gsm8k" and row["extra_info"]["index"] == 3
    assert row["prompt"][0]["content"].startswith("How many? ") and "####" in row["prompt"][0]["content"]
    with pytest.raises(ValueError, match="train row 4"):
        gsm8k.to_row("q", "no number", "train", 4)


def test_gsm8k_is_converted_once_and_whole(monkeypatch, tmp_path):
    raw = tmp_path / "raw.parquet"
    pd.DataFrame({"question": ["a", "b"], "answer": ["#### 1", "#### 2"]}).to_parquet(raw)
    fetched = []
    monkeypatch.setattr(gsm8k, "_fetch", lambda source, split: fetched.append(split) or str(raw))
    for _ in range(2):
        train, test = gsm8k.prepare("hub", tmp_path / "out")
    assert fetched == ["train", "test"]
    assert [row["ground_truth"] for row in pd.read_parquet(test)["reward_model"]] == ["1", "2"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]


def test_gsm8k_that_cannot_be_fetched_leaves_no_file(monkeypatch, tmp_path):
    def fail(source, split):
        raise ConnectionError("down")

    monkeypatch.setattr(gsm8k, "_fetch", fail)
    with pytest.raises(ValueError, match="could not fetch GSM8K from hub"):
        gsm8k.prepare("hub", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_preset_shows_its_reason_and_one_override_a_line():
    preset = presets.Preset("gpu", "40 GiB", ["a.b=1", "c=2"])
    assert repr(preset) == "gpu: 40 GiB\n  a.b=1\n  c=2"
