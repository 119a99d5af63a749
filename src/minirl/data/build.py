"""Builds everything under data/ that is shipped: the parquet files, the tiny policy and the tiny critic.

In:  SEEDS and nothing else -> Out: gsm8k_mini/, tiny_lm/, tiny_critic/, each with a card, and manifest.json.
Two builds on one machine are equal byte for byte; another CPU may round weights differently.
verl: none (examples/data_preprocess/gsm8k.py writes the same columns)
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from minirl.data import card
from minirl.data.task import Problem, make_problems, split_chains, to_row
from minirl.data.warm_start import explained_variance, roll_out, train_critic, train_policy, train_tokenizer

SHIPPED = Path(__file__).parents[3] / "data"
FOLDERS = ("gsm8k_mini", "tiny_lm", "tiny_critic")
SEEDS = {
    "split": 0,
    "train_problems": 1,
    "test_problems": 2,
    "policy": 0,
    "critic_rollouts": 11,
    "critic": 0,
    "scores": 12,
}
TRAIN_PROBLEMS, TEST_PROBLEMS = 4096, 256
CRITIC_PROBLEMS, CRITIC_SAMPLES = 2048, 4
SCORE_SAMPLES = 8


def problems() -> tuple[list[Problem], list[Problem]]:
    train_chains, test_chains = split_chains(seed=SEEDS["split"])
    return (
        make_problems(train_chains, TRAIN_PROBLEMS, seed=SEEDS["train_problems"]),
        make_problems(test_chains, TEST_PROBLEMS, seed=SEEDS["test_problems"]),
    )


def build_parquet(out: Path) -> None:
    folder = out / "gsm8k_mini"
    folder.mkdir(parents=True, exist_ok=True)
    train, test = problems()
    for split, part in (("train", train), ("test", test)):
        rows = [to_row(problem, split, index) for index, problem in enumerate(part)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    chains = split_chains(seed=SEEDS["split"])
    card.write(
        folder,
        "gsm8k_mini",
        {
            "seeds": {name: SEEDS[name] for name in ("split", "train_problems", "test_problems")},
            "rows": {"train": len(train), "test": len(test)},
            "chains": dict(zip(("train", "test"), (sum(map(len, part)) for part in chains), strict=True)),
            "example": {"question": test[1].question, "answer": test[1].answer},
        },
    )


def build_policy(out: Path) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    train, test = problems()
    tokenizer = train_tokenizer([text for p in train for text in (p.question, p.answer)])
    policy = train_policy(tokenizer, train, seed=SEEDS["policy"])
    folder = out / "tiny_lm"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    greedy = roll_out(policy, tokenizer, test, n=1, seed=SEEDS["scores"], do_sample=False).reward
    sampled = roll_out(policy, tokenizer, test, n=SCORE_SAMPLES, seed=SEEDS["scores"]).reward
    groups = sampled.view(-1, SCORE_SAMPLES)
    card.write(
        folder,
        "tiny_lm",
        {
            "seeds": {name: SEEDS[name] for name in ("policy", "scores")},
            "parameters": sum(p.numel() for p in policy.parameters()),
            "vocab_size": len(tokenizer),
            "scores": {
                "split": "test",
                "greedy_pass@1": _rounded(greedy.mean()),
                "sampled_pass@1": _rounded(sampled.mean()),
                f"sampled_pass@{SCORE_SAMPLES}": _rounded(groups.amax(dim=1).mean()),
                "zero_variance_groups": _rounded((groups.std(dim=1) == 0).float().mean()),
            },
        },
    )
    return policy, tokenizer


def build_critic(out: Path, policy: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    train, test = problems()
    seen = roll_out(
        policy, tokenizer, train[:CRITIC_PROBLEMS], n=CRITIC_SAMPLES, seed=SEEDS["critic_rollouts"]
    )
    critic = train_critic(policy, seen, seed=SEEDS["critic"])
    folder = out / "tiny_critic"
    critic.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    held_out = roll_out(policy, tokenizer, test, n=SCORE_SAMPLES, seed=SEEDS["scores"])
    whole, by_position = explained_variance(critic, held_out)
    card.write(
        folder,
        "tiny_critic",
        {
            "seeds": {name: SEEDS[name] for name in ("critic_rollouts", "critic", "scores")},
            "parameters": sum(p.numel() for p in critic.parameters()),
            "rollouts": CRITIC_PROBLEMS * CRITIC_SAMPLES,
            "scores": {
                "split": "test",
                "explained_variance": _rounded(whole),
                "explained_variance_by_position": [_rounded(value) for value in by_position],
            },
        },
    )


def manifest(out: Path) -> dict[str, str]:
    """Path under data/ -> sha256, for every built file."""
    files = sorted(path for folder in FOLDERS for path in (out / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def build(out: Path) -> None:
    build_parquet(out)
    build_critic(out, *build_policy(out))
    (out / "manifest.json").write_text(json.dumps(manifest(out), indent=1) + "\n")


def _rounded(value: torch.Tensor | float) -> float:
    return round(float(value), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder to write to (default: data/)")
    parser.add_argument(
        "--check", action="store_true", help="rebuild elsewhere and compare with what is shipped"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums are reordered by threads, and so are the last bits of the weights
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    if not args.check:
        build(args.out)
        print(f"built {args.out} in {time.perf_counter() - started:.0f} s")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch))
        rebuilt, shipped = manifest(Path(scratch)), manifest(SHIPPED)
    different = sorted(
        path for path in rebuilt.keys() | shipped.keys() if rebuilt.get(path) != shipped.get(path)
    )
    seconds = time.perf_counter() - started
    print(f"rebuilt {len(rebuilt)} files in {seconds:.0f} s; different: {different or 'none'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
