"""Scores, reward tensors and their extra values equal verl's on the same batch."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict

from minirl.config import compose
from minirl.pin import use_verl
from minirl.protocol import DataProto
from minirl.reward import gsm8k
from minirl.reward.manager import REWARD_MANAGER_REGISTRY, assemble_rm_scores
from minirl.reward.score import default_compute_score

use_verl()
from verl.experimental.reward_loop import reward_manager as verl_managers  # noqa: E402
from verl.protocol import DataProto as VerlDataProto  # noqa: E402
from verl.utils import reward_score as verl_score  # noqa: E402
from verl.utils.reward_score import gsm8k as verl_gsm8k  # noqa: E402

pytestmark = pytest.mark.oracle

CONFIG = compose(["trainer.experiment_name=exp"])
# pieces that meet the extractor's cases more often than random text does
PIECES = st.sampled_from(
    ["#### ", "####", "-", "1", "18", "1,200", "3.5", ".", ",", "$", " ", "\n", "so ", "答案", "x" * 290, "#"]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from(["1", "18", "1200", "3.5", "-1", ".", ""]))
def test_gsm8k_is_verls_on_generated_text(text, truth):
    for method in ("strict", "flexible"):
        assert gsm8k.extract_solution(text, method) == verl_gsm8k.extract_solution(text, method)
        for format_score in (0.0, 0.1):
            mine = gsm8k.compute_score(text, truth, method, format_score)
            assert mine == verl_gsm8k.compute_score(text, truth, method, format_score)


@given(st.text(max_size=400))
def test_gsm8k_is_verls_on_any_text(text):
    for method in ("strict", "flexible"):
        assert gsm8k.extract_solution(text, method) == verl_gsm8k.extract_solution(text, method)


def test_unknown_data_source_raises_what_verl_raises():
    with pytest.raises(NotImplementedError) as verls:
        verl_score.default_compute_score("nowhere", "", "")
    with pytest.raises(NotImplementedError) as mine:
        default_compute_score("nowhere", "", "")
    assert str(mine.value).startswith(str(verls.value))


class CharTokenizer:
    def decode(self, ids, skip_special_tokens):
        return "".join(chr(i) for i in ids.tolist())

    def batch_decode(self, rows, skip_special_tokens):
        return [self.decode(torch.tensor(row), skip_special_tokens) for row in rows]


def batches(seed: int):
    rng = np.random.default_rng(seed)
    rows, prompt, width = 9, 4, 20
    lengths = rng.integers(1, width + 1, rows)
    responses = torch.randint(32, 120, (rows, width), generator=torch.Generator().manual_seed(seed))
    attention = torch.zeros(rows, prompt + width, dtype=torch.long)
    attention[:, 1:prompt] = 1
    for i, length in enumerate(lengths):
        text = "#### 7"[:length].rjust(length, "a")
        responses[i, :length] = torch.tensor([ord(c) for c in text])
        attention[i, prompt : prompt + length] = 1
    pair = []
    for cls in (DataProto, VerlDataProto):
        tensors = {"prompts": torch.zeros(rows, prompt, dtype=torch.long), "responses": responses.clone()}
        tensors["attention_mask"] = attention.clone()
        columns = {
            "data_source": np.array(["openai/gsm8k"] * rows, dtype=object),
            "reward_model": np.array([{"ground_truth": "7"}] * rows, dtype=object),
            "extra_info": np.array([{"index": i} for i in range(rows)], dtype=object),
            "__num_turns__": np.full(rows, 2, dtype=np.int32),
        }
        pair.append(cls(TensorDict(tensors, batch_size=[rows]), columns))
    return pair


def both(name: str, compute_score, reward_kwargs: dict, seed: int = 0):
    """minirl's output; verl's scores, its reward tensor, its extra values."""
    mine, verls = batches(seed)
    config = OmegaConf.merge(CONFIG, {"reward": {"reward_kwargs": reward_kwargs}})
    output = REWARD_MANAGER_REGISTRY[name](config, CharTokenizer(), compute_score)(mine)
    cls = verl_managers.get_reward_manager_cls(name)

    async def score_all():
        manager = cls(config=config, tokenizer=CharTokenizer(), compute_score=compute_score)
        manager.loop = asyncio.get_running_loop()
        return [await manager.run_single(verls[i : i + 1]) for i in range(len(verls))]

    results = asyncio.run(score_all())
    tensor = cls.assemble_rm_scores(verls, [float(result["reward_score"]) for result in results])
    return output, tensor, [result["reward_extra_info"] for result in results]


def scalar(data_source, solution_str, ground_truth, extra_info):
    return gsm8k.compute_score(solution_str, ground_truth) + 0.01 * len(solution_str)


def of_parts(data_source, solution_str, ground_truth, extra_info):
    return {
        "score": len(solution_str) / 7,
        "acc": ground_truth in solution_str,
        "seen": str(sorted(extra_info)),
    }


async def coroutine(data_source, solution_str, ground_truth, extra_info):
    return of_parts(data_source, solution_str, ground_truth, extra_info)


BUFFER = {
    "overlong_buffer_cfg": {"enable": True, "len": 8, "penalty_factor": 1.5, "log": True},
    "max_resp_len": 20,
}


@pytest.mark.parametrize("name", ["naive", "dapo", "gdpo"])
@pytest.mark.parametrize("compute_score", [None, scalar, of_parts, coroutine])
@pytest.mark.parametrize("reward_kwargs", [{}, BUFFER])
def test_reward_tensor_and_extra_values_are_verls(name, compute_score, reward_kwargs):
    output, tensor, extras = both(name, compute_score, reward_kwargs)
    torch.testing.assert_close(output.batch["rm_scores"], tensor)
    assert output.meta_info["reward_extra_keys"] == list(extras[0])
    for key in extras[0]:
        theirs = [
            extra[key].item() if isinstance(extra[key], torch.Tensor) else extra[key] for extra in extras
        ]
        mine = output.non_tensor_batch[key].tolist()
        assert mine == theirs if isinstance(theirs[0], str) else mine == pytest.approx(theirs, abs=1e-6), key


@pytest.mark.parametrize("seed", range(3))
def test_score_position_is_verls_also_for_a_row_without_response(seed):
    mine, verls = batches(seed)
    for data in (mine, verls):
        data.batch["attention_mask"][0, 4:] = 0
    scores = np.random.default_rng(seed).normal(size=len(mine)).tolist()
    cls = verl_managers.get_reward_manager_cls("naive")
    assert torch.equal(assemble_rm_scores(mine, scores), cls.assemble_rm_scores(verls, scores))
