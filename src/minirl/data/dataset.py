"""The prompts of a run: rows of parquet or jsonl files, and the loaders over them.

in: columns prompt, data_source, reward_model, extra_info, ... -> out: raw_prompt, dummy_tensor, index,
tools_kwargs, interaction_kwargs and all other columns; collated to tensors and object arrays.
simplified: text only; files are local; tokenising happens in the rollout, as in verl.
verl: verl.utils.dataset.rl_dataset
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from omegaconf import DictConfig, ListConfig
from torch.utils.data import Dataset, Sampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from minirl.extern import load_extern_object


class RLHFDataset(Dataset):
    """One row per prompt; a row is a dict of Python objects and one dummy tensor.

    Raises ValueError: a missing or broken file, a missing column, a malformed prompt, no row left.
    verl: verl.utils.dataset.rl_dataset:RLHFDataset
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: DictConfig,
        max_samples: int = -1,
    ) -> None:
        self.data_files = (
            list(data_files) if isinstance(data_files, list | tuple | ListConfig) else [data_files]
        )
        self.tokenizer = tokenizer
        self.config = config
        self.rows = [row for path in self.data_files for row in _read(Path(path).expanduser())]
        self._check_rows()
        if 0 < max_samples < len(self.rows):
            self.rows = [self.rows[i] for i in self._sample(len(self.rows), max_samples)]
        if config.filter_overlong_prompts:
            self.rows = self._without_overlong(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict:
        """The row's columns, and: raw_prompt (messages), dummy_tensor uint8 [1], index, tools_kwargs,
        interaction_kwargs. Each call returns fresh containers, so that changing one row changes no other.
        """
        row = _copy(self.rows[item])
        row["raw_prompt"] = row[self.config.prompt_key]
        row["dummy_tensor"] = torch.tensor(
            [0], dtype=torch.uint8
        )  # a DataProto without a tensor has no batch
        row["extra_info"] = row.get("extra_info") or {}
        row["index"] = row["extra_info"].get("index", 0)
        row["tools_kwargs"] = row["extra_info"].get("tools_kwargs", {})
        row["interaction_kwargs"] = row["extra_info"].get("interaction_kwargs", {})
        return row

    def prompt_length(self, row: dict) -> int:
        """Tokens of the row's prompt once the chat template has been applied."""
        encoded = self.tokenizer.apply_chat_template(
            row[self.config.prompt_key],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.config.apply_chat_template_kwargs,
        )
        return len(encoded)

    def _without_overlong(self, rows: list[dict]) -> list[dict]:
        limit = self.config.max_prompt_length
        lengths = [self.prompt_length(row) for row in rows]
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        if not kept:
            raise ValueError(
                f"data.max_prompt_length={limit} is shorter than every prompt of {self._names()} "
                f"(the shortest has {min(lengths)} tokens): raise it"
            )
        return kept

    def _sample(self, total: int, size: int) -> list[int]:
        """verl takes the first rows when it does not shuffle, else a random choice seeded by data.seed."""
        if not self.config.shuffle:
            return list(range(size))
        return np.random.default_rng(self.config.seed).choice(total, size=size, replace=False).tolist()

    def _check_rows(self) -> None:
        if not self.rows:
            raise ValueError(f"{self._names()}: no rows")
        key = self.config.prompt_key
        for column, setting in ((key, "data.prompt_key"), (self.config.reward_fn_key, "data.reward_fn_key")):
            if column not in self.rows[0]:
                raise ValueError(
                    f"{self._names()}: no column {column!r} (from {setting}); it has {sorted(self.rows[0])}"
                )
        for number, row in enumerate(self.rows):
            messages = row.get(key)
            if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
                raise ValueError(
                    f"{self._names()}: row {number}, column {key!r} must be a list of "
                    f'{{"role": ..., "content": ...}}, got {str(messages)[:60]!r}'
                )

    def _names(self) -> str:
        return ", ".join(str(path) for path in self.data_files)


def collate_fn(data_list: list[dict]) -> dict:
    """Rows to columns: tensors stacked to [b, ...], everything else in object arrays [b].

    verl: verl.utils.dataset.rl_dataset:collate_fn
    """
    columns: dict[str, list] = {}
    for row in data_list:
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    uneven = sorted(key for key, values in columns.items() if len(values) != len(data_list))
    if uneven:
        raise ValueError(
            f"columns {uneven} are not in every row of the batch: give all data files the same columns"
        )
    tensors = {key: torch.stack(v) for key, v in columns.items() if isinstance(v[0], torch.Tensor)}
    # fromiter, because np.array would turn equally long lists into a matrix
    arrays = {
        key: np.fromiter(v, dtype=object, count=len(v)) for key, v in columns.items() if key not in tensors
    }
    return tensors | arrays


def create_dataset(
    data_files: str | Sequence[str], config: DictConfig, tokenizer: Any, max_samples: int = -1
) -> Dataset:
    """`RLHFDataset`, or the class that data.custom_cls names.

    verl: verl.trainer.main_ppo:create_rl_dataset
    """
    cls: type = RLHFDataset
    if config.custom_cls.path:
        cls = load_extern_object(config.custom_cls.path, config.custom_cls.name, "data.custom_cls")
        if not (isinstance(cls, type) and issubclass(cls, Dataset)):
            raise ValueError(f"data.custom_cls.name={config.custom_cls.name}: must subclass torch's Dataset")
    return cls(data_files=data_files, tokenizer=tokenizer, config=config, max_samples=max_samples)


def create_sampler(config: DictConfig, dataset: Dataset) -> Sampler:
    """Random with data.seed when data.shuffle, else in order; both resume inside a StatefulDataLoader.

    verl: verl.trainer.main_ppo:create_rl_sampler
    """
    if not config.shuffle:
        return SequentialSampler(dataset)
    generator = torch.Generator()
    if config.seed is not None:
        generator.manual_seed(config.seed)
    return RandomSampler(dataset, generator=generator)


def create_dataloaders(config: DictConfig, tokenizer: Any) -> tuple[StatefulDataLoader, StatefulDataLoader]:
    """(train, validation) loaders. Both have state_dict() and load_state_dict().

    train: data.gen_batch_size or data.train_batch_size prompts a batch; an incomplete last batch is dropped.
    validation: data.val_batch_size prompts a batch, or all at once.
    Raises ValueError when the training files hold less than one batch.
    verl: verl.trainer.ppo.ray_trainer:RayPPOTrainer._create_dataloader
    """
    data = config.data
    train_dataset = create_dataset(data.train_files, data, tokenizer, data.train_max_samples)
    val_dataset = create_dataset(data.val_files, data, tokenizer, data.val_max_samples)
    key = "gen_batch_size" if data.gen_batch_size else "train_batch_size"
    if len(train_dataset) < data[key]:
        raise ValueError(
            f"data.{key}={data[key]} is more than the {len(train_dataset)} prompts in data.train_files"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata calls it by itself
        train_dataloader = StatefulDataLoader(
            dataset=train_dataset,
            batch_size=data[key],
            num_workers=data.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate_fn,
            sampler=create_sampler(data, train_dataset),
        )
        val_dataloader = StatefulDataLoader(
            dataset=val_dataset,
            batch_size=data.val_batch_size or len(val_dataset),
            num_workers=data.dataloader_num_workers,
            shuffle=data.validation_shuffle,
            drop_last=False,
            collate_fn=collate_fn,
        )
    return train_dataloader, val_dataloader


def _read(path: Path) -> list[dict]:
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; set data.train_files / data.val_files to .parquet or .jsonl files"
        )
    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path).to_pylist()
        if path.suffix in (".jsonl", ".json"):
            return [
                json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
            ]
    except (pyarrow.ArrowException, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not a readable {path.suffix} file ({str(error).splitlines()[0]})"
        ) from error
    raise ValueError(f"{path}: must be .parquet, .jsonl or .json (one object per line)")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()


def _copy(value: Any) -> Any:
    """A deep copy of plain data; leaves are shared."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
