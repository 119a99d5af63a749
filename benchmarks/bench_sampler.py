"""Tokens per CPU-second: the builtin rollout against transformers.generate, on the shipped model and prompts.

Both produce exactly R tokens per row (EOS ignored) from the same left-padded prompts, 8 siblings each.
`generic` is the builtin loop on the model's own forward, as any architecture but a small Qwen2 runs.
"""

import numpy as np
import pyarrow.parquet
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import alternate, report
from minirl.data.build import SHIPPED
from minirl.protocol import DataProto
from minirl.rollout.builtin import BuiltinRollout
from minirl.rollout.decoder import CausalLMDecoder

SIZES = [(128, 16), (256, 48)]
SIBLINGS, PROMPT_LENGTH, ROUNDS = 8, 32, 7


def rollout_of(model, tokenizer, response_length: int) -> BuiltinRollout:
    config = OmegaConf.create(
        dict(
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            do_sample=True,
            prompt_length=PROMPT_LENGTH,
            response_length=response_length,
            ignore_eos=True,
            seed=0,
            calculate_log_probs=True,
            val_kwargs=dict(temperature=0, top_p=1.0, top_k=-1, do_sample=False),
        )
    )
    return BuiltinRollout(config, model, tokenizer)


def measure(model, tokenizer, rows: int, response_length: int) -> dict:
    table = pyarrow.parquet.read_table(SHIPPED / "gsm8k_mini" / "train.parquet")
    messages = table["prompt"].to_pylist()[: rows // SIBLINGS]
    raw_prompt = np.empty(rows, dtype=object)
    raw_prompt[:] = [message for message in messages for _ in range(SIBLINGS)]
    fast = rollout_of(model, tokenizer, response_length)
    generic = rollout_of(model, tokenizer, response_length)
    generic.decoder = CausalLMDecoder(generic.model)

    def ours(rollout: BuiltinRollout, **meta_info) -> torch.Tensor:
        prompts = DataProto(non_tensor_batch={"raw_prompt": raw_prompt}, meta_info=meta_info)
        return rollout.generate_sequences(prompts).batch["responses"]

    def generate(do_sample: bool = True) -> torch.Tensor:
        inputs = tokenizer.apply_chat_template(
            list(raw_prompt),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        )
        width = inputs["input_ids"].shape[1]
        plain = dict(top_k=0, top_p=1.0) if do_sample else {}
        out = model.generate(**inputs, do_sample=do_sample, max_new_tokens=response_length, **plain)
        return out[:, width:]

    greedy = generate(do_sample=False)
    same = torch.equal(ours(fast, do_sample=False), greedy) and torch.equal(
        ours(generic, do_sample=False), greedy
    )
    seconds = alternate(
        {"generate": generate, "generic": lambda: ours(generic), "builtin": lambda: ours(fast)}, rounds=ROUNDS
    )
    tokens = rows * response_length
    return {
        "rows": rows,
        "tokens": response_length,
        "greedy_identical": same,
        **{f"{name}_tok_per_cpu_s": round(tokens / value) for name, value in seconds.items()},
        "generic_ratio": seconds["generate"] / seconds["generic"],
        "builtin_ratio": seconds["generate"] / seconds["builtin"],
    }


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / "tiny_lm").eval()
    model.generation_config.eos_token_id = None  # every row runs to the end
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "tiny_lm")
    report("sampler", [measure(model, tokenizer, rows, length) for rows, length in SIZES])


if __name__ == "__main__":
    main()
