"""The source map chapter's batch, by hand: 2 prompts x 4 responses, P = 6, R = 8, a token per symbol.

Everything that is computed is computed by verl's own functions; the chapter's tables are checked against it.
"""

import uuid

import numpy as np
import torch

from minirl.pin import use_verl

P, R, N = 6, 8, 4
PAD, EOS = "<pad>", "<eos>"
PROMPTS = {"A": "5 + 1 - 2 =", "B": "7 - 3 ="}
ANSWERS = {"A": "4", "B": "4"}
RESPONSES = {
    "A": ["6 - 2 #### 4", "#### 6", "6 + 2 #### 8", "6 - 2 6 - 2 6 -"],
    "B": ["#### 4", "#### 10", "7 - 3 #### 4", "#### 4"],
}


def rows() -> list[tuple[str, list[str]]]:
    """(prompt's name, tokens of the response), in the order that repeat(interleave=True) gives."""
    out = []
    for name, texts in RESPONSES.items():
        for text in texts:
            tokens = text.split()
            out.append((name, tokens if len(tokens) == R else [*tokens, EOS]))
    return out


def loaded():
    """Station 1: what the dataloader gives, as DataProto, with a uid per prompt."""
    use_verl()
    from verl.protocol import DataProto
    from verl.utils.dataset.rl_dataset import collate_fn

    samples = [
        {
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": ANSWERS[name]},
            "extra_info": {"index": i},
            "raw_prompt": [{"role": "user", "content": text}],
            "index": i,
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        }
        for i, (name, text) in enumerate(PROMPTS.items())
    ]
    batch = DataProto.from_single_dict(collate_fn(samples))
    batch.meta_info["temperature"] = 1.0
    batch.non_tensor_batch["uid"] = np.array(
        [str(uuid.uuid4()) for _ in range(len(batch.batch))], dtype=object
    )
    return batch


def gen_batch_of(batch):
    """Station 2, by verl's own method, without a trainer behind it."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    return RayPPOTrainer._get_gen_batch(None, batch)


def rolled_out(gen_batch):
    """Stations 3 and 4: a rollout written by hand, scored by verl's GSM8K rule, placed as verl places it."""
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.utils.reward_score.gsm8k import compute_score

    vocab = {PAD: 0, EOS: 1}

    def ids(tokens):
        return [vocab.setdefault(token, len(vocab)) for token in tokens]

    prompts = torch.zeros(len(rows()), P, dtype=torch.long)
    responses = torch.zeros(len(rows()), R, dtype=torch.long)
    attention_mask = torch.zeros(len(rows()), P + R, dtype=torch.long)
    scores = []
    for i, (name, tokens) in enumerate(rows()):
        prompt = PROMPTS[name].split()
        prompts[i, P - len(prompt) :] = torch.tensor(ids(prompt))
        responses[i, : len(tokens)] = torch.tensor(ids(tokens))
        attention_mask[i, P - len(prompt) : P + len(tokens)] = 1
        text = " ".join(token for token in tokens if token != EOS)
        scores.append(float(compute_score(text, ANSWERS[name])))
    response_mask = attention_mask[:, P:].clone()
    last = attention_mask[:, P:].sum(1) - 1
    rm_scores = torch.zeros(len(scores), R)
    rm_scores[torch.arange(len(scores)), last] = torch.tensor(scores)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "rm_scores": rm_scores,
    }
    return DataProto(
        TensorDict(tensors, batch_size=len(scores)), {"acc": np.array(scores)}, {"reward_extra_keys": ["acc"]}
    )


def with_advantages():
    """Stations 1 to 7 for GRPO: the batch as `compute_advantage` leaves it."""
    batch = loaded()
    gen_batch = gen_batch_of(batch)
    output = rolled_out(gen_batch.repeat(N, interleave=True))
    batch = batch.repeat(N, interleave=True).union(output)
    from verl.trainer.ppo.ray_trainer import compute_advantage

    batch.batch["token_level_scores"] = batch.batch["rm_scores"]
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    return compute_advantage(batch, adv_estimator="grpo")
