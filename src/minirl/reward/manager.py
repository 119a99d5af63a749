"""Reward managers: decode each response, score it, put the score on its last token.

in: prompts, responses, attention_mask; data_source, reward_model, extra_info
-> out: rm_scores; one array per key of the reward dict (or acc); meta_info reward_extra_keys.
simplified: runs in the trainer's process after the rollout; verl streams rows to Ray workers during it.
verl: verl.experimental.reward_loop.reward_manager
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Coroutine
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from minirl.protocol import DataProto
from minirl.reward.custom import get_custom_reward_fn
from minirl.reward.overlong import overlong_penalty
from minirl.reward.score import default_compute_score


class RewardManager:
    """Base of the managers, and itself verl's "naive": the score is the reward.

    compute_score(data_source=, solution_str=, ground_truth=, extra_info=) may be a coroutine function; it
    returns a number, or a dict with "score" whose items are all recorded.
    verl: verl.experimental.reward_loop.reward_manager.naive:NaiveRewardManager
    """

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Callable | None = None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data: DataProto) -> DataProto:
        """Score B trajectories.

        Returns batch rm_scores float32 [B, R], zero except at each row's last attended response token; the
        reward's extra values as arrays [B] in non_tensor_batch; their names in
        meta_info["reward_extra_keys"].

        Raises ValueError, naming the row, when the function raises, returns no number or NaN, or returns
        other keys than for the first row.
        """
        lengths = _response_lengths(data)
        responses = [
            row[:length] for row, length in zip(data.batch["responses"].tolist(), lengths, strict=True)
        ]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        calls = [self._arguments(data, row, text) for row, text in enumerate(texts)]
        scores, extras = [], []
        for row, result in enumerate(self._results(calls)):
            score, extra = self._unpack(result, row, calls[row])
            scores.append(self.adjust(score, lengths[row], extra))
            extras.append(extra)
        keys = list(extras[0])
        for row, extra in enumerate(extras):
            if extra.keys() != extras[0].keys():
                raise ValueError(
                    f"{self._name} returned keys {sorted(extra)} for row {row} but {keys} for row 0: "
                    "return the same keys for every row"
                )
        return DataProto(
            batch=TensorDict({"rm_scores": assemble_rm_scores(data, scores)}, batch_size=[len(data)]),
            non_tensor_batch={key: _column(key, [extra[key] for extra in extras]) for key in keys},
            meta_info={"reward_extra_keys": keys},
        )

    def extra_info(self, data: DataProto, row: int) -> dict:
        """What the reward function gets as extra_info: a copy, so that rows of one prompt do not share it."""
        columns = data.non_tensor_batch
        info = dict(columns["extra_info"][row] or {}) if "extra_info" in columns else {}
        info["num_turns"] = columns["__num_turns__"][row] if "__num_turns__" in columns else None
        info["rollout_reward_scores"] = columns["reward_scores"][row] if "reward_scores" in columns else {}
        return info

    def adjust(self, score: float, length: int, extra: dict) -> float:
        """The reward of a response of `length` tokens with this score; may add to `extra`."""
        return score

    def _arguments(self, data: DataProto, row: int, text: str) -> dict:
        for column in ("data_source", "reward_model"):
            if column not in data.non_tensor_batch:
                raise ValueError(
                    f"the batch has no column {column!r}: the data file must hold it for the reward"
                )
        reward_model = data.non_tensor_batch["reward_model"][row]
        if "ground_truth" not in reward_model:
            raise ValueError(f"row {row}: reward_model has no 'ground_truth', only {sorted(reward_model)}")
        return {
            "data_source": data.non_tensor_batch["data_source"][row],
            "solution_str": text,
            "ground_truth": reward_model["ground_truth"],
            "extra_info": self.extra_info(data, row),
        }

    def _results(self, calls: list[dict]) -> list:
        if not inspect.iscoroutinefunction(self.compute_score):
            return [self._call(row, arguments) for row, arguments in enumerate(calls)]

        async def run_all() -> list:
            return await asyncio.gather(*(self._call_async(row, call) for row, call in enumerate(calls)))

        return _run(run_all())

    def _call(self, row: int, arguments: dict) -> Any:
        try:
            return self.compute_score(**arguments)
        except Exception as error:  # any error of the user's function is reported with its row
            raise self._failed(row, arguments, error) from error

    async def _call_async(self, row: int, arguments: dict) -> Any:
        try:
            return await self.compute_score(**arguments)
        except Exception as error:  # as above
            raise self._failed(row, arguments, error) from error

    def _failed(self, row: int, arguments: dict, error: Exception) -> ValueError:
        return ValueError(
            f"{self._name} raised {type(error).__name__}: {error} (row {row}, "
            f"data_source={arguments['data_source']!r}, response={_shorten(arguments['solution_str'])})"
        )

    def _unpack(self, result: Any, row: int, arguments: dict) -> tuple[float, dict]:
        """(score, extra values), as verl takes them: all items of a dict, or the number under `acc`."""
        if isinstance(result, dict) and "score" not in result:
            raise ValueError(
                f"{self._name} returned {sorted(result)} for row {row}: the dict needs the key 'score'"
            )
        score = result["score"] if isinstance(result, dict) else result
        number = _as_float(score)
        if number is None or not math.isfinite(number):
            raise ValueError(
                f"{self._name} returned score {score!r} for row {row} "
                f"(response={_shorten(arguments['solution_str'])}): return a finite number"
            )
        return number, dict(result) if isinstance(result, dict) else {"acc": score}

    @property
    def _name(self) -> str:
        return f"reward function {getattr(self.compute_score, '__name__', type(self.compute_score).__name__)}"


class DAPORewardManager(RewardManager):
    """Adds the overlong penalty of reward.reward_kwargs to the score.

    verl: verl.experimental.reward_loop.reward_manager.dapo:DAPORewardManager
    """

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Callable | None = None) -> None:
        super().__init__(config, tokenizer, compute_score)
        kwargs = config.reward.reward_kwargs
        self.overlong_buffer_cfg = kwargs.get("overlong_buffer_cfg")
        self.max_resp_len = kwargs.get("max_resp_len")
        if self.overlong_buffer_cfg is not None:
            self._check_buffer()

    def _check_buffer(self) -> None:
        key, buffer = "reward.reward_kwargs.overlong_buffer_cfg", self.overlong_buffer_cfg
        missing = [name for name in ("enable", "len", "penalty_factor") if name not in buffer]
        if missing:
            raise ValueError(f"{key} has no {', '.join(missing)}: set +{key}.{missing[0]}=...")
        if self.max_resp_len is None:
            raise ValueError(f"{key} is set but reward.reward_kwargs.max_resp_len is not: set it in tokens")
        if self.max_resp_len < buffer.len:
            raise ValueError(
                f"{key}.len={buffer.len} is more than reward.reward_kwargs.max_resp_len={self.max_resp_len}"
            )
        if buffer.enable and buffer.len <= 0:
            raise ValueError(f"{key}.len={buffer.len}: must be above 0, or set {key}.enable=false")

    def extra_info(self, data: DataProto, row: int) -> dict:
        """The row's own extra_info, nothing added."""
        if "extra_info" not in data.non_tensor_batch:
            return {}
        return dict(data.non_tensor_batch["extra_info"][row] or {})

    def adjust(self, score: float, length: int, extra: dict) -> float:
        """score + penalty; `acc` in `extra` keeps the score without it."""
        if self.overlong_buffer_cfg is None or not self.overlong_buffer_cfg.enable:
            return score
        penalty = overlong_penalty(
            length,
            max_resp_len=self.max_resp_len,
            buffer_len=self.overlong_buffer_cfg.len,
            penalty_factor=self.overlong_buffer_cfg.penalty_factor,
        )
        if self.overlong_buffer_cfg.get("log"):  # the DAPO recipe's lines leave it out: off in its yaml
            extra["overlong_reward"] = penalty
            extra["overlong"] = penalty < 0
        return score + penalty


class GDPORewardManager(RewardManager):
    """For rewards of several parts: the function also learns the experiment's name.

    verl: verl.experimental.reward_loop.reward_manager.gdpo:GDPORewardManager
    """

    def extra_info(self, data: DataProto, row: int) -> dict:
        """The row's extra_info and `experiment_name`."""
        info = data.non_tensor_batch["extra_info"][row] if "extra_info" in data.non_tensor_batch else None
        return {**(info or {}), "experiment_name": self.config.trainer.experiment_name}


REWARD_MANAGER_REGISTRY = MappingProxyType(
    {"naive": RewardManager, "dapo": DAPORewardManager, "gdpo": GDPORewardManager}
)


def load_reward_manager(
    config: DictConfig, tokenizer: Any, *, compute_score: Callable | None = None
) -> RewardManager:
    """The manager named by reward.reward_manager.name.

    Its function is `compute_score`, else the custom one of the configuration, else `default_compute_score`.
    verl: verl.trainer.ppo.reward:load_reward_manager
    """
    name = config.reward.reward_manager.name
    if name not in REWARD_MANAGER_REGISTRY:
        raise ValueError(
            f"reward.reward_manager.name={name}: must be one of {', '.join(REWARD_MANAGER_REGISTRY)}"
        )
    buffer = config.reward.reward_kwargs.get("overlong_buffer_cfg")
    if name != "dapo" and buffer is not None and buffer.get("enable"):
        raise ValueError(
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true is read by the dapo manager only: "
            f"set reward.reward_manager.name=dapo, it is {name}"
        )
    return REWARD_MANAGER_REGISTRY[name](config, tokenizer, compute_score or get_custom_reward_fn(config))


def assemble_rm_scores(data: DataProto, scores: list[float]) -> torch.Tensor:
    """float32 [B, R]: each score at its row's last attended response token, zero elsewhere.

    A row without any response token gets its score in the last column, as in verl.
    verl: verl.experimental.reward_loop.reward_manager.base:RewardManagerBase.assemble_rm_scores
    """
    rm_scores = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
    last = torch.tensor(_response_lengths(data), device=rm_scores.device) - 1
    rm_scores[torch.arange(len(data), device=rm_scores.device), last] = rm_scores.new_tensor(scores)
    return rm_scores


def extract_reward(batch: DataProto) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    """(rm_scores [B, R], the reward's extra arrays by name). verl: verl.trainer.ppo.reward:extract_reward"""
    keys = batch.meta_info.get("reward_extra_keys", [])
    return batch.batch["rm_scores"], {key: batch.non_tensor_batch[key] for key in keys}


def _response_lengths(data: DataProto) -> list[int]:
    """Attended response tokens per row: from attention_mask, so that tool tokens count too."""
    prompt_length = data.batch["prompts"].size(1)
    return data.batch["attention_mask"][:, prompt_length:].sum(dim=1).tolist()


def _as_float(score: Any) -> float | None:
    try:
        return float(score)
    except (TypeError, ValueError):
        return None


def _column(key: str, values: list) -> np.ndarray:
    try:
        return np.array(values)
    except ValueError as error:
        raise ValueError(
            f"reward key {key!r} has values of unequal shape: return one number or text"
        ) from error


def _shorten(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else f"...{text[-limit:]}")


def _run(work: Coroutine) -> Any:
    """Run a coroutine to its end, also where an event loop is already running, as in a notebook."""
    outcome: dict[str, Any] = {}

    def target() -> None:
        try:
            outcome["value"] = asyncio.run(work)
        except BaseException as error:  # handed to the caller's thread below
            outcome["error"] = error

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
