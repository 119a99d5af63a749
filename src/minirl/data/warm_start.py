"""The shipped tokenizer, policy and critic: trained from nothing on a sloppy annotator's answers.

In:  problems (task.py) -> Out: a tokenizer, a Qwen2ForCausalLM that answers about 0.3 of the problems, a
Qwen2ForTokenClassification whose values tell good beginnings from bad ones.
Simplified: verl starts from released weights; this stands in for pre-training and SFT, at a laptop's size.
verl: none (SFT: verl.trainer.sft_trainer:SFTTrainer)
"""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    Qwen2Tokenizer,
)

from minirl.data.task import Chain, Problem, write_answer
from minirl.reward.gsm8k import compute_score
from minirl.rollout.builtin import generate
from minirl.rollout.qwen2_decoder import Qwen2Decoder
from minirl.rollout.sampling import SamplingParams, row_uniforms

PAD, EOS, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_RESPONSE_LENGTH = 24

# How the sloppy annotator slips. A slip on a loss happens more often than not, so that the likeliest answer
# is wrong too: greedy decoding starts as low as sampling.
LOSS_READ_AS_GAIN = 0.6
STOPS_AT_FIRST_RESULT = 0.35


def train_tokenizer(texts: list[str]) -> Qwen2Tokenizer:
    """BPE over bytes with Qwen2's own rule for cutting text: words, single digits, runs of signs.

    It must be that rule: transformers' AutoTokenizer applies it to every checkpoint whose model is a Qwen2.
    """
    raw = Qwen2Tokenizer().backend_tokenizer
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1000,
            min_frequency=2,
            special_tokens=[PAD, EOS, USER, ASSISTANT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all bytes: lossless on any text
            show_progress=False,
        ),
    )
    trained = json.loads(raw.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(pair) for pair in trained["merges"]],
        unk_token=PAD,  # never produced; left out, Qwen2Tokenizer would add one more token
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        model_max_length=128,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def sloppy_answer(chain: Chain, draw: random.Random) -> str:
    """What the annotator writes: fluent, correct arithmetic, often not the question's."""
    steps = tuple(
        ("+" if op == "-" and draw.random() < LOSS_READ_AS_GAIN else op, number) for op, number in chain.steps
    )
    written = Chain(chain.start, steps)
    final = written.results()[0] if draw.random() < STOPS_AT_FIRST_RESULT else None
    return write_answer(written, final)


def new_policy(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,  # at the usual 0.02 so small a model needs twice the steps
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config)


@dataclass(frozen=True)
class Sequences:
    """N prompts with responses: prompt first, padding last; response_mask marks the response's tokens."""

    input_ids: Tensor  # [N, T]
    attention_mask: Tensor  # [N, T]
    response_mask: Tensor  # [N, T]

    def __getitem__(self, rows) -> "Sequences":
        return Sequences(self.input_ids[rows], self.attention_mask[rows], self.response_mask[rows])

    def __len__(self) -> int:
        return len(self.input_ids)


def prompt_ids(tokenizer: Qwen2Tokenizer, problems: list[Problem]) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for problem in problems
    ]


def pack(prompts: list[list[int]], responses: list[list[int]], pad_token_id: int) -> Sequences:
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in rows])
    column = torch.arange(width)
    end = torch.tensor([len(row) for row in rows])[:, None]
    start = torch.tensor([len(p) for p in prompts])[:, None]
    return Sequences(ids, (column < end).long(), (column >= start) & (column < end))


def train(
    model: nn.Module,
    data: Sequences,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> None:
    """AdamW with a linear decay to zero; loss_of(model, rows of data) is the mean over response tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / steps)
        rows = torch.randint(len(data), (batch_size,), generator=generator)
        loss = loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def train_policy(
    tokenizer: Qwen2Tokenizer,
    problems: list[Problem],
    *,
    seed: int,
    steps: int = 500,
    batch_size: int = 64,
    lr: float = 4e-3,
) -> Qwen2ForCausalLM:
    """SFT on the sloppy annotator: cross entropy of the response tokens."""
    draw = random.Random(seed)
    chosen = [draw.choice(problems) for _ in range(steps * batch_size // 2)]
    answers = tokenizer([sloppy_answer(problem.chain, draw) for problem in chosen])["input_ids"]
    data = pack(
        prompt_ids(tokenizer, chosen),
        [ids + [tokenizer.eos_token_id] for ids in answers],
        tokenizer.pad_token_id,
    )
    model = new_policy(tokenizer, seed=seed)

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        part = data[rows]
        logits = model(input_ids=part.input_ids, attention_mask=part.attention_mask, use_cache=False).logits
        scored = part.response_mask[:, 1:]  # the logit at t scores the token at t + 1
        return F.cross_entropy(logits[:, :-1][scored], part.input_ids[:, 1:][scored])

    train(model, data, loss_of, steps=steps, batch_size=batch_size, lr=lr, seed=seed)
    return model


@dataclass(frozen=True)
class Rollouts:
    """Responses sampled from a policy and their rewards."""

    sequences: Sequences
    reward: Tensor  # [N]


def roll_out(
    policy: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: list[Problem],
    *,
    n: int,
    seed: int,
    do_sample: bool = True,
) -> Rollouts:
    """n responses per problem at temperature 1 (or greedy), scored by verl's gsm8k rule."""
    prompts = prompt_ids(tokenizer, problems)
    parent = torch.arange(len(problems)).repeat_interleave(n)
    seeds = np.random.default_rng(seed).integers(2**63, size=len(parent), dtype=np.uint64)
    with torch.no_grad():
        responses, lengths, _ = generate(
            Qwen2Decoder(policy),
            prompts,
            parent,
            row_uniforms(seeds, MAX_RESPONSE_LENGTH),
            SamplingParams(do_sample=do_sample),
            greedy=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            device=torch.device("cpu"),
        )
    kept = [row[:length] for row, length in zip(responses.tolist(), lengths.tolist(), strict=True)]
    texts = tokenizer.batch_decode(kept, skip_special_tokens=True)
    asked = [problems[i] for i in parent.tolist()]
    reward = [compute_score(text, problem.ground_truth) for text, problem in zip(texts, asked, strict=True)]
    sequences = pack([prompts[i] for i in parent.tolist()], kept, tokenizer.pad_token_id)
    return Rollouts(sequences, torch.tensor(reward, dtype=torch.float32))


def new_critic(policy: Qwen2ForCausalLM, *, seed: int) -> Qwen2ForTokenClassification:
    """The policy's layers under one number per token, as verl's critic is usually initialised."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    config.classifier_dropout = 0.0
    torch.manual_seed(seed)
    critic = Qwen2ForTokenClassification(config)
    critic.model.load_state_dict(policy.model.state_dict())
    with torch.no_grad():
        critic.score.weight.zero_()
        critic.score.bias.zero_()
    return critic


def train_critic(
    policy: Qwen2ForCausalLM,
    rollouts: Rollouts,
    *,
    seed: int,
    steps: int = 300,
    batch_size: int = 64,
    lr: float = 1e-3,
) -> Qwen2ForTokenClassification:
    """Regression of the final reward on every position before a response token (gamma = lambda = 1)."""
    critic = new_critic(policy, seed=seed)

    def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
        part = rollouts.sequences[rows]
        values = values_of(model, part)
        error = (values - rollouts.reward[rows, None]) ** 2
        return error[part.response_mask[:, 1:]].mean()

    train(critic, rollouts.sequences, loss_of, steps=steps, batch_size=batch_size, lr=lr, seed=seed)
    return critic


def values_of(critic: nn.Module, part: Sequences) -> Tensor:
    """[N, T-1]: column t is the value before the token at t + 1, so it aligns with response_mask[:, 1:]."""
    out = critic(input_ids=part.input_ids, attention_mask=part.attention_mask, use_cache=False)
    return out.logits[:, :-1, 0]


def explained_variance(critic: nn.Module, rollouts: Rollouts) -> tuple[float, list[float]]:
    """1 - Var(reward - value) / Var(reward), over all response tokens and by the token's number.

    Entry t is for values read before response token t, over the rollouts that are longer than t; positions
    that fewer than half of the rollouts reach are left out.
    """
    with torch.no_grad():
        values = values_of(critic, rollouts.sequences)
    mask = rollouts.sequences.response_mask[:, 1:]
    reward = rollouts.reward[:, None].expand_as(values)
    number = mask.cumsum(dim=-1) - 1

    def share(where: Tensor) -> float:
        return float(1 - (reward[where] - values[where]).var() / reward[where].var())

    reached = [mask & (number == t) for t in range(MAX_RESPONSE_LENGTH)]
    return share(mask), [share(where) for where in reached if where.sum() >= len(values) / 2]
