import sys
import types

import pandas as pd
import pytest
import torch

from minirl import presets
from minirl.config import compose
from minirl.data import gsm8k


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine that says it has a GPU, with the model and GSM8K in a local folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
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
