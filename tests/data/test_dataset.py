import json

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from minirl.config import compose
from minirl.data.dataset import RLHFDataset, collate_fn, create_dataloaders


class WordTokenizer:
    def apply_chat_template(self, messages, add_generation_prompt, tokenize, return_dict, **kwargs):
        return [1] * (sum(len(m["content"].split()) for m in messages) + 1)


def make_row(i: int, words: int = 3) -> dict:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": " ".join(["w"] * words)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"split": "train", "index": i},
    }


@pytest.fixture
def parquet(tmp_path):
    def write(rows, name="train.parquet"):
        pd.DataFrame(rows).to_parquet(tmp_path / name)
        return str(tmp_path / name)

    return write


DEFAULT = compose(["data.max_prompt_length=8"])


def config(*overrides):
    return OmegaConf.merge(DEFAULT, OmegaConf.from_dotlist(list(overrides)))


def loaders(path, *overrides):
    cfg = config(f"data.train_files={path}", f"data.val_files={path}", *overrides)
    return create_dataloaders(cfg, WordTokenizer())


def test_row_has_verls_columns_and_types(parquet):
    row = RLHFDataset(parquet([make_row(5)]), WordTokenizer(), config().data)[0]
    assert set(row) == set(make_row(0)) | {
        "raw_prompt",
        "dummy_tensor",
        "index",
        "tools_kwargs",
        "interaction_kwargs",
    }
    assert row["raw_prompt"] == [{"role": "user", "content": "w w w"}]
    assert row["dummy_tensor"].dtype == torch.uint8 and row["dummy_tensor"].shape == (1,)
    assert row["index"] == 5 and row["reward_model"]["ground_truth"] == "5"
    assert row["tools_kwargs"] == {} and row["interaction_kwargs"] == {}


def test_changing_a_row_does_not_change_the_dataset(parquet):
    dataset = RLHFDataset(parquet([make_row(5)]), WordTokenizer(), config().data)
    dataset[0]["extra_info"]["index"] = 9
    dataset[0]["raw_prompt"].append("x")
    assert dataset[0]["index"] == 5 and len(dataset[0]["raw_prompt"]) == 1


def test_extra_info_may_be_absent(parquet):
    row = {k: v for k, v in make_row(1).items() if k != "extra_info"}
    assert RLHFDataset(parquet([row]), WordTokenizer(), config().data)[0]["index"] == 0


def test_several_files_and_jsonl_are_concatenated(parquet, tmp_path):
    lines = tmp_path / "more.jsonl"
    lines.write_text("\n".join(json.dumps(make_row(i)) for i in (2, 3)))
    dataset = RLHFDataset([parquet([make_row(1)]), str(lines)], WordTokenizer(), config().data)
    assert [row["index"] for row in dataset] == [1, 2, 3]


def test_overlong_prompts_are_left_out_only_when_asked(parquet):
    path = parquet([make_row(0, 3), make_row(1, 7), make_row(2, 8)])  # 4, 8 and 9 tokens
    assert len(RLHFDataset(path, WordTokenizer(), config().data)) == 3
    kept = RLHFDataset(path, WordTokenizer(), config("data.filter_overlong_prompts=true").data)
    assert [row["index"] for row in kept] == [0, 1]


def test_all_prompts_overlong_is_an_error_with_the_shortest_length(parquet):
    with pytest.raises(ValueError, match="max_prompt_length=8.*shortest has 10"):
        RLHFDataset(
            parquet([make_row(0, 9)]), WordTokenizer(), config("data.filter_overlong_prompts=true").data
        )


def test_max_samples_takes_the_first_rows_without_shuffle_and_a_seeded_choice_with_it(parquet):
    path = parquet([make_row(i) for i in range(50)])
    first = RLHFDataset(path, WordTokenizer(), config("data.shuffle=false").data, max_samples=4)
    assert [row["index"] for row in first] == [0, 1, 2, 3]
    pick = [
        [r["index"] for r in RLHFDataset(path, WordTokenizer(), config(f"data.seed={s}").data, max_samples=4)]
        for s in (1, 1, 2)
    ]
    assert pick[0] == pick[1] != pick[2]


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ("prompt", "no column 'prompt'.*data.prompt_key"),
        ("data_source", "no column 'data_source'.*reward_fn_key"),
    ],
)
def test_missing_column_is_named_with_those_present(parquet, column, match):
    row = make_row(0)
    row["other"] = row.pop(column)
    with pytest.raises(ValueError, match=match) as caught:
        RLHFDataset(parquet([row]), WordTokenizer(), config().data)
    assert "other" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("gone.parquet", None, "no such file"),
        ("broken.parquet", b"PAR1 no", "not a readable .parquet"),
        ("broken.jsonl", b'{"prompt": ', "not a readable .jsonl"),
        ("data.csv", b"a,b", "must be .parquet"),
        ("empty.jsonl", b"", "no rows"),
        ("text.jsonl", b'{"prompt": "hello", "data_source": "x"}', "row 0, column 'prompt'"),
    ],
)
def test_bad_files_are_one_line(tmp_path, name, content, match):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as caught:
        RLHFDataset(str(path), WordTokenizer(), config().data)
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_collate_stacks_tensors_and_keeps_lists_as_objects():
    batch = collate_fn([{"t": torch.tensor([i]), "x": [i, i], "s": "a"} for i in range(3)])
    assert batch["t"].shape == (3, 1)
    assert batch["x"].dtype == object and batch["x"].shape == (3,) and batch["x"][2] == [2, 2]
    assert isinstance(batch["s"], np.ndarray)


def test_collate_refuses_columns_that_some_rows_lack():
    with pytest.raises(ValueError, match="'b'"):
        collate_fn([{"a": 1, "b": 2}, {"a": 1}])


def test_train_loader_drops_the_incomplete_batch_and_validation_is_one_batch(parquet):
    train, val = loaders(parquet([make_row(i) for i in range(10)]), "data.train_batch_size=4")
    assert [len(batch["index"]) for batch in train] == [4, 4]
    assert [batch["index"].tolist() for batch in val] == [list(range(10))]


def test_gen_batch_size_changes_only_the_training_loader(parquet):
    train, _ = loaders(
        parquet([make_row(i) for i in range(10)]), "data.train_batch_size=4", "data.gen_batch_size=5"
    )
    assert [len(batch["index"]) for batch in train] == [5, 5]


def order(loader) -> list[int]:
    return [i for batch in loader for i in batch["index"].tolist()]


def test_order_depends_on_the_seed_only_and_differs_between_epochs(parquet):
    path = parquet([make_row(i) for i in range(16)])
    one, again = (loaders(path, "data.train_batch_size=4", "minirl.seed=1")[0] for _ in range(2))
    other = loaders(path, "data.train_batch_size=4", "minirl.seed=2")[0]
    first = order(one)
    assert first == order(again) != order(other)
    assert order(one) != first and sorted(first) == list(range(16))
    assert order(loaders(path, "data.train_batch_size=4", "data.shuffle=false")[0]) == list(range(16))


@pytest.mark.parametrize("shuffle", ["true", "false"])
def test_loader_resumes_in_the_middle_of_an_epoch_where_it_stopped(parquet, shuffle):
    path = parquet([make_row(i) for i in range(16)])
    overrides = ("data.train_batch_size=4", f"data.shuffle={shuffle}")
    loader = loaders(path, *overrides)[0]
    order(loader)  # an epoch before
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch["index"].tolist() for batch in iterator]
    fresh = loaders(path, *overrides)[0]
    fresh.load_state_dict(state)
    assert [batch["index"].tolist() for batch in fresh] == rest and len(rest) == 3
    assert order(fresh) == order(loader)  # and the epoch after


def test_fewer_prompts_than_one_batch_is_an_error_with_both_numbers(parquet):
    with pytest.raises(ValueError, match="train_batch_size=16 is more than the 3 prompts"):
        loaders(parquet([make_row(i) for i in range(3)]))


def test_custom_dataset_class_is_loaded_and_checked(parquet, tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "from minirl.data.dataset import RLHFDataset\n"
        "class Mine(RLHFDataset):\n    def __len__(self):\n        return 5\n"
        "class Not:\n    pass\n"
    )
    path = parquet([make_row(i) for i in range(9)])
    where = (f"data.custom_cls.path={source}", "data.train_batch_size=4")
    train, _ = loaders(path, *where, "data.custom_cls.name=Mine")
    assert len(train) == 1
    with pytest.raises(ValueError, match="must subclass"):
        loaders(path, *where, "data.custom_cls.name=Not")
