"""Rows, collated batches and their order equal those of verl's dataset and loader on the same file."""

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from minirl.config import compose
from minirl.data import dataset as ours
from minirl.pin import use_verl

use_verl()
from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler  # noqa: E402
from verl.utils.dataset import rl_dataset as theirs  # noqa: E402

pytestmark = pytest.mark.oracle


class WordTokenizer:
    def apply_chat_template(self, messages, add_generation_prompt, tokenize, return_dict=False, **kwargs):
        return [1] * (sum(len(m["content"].split()) for m in messages) + 1)


def write(path, rows: int) -> str:
    table = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": " ".join(["w"] * (1 + i % 7))}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": "train", "index": i, "need_tools_kwargs": None if i % 2 else False},
        }
        for i in range(rows)
    ]
    pd.DataFrame(table).to_parquet(path)
    return str(path)


def both(tmp_path, monkeypatch, *overrides, max_samples=-1, rows=20):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "train.parquet", rows)
    config = compose(["data.max_prompt_length=5", *overrides]).data
    mine = ours.create_dataset(path, config, WordTokenizer(), max_samples)
    plain = OmegaConf.create(OmegaConf.to_container(config, resolve=True))  # verl asks for keys minirl lacks
    verls = create_rl_dataset(path, plain, WordTokenizer(), None, max_samples=max_samples)
    return mine, verls, config


def assert_same(a, b) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tolist() == b.tolist()
    elif isinstance(a, dict):
        assert sorted(a) == sorted(b)
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert a == b


@pytest.mark.parametrize("filtered", ["true", "false"])
def test_rows_are_verls(tmp_path, monkeypatch, filtered):
    mine, verls, _ = both(tmp_path, monkeypatch, f"data.filter_overlong_prompts={filtered}")
    assert len(mine) == len(verls) == (12 if filtered == "true" else 20)
    for i in range(len(mine)):
        assert_same(mine[i], verls[i])


@pytest.mark.parametrize("shuffle", ["true", "false"])
def test_max_samples_chooses_verls_rows(tmp_path, monkeypatch, shuffle):
    mine, verls, _ = both(tmp_path, monkeypatch, f"data.shuffle={shuffle}", "data.seed=3", max_samples=6)
    assert [mine[i]["index"] for i in range(6)] == [verls[i]["index"] for i in range(6)]


def test_collated_batch_is_verls(tmp_path, monkeypatch):
    mine, verls, _ = both(tmp_path, monkeypatch)
    assert_same(ours.collate_fn([mine[i] for i in range(4)]), theirs.collate_fn([verls[i] for i in range(4)]))


@pytest.mark.parametrize("overrides", [["data.seed=11"], ["data.seed=null"], ["data.shuffle=false"]])
def test_order_over_two_epochs_is_verls(tmp_path, monkeypatch, overrides):
    mine, verls, config = both(tmp_path, monkeypatch, *overrides)
    my_sampler, verl_sampler = ours.create_sampler(config, mine), create_rl_sampler(config, verls)
    for _ in range(2):
        assert list(my_sampler) == list(verl_sampler)
