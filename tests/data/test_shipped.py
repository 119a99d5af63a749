"""What is shipped under data/: rebuilt or verified against its manifest, and as good as its card says."""

import json

import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Qwen2ForCausalLM,
)

from minirl.data import build, warm_start
from minirl.data.task import PATTERNS

DATA = build.SHIPPED


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DATA / "tiny_lm")


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(DATA / "tiny_lm").eval()


@pytest.fixture(scope="module")
def critic():
    return AutoModelForTokenClassification.from_pretrained(DATA / "tiny_critic").eval()


def card(folder: str) -> dict:
    return json.loads((DATA / folder / "card.json").read_text())


def test_shipped_files_are_those_of_the_manifest():
    assert build.manifest(DATA) == json.loads((DATA / "manifest.json").read_text())


def test_parquet_and_its_card_rebuild_bit_for_bit(tmp_path):
    build.build_parquet(tmp_path)
    shipped = {
        path: digest for path, digest in build.manifest(DATA).items() if path.startswith("gsm8k_mini/")
    }
    assert build.manifest(tmp_path) == shipped


def test_no_equation_chain_of_a_test_answer_occurs_in_a_training_answer():
    def chains(split: str) -> set[str]:
        rows = pyarrow.parquet.read_table(DATA / "gsm8k_mini" / f"{split}.parquet").to_pylist()
        return {row["extra_info"]["answer"] for row in rows}

    train, test = chains("train"), chains("test")
    assert len(test) > 50
    assert not train & test


def test_shipped_data_is_a_few_megabytes():
    size = sum(path.stat().st_size for folder in build.FOLDERS for path in (DATA / folder).rglob("*"))
    assert size < 3_000_000


def test_tokenizer_is_lossless_and_gives_every_digit_its_own_token(tokenizer):
    printable = "".join(map(chr, range(32, 127)))
    for text in [
        printable,
        "10+9=19\n19-8=11\n#### 11",
        "  two  spaces\n\n#### -1,000.5 ###",
        "小明有 5 张卡片。",
    ]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        tokens = tokenizer.convert_ids_to_tokens(ids)
        assert [t for t in tokens if any(c.isdigit() for c in t)] == [c for c in text if c.isdigit()]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.convert_ids_to_tokens([tokenizer.pad_token_id, tokenizer.eos_token_id]) == [
        "<|pad|>",
        "<|end|>",
    ]


def test_chat_template_opens_the_assistants_turn(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|user|>Hi.<|assistant|>"


def test_every_prompt_and_answer_fits_the_default_widths(tokenizer):
    for split in ("train", "test"):
        rows = pyarrow.parquet.read_table(DATA / "gsm8k_mini" / f"{split}.parquet").to_pylist()
        prompts = tokenizer.apply_chat_template(
            [row["prompt"] for row in rows], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        answers = tokenizer([row["extra_info"]["answer"] for row in rows])["input_ids"]
        assert max(map(len, prompts)) <= 32
        assert max(map(len, answers)) + 1 <= warm_start.MAX_RESPONSE_LENGTH
        assert tokenizer.pad_token_id not in np.concatenate(prompts)


def test_policy_is_an_untied_float32_qwen2(policy, tokenizer):
    assert type(policy) is Qwen2ForCausalLM
    assert policy.dtype == torch.float32
    assert not policy.config.tie_word_embeddings
    assert policy.config.vocab_size == len(tokenizer)
    assert (policy.config.pad_token_id, policy.config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    assert policy.generation_config.eos_token_id == tokenizer.eos_token_id


def test_policy_scores_what_its_card_says_and_leaves_room_for_rl(policy, tokenizer):
    _, test = build.problems()
    said = card("tiny_lm")["scores"]
    greedy = warm_start.roll_out(policy, tokenizer, test, n=1, seed=5, do_sample=False).reward.mean()
    sampled = warm_start.roll_out(policy, tokenizer, test, n=8, seed=5).reward  # not the card's seed
    assert abs(float(greedy) - said["greedy_pass@1"]) < 0.02
    assert abs(float(sampled.mean()) - said["sampled_pass@1"]) < 0.04
    assert 0.2 < said["greedy_pass@1"] < 0.4 and 0.2 < said["sampled_pass@1"] < 0.4
    assert said["sampled_pass@8"] > 0.7  # most groups of 8 hold something to learn from


def test_critics_values_tell_good_beginnings_from_bad_ones_on_held_out_rollouts(policy, critic, tokenizer):
    _, test = build.problems()
    held_out = warm_start.roll_out(policy, tokenizer, test, n=4, seed=5)
    whole, by_position = warm_start.explained_variance(critic, held_out)
    said = card("tiny_critic")["scores"]
    assert abs(whole - said["explained_variance"]) < 0.08
    assert min(by_position) > 0
    # the two operators and the answer are where a slip becomes visible
    assert by_position[-1] > by_position[4] + 0.05 > by_position[0] + 0.1


def test_critic_reads_before_the_token_it_is_asked_about(critic, policy, tokenizer):
    _, test = build.problems()
    part = warm_start.roll_out(policy, tokenizer, test[:4], n=1, seed=5).sequences
    with torch.no_grad():
        values = warm_start.values_of(critic, part)
        changed = part.input_ids.clone()
        start = int(part.response_mask[0].int().argmax())
        changed[0, start] = tokenizer.convert_tokens_to_ids("7")
        after = warm_start.values_of(
            critic, warm_start.Sequences(changed, part.attention_mask, part.response_mask)
        )
    assert torch.equal(
        values[0, :start], after[0, :start]
    )  # column start - 1 is the value before token `start`
    assert not torch.equal(values[0, start], after[0, start])


def test_patterns_of_the_shipped_test_split_are_balanced():
    _, test = build.problems()
    seen = [tuple(op for op, _ in problem.chain.steps) for problem in test]
    assert [seen.count(ops) for ops in PATTERNS] == [64] * 4
