"""GSM8K in verl's parquet schema, for a GPU.

in: rows with question and answer -> out: data_source, prompt, ability, reward_model, extra_info.
verl: examples/data_preprocess/gsm8k.py (not in the wheel)
"""

import os
import re
from pathlib import Path
from typing import Literal

INSTRUCTION = 'Think step by step. Write the final answer, a number, after "####".'
SPLITS = ("train", "test")


def to_row(question: str, answer: str, split: Literal["train", "test"], index: int) -> dict:
    """One row. `answer` is GSM8K's solution, its last line "#### <number>".

    Raises ValueError when it has no such line.
    """
    found = re.search(r"#### (-?[0-9.,]+)", answer)
    if not found:
        raise ValueError(f"GSM8K {split} row {index}: the answer has no '#### <number>'")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def prepare(source: str, folder: Path | None = None) -> list[str]:
    """Paths of train.parquet and test.parquet, fetched and converted unless they are in `folder` already.

    source: hub | modelscope | https://a-mirror | a folder; of a folder, its gsm8k/{train,test}.parquet in
    verl's schema if they exist, else the hub.
    Raises ValueError when the data cannot be fetched.
    """
    beside_model = Path(source).expanduser() / "gsm8k"
    if (beside_model / "train.parquet").is_file():
        return [str(beside_model / f"{split}.parquet") for split in SPLITS]
    folder = folder or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "minirl" / "gsm8k"
    return [str(_prepare_split(source, split, folder / f"{split}.parquet")) for split in SPLITS]


def _prepare_split(source: str, split: str, target: Path) -> Path:
    if target.is_file():
        return target
    import pandas as pd

    try:
        table = pd.read_parquet(_fetch(source, split))
    except ImportError as error:
        raise ValueError(f"MINIRL_MODEL={source}: run `pip install {error.name}` first") from error
    except Exception as error:  # the clients raise a dozen kinds for "not reachable"
        raise ValueError(
            f"could not fetch GSM8K from {source} ({type(error).__name__}); set MINIRL_MODEL to modelscope, "
            "to the https address of a mirror of the hub, or to a model folder that holds "
            "gsm8k/{train,test}.parquet"
        ) from error
    pairs = zip(table["question"], table["answer"], strict=True)
    rows = [to_row(question, answer, split, index) for index, (question, answer) in enumerate(pairs)]
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    pd.DataFrame(rows).to_parquet(partial)
    partial.replace(target)  # whole or not at all
    return target


def _fetch(source: str, split: str) -> str:
    name = f"main/{split}-00000-of-00001.parquet"
    if source == "modelscope":
        from modelscope.hub.file_download import dataset_file_download

        return dataset_file_download("openai-mirror/gsm8k", name)
    from huggingface_hub import hf_hub_download

    endpoint = source if source.startswith("https://") else None
    return hf_hub_download("openai/gsm8k", name, repo_type="dataset", endpoint=endpoint)
