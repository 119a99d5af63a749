"""The gap between the log-probs of vLLM and of the trainer, on the shipped model; tokens per CPU-second.

Same weights on both sides, the trainer in float32. What differs is who computes: other kernels in another
order, and in bfloat16 the rounding of weights and activations. `p_max` is the largest difference of a token's
probability, as training/rollout_probs_diff_max reports it.
"""

import asyncio
import importlib.util
from collections.abc import Iterator

import numpy as np
import pyarrow.parquet
import torch

from benchmarks.bench_sampler import rollout_of
from benchmarks.measure import alternate, report
from minirl.config import compose
from minirl.data.build import SHIPPED
from minirl.protocol import DataProto
from minirl.rollout.sampling import SamplingParams
from minirl.workers.model import load_causal_lm, load_tokenizer

PROMPTS, SIBLINGS, RESPONSE, ROUNDS = 32, 8, 24, 5


def rows(tokenizer) -> Iterator[tuple[list, list[int]]]:
    """(messages, token ids) of every trajectory."""
    table = pyarrow.parquet.read_table(SHIPPED / "gsm8k_mini" / "train.parquet")
    for messages in table["prompt"].to_pylist()[:PROMPTS]:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for _ in range(SIBLINGS):
            yield messages, ids


async def sample(server, prompt_ids: list[list[int]], temperature: float) -> list:
    params = SamplingParams(temperature=temperature)
    return await asyncio.gather(
        *(
            server.generate(ids, params, request_id=str(row), max_tokens=RESPONSE, seed=row)
            for row, ids in enumerate(prompt_ids)
        )
    )


@torch.no_grad()
def gap(model, prompt_ids: list[list[int]], outputs: list, temperature: float) -> dict:
    ours, theirs = [], []
    for ids, output in zip(prompt_ids, outputs, strict=True):
        logits = model(input_ids=torch.tensor([ids + output.token_ids])).logits[0, len(ids) - 1 : -1]
        log_probs = (logits / temperature).log_softmax(-1)
        ours.append(log_probs.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0])
        theirs.append(torch.tensor(output.log_probs))
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    difference = (ours - theirs).abs()
    return {
        "tokens": len(ours),
        "mean": difference.mean().item(),
        "max": difference.max().item(),
        "p_max": (ours.exp() - theirs.exp()).abs().max().item(),
    }


def main() -> None:
    if importlib.util.find_spec("vllm") is None:
        print("vllm_gap: vLLM is not installed, nothing measured; `make vllm` installs it")
        return
    from minirl.rollout.vllm import VLLMServer

    torch.set_num_threads(1)
    path = str(SHIPPED / "tiny_lm")
    model, tokenizer = load_causal_lm(path).eval(), load_tokenizer(path)
    messages, prompt_ids = zip(*rows(tokenizer), strict=True)
    raw_prompt = np.empty(len(messages), dtype=object)
    raw_prompt[:] = messages
    builtin = rollout_of(model, tokenizer, RESPONSE)
    gaps, speeds = [], []
    for dtype in ("float32", "bfloat16"):
        key = "actor_rollout_ref.rollout"
        config = compose(
            [f"{key}.dtype={dtype}", f"{key}.calculate_log_probs=true"]
        ).actor_rollout_ref.rollout
        server = VLLMServer(config, path, tokenizer.eos_token_id, in_process=True)
        for temperature in (1.0, 0.6):
            outputs = asyncio.run(sample(server, prompt_ids, temperature))
            row = {"dtype": dtype, "temperature": temperature}
            gaps.append(row | gap(model, prompt_ids, outputs, temperature))
        config.ignore_eos = True  # so that both produce the same number of tokens
        seconds = alternate(
            {
                "vllm": lambda server=server: asyncio.run(sample(server, prompt_ids, 1.0)),
                "builtin": lambda: builtin.generate_sequences(
                    DataProto(non_tensor_batch={"raw_prompt": raw_prompt}, meta_info={})
                ),
            },
            rounds=ROUNDS,
        )
        tokens = len(prompt_ids) * RESPONSE
        speed = {f"{name}_tok_per_cpu_s": round(tokens / value) for name, value in seconds.items()}
        speeds.append({"dtype": dtype, "rows": len(prompt_ids), "tokens": RESPONSE} | speed)
        asyncio.run(server.close())
    report("vllm_gap", gaps)
    report("vllm_speed", speeds)


if __name__ == "__main__":
    main()
