"""Files for a whole run, made in a second: tokenizer, random Qwen2 of a few thousand weights, 40 sums."""

import zlib
from pathlib import Path

import pandas as pd
import torch


def make(folder: Path) -> list[str]:
    """Write model, tokenizer and train.parquet to `folder`; return the overrides of a two-step run."""
    save_model(folder / "lm")
    rows = [row(i) for i in range(40)]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    return [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        "data.val_max_samples=8",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={folder}/lm",
        f"critic.model.path={folder}/lm",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder}/checkpoints",
    ]


def row(i: int) -> dict:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i % 9} + {i % 7} = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i % 9 + i % 7)},
        "extra_info": {"split": "train", "index": i},
    }


def coin(data_source, solution_str, ground_truth, extra_info):
    """A score that differs between answers, by no merit of theirs."""
    number = zlib.crc32(solution_str.encode())
    return {"score": float(number % 2), "acc": float(number % 2), "short": float(number % 3)}


def save_model(
    folder: Path,
    pad_token: str | None = "<pad>",
    *,
    vocab_size: int | None = None,
    seed: int = 0,
    initializer_range: float = 0.02,
) -> None:
    """`vocab_size`: the number of logits, that of the tokenizer's words when None."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<pad>", "<eos>", "<unk>", *(str(i) for i in range(20)), "####", "+", "=", "?"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=pad_token, eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=vocab_size or len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=initializer_range,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(folder)
