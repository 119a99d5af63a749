"""The default rollout: a KV-cache sampler over transformers, in this process.

In:  non_tensor_batch[raw_prompt] -> Out: prompts, responses, response_mask, input_ids, attention_mask,
position_ids, rollout_log_probs (see base.py).
Simplified: a single turn, one batch in lockstep; siblings share one prefill, finished rows leave the batch.
verl: verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop
"""

import copy
import hashlib
import time
from collections.abc import Iterable

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from minirl.protocol import DataProto
from minirl.rollout import qwen2_decoder
from minirl.rollout.base import Rollout
from minirl.rollout.decoder import CausalLMDecoder, Decoder
from minirl.rollout.sampling import SamplingParams, pick, row_uniforms


class BuiltinRollout(Rollout):
    """verl: verl.workers.rollout.hf_rollout:HFRollout"""

    def __init__(self, config: DictConfig, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        """config is `actor_rollout_ref.rollout`; the model is copied, so that only a sync changes it."""
        if tokenizer.pad_token_id is None:
            raise ValueError(
                "tokenizer has no pad token: set tokenizer.pad_token, for example to tokenizer.eos_token"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("tokenizer has no eos token, so no response could end: set tokenizer.eos_token")
        self.config = config
        self.tokenizer = tokenizer
        self.version = 0
        self.asleep = False
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decoder = self._build_decoder()

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in own:
                    raise ValueError(f"update_weights got {name!r}, which the rollout's model does not have")
                assert own[name].shape == tensor.shape, (name, own[name].shape, tensor.shape)
                own[name].copy_(tensor)
        self.version = version
        self.asleep = False
        self.decoder = self._build_decoder()  # the fast path keeps fused copies

    def sleep(self) -> None:
        self.asleep = True
        self.decoder = None

    def wake_up(self) -> None:
        self.asleep = False
        self.decoder = self._build_decoder()

    @torch.inference_mode()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        started = time.perf_counter()
        assert not self.asleep, (
            "generate_sequences on a sleeping rollout: call wake_up or update_weights first"
        )
        params = self._sampling_params(prompts.meta_info)
        raw_prompt = prompts.non_tensor_batch["raw_prompt"]
        prompt_ids = self._tokenize(raw_prompt)
        # the distinct prompts in order of appearance; siblings point to the same one
        number = {ids: i for i, ids in enumerate(dict.fromkeys(prompt_ids))}
        parent = torch.tensor([number[ids] for ids in prompt_ids])
        wants_sample = prompts.non_tensor_batch.get("__do_sample__")
        greedy = None
        if wants_sample is not None and not params.greedy and not prompts.meta_info.get("validate", False):
            greedy = torch.tensor(~wants_sample.astype(bool))
        uniforms = row_uniforms(self._row_seeds(prompts, prompt_ids), self.config.response_length)
        responses, lengths, log_probs = generate(
            self.decoder,
            [list(ids) for ids in number],
            parent,
            uniforms,
            params,
            greedy=greedy,
            eos_token_id=None if self.config.ignore_eos else self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            device=next(self.model.parameters()).device,
        )
        batch = self._assemble(prompt_ids, responses, lengths, log_probs)
        seconds = time.perf_counter() - started
        slowest = int(lengths.argmax())
        timing = {
            "agent_loop/slowest/generate_sequences": seconds,
            "agent_loop/slowest/prompt_length": len(prompt_ids[slowest]),
            "agent_loop/slowest/response_length": int(lengths[slowest]),
        }
        non_tensor_batch = {
            "__num_turns__": np.full(len(prompt_ids), 2, dtype=np.int32),  # the prompt and the response
            "multi_modal_inputs": np.array([{} for _ in prompt_ids], dtype=object),
            "raw_prompt": raw_prompt,
        }
        return DataProto(batch=batch, non_tensor_batch=non_tensor_batch, meta_info={"timing": timing})

    def _build_decoder(self) -> Decoder:
        if qwen2_decoder.supports(self.model):
            return qwen2_decoder.Qwen2Decoder(self.model)
        return CausalLMDecoder(self.model)

    def _sampling_params(self, meta_info: dict) -> SamplingParams:
        """rollout.* (rollout.val_kwargs.* when validating), overridden by meta_info."""
        source = self.config.val_kwargs if meta_info.get("validate", False) else self.config
        names = ("temperature", "top_p", "top_k", "do_sample")
        return SamplingParams(**{name: meta_info.get(name, source[name]) for name in names})

    def _tokenize(self, raw_prompt: np.ndarray) -> list[tuple[int, ...]]:
        limit = self.config.prompt_length
        seen: dict[str, tuple[int, ...]] = {}
        prompt_ids = []
        for messages in raw_prompt:
            key = repr(messages)
            if key not in seen:
                encoded = self.tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
                )
                if len(encoded) > limit:
                    raise ValueError(
                        f"a prompt has {len(encoded)} tokens but data.max_prompt_length is {limit}: raise it "
                        "or set data.filter_overlong_prompts=True to leave such prompts out"
                    )
                seen[key] = tuple(encoded)
            prompt_ids.append(seen[key])
        return prompt_ids

    def _row_seeds(self, prompts: DataProto, prompt_ids: list[tuple[int, ...]]) -> np.ndarray:
        """uint64 [B] of run seed, global step and the row's `__seed__`, or its prompt and sibling rank.

        So a row draws the same numbers whatever the other rows are and wherever it stands among them.
        """
        run = (prompts.meta_info.get("rollout_seed", 0), prompts.meta_info.get("global_steps", 0))
        own = prompts.non_tensor_batch.get("__seed__")
        if own is not None:
            names = [(*run, int(seed)) for seed in own]
        else:
            siblings: dict[tuple[int, ...], int] = {}
            names = []
            for ids in prompt_ids:
                siblings[ids] = siblings.get(ids, -1) + 1
                names.append((*run, siblings[ids], ids))
        digests = b"".join(hashlib.blake2b(repr(name).encode(), digest_size=8).digest() for name in names)
        return np.frombuffer(digests, dtype="<u8")

    def _assemble(
        self, prompt_ids: list[tuple[int, ...]], responses: Tensor, lengths: Tensor, log_probs: Tensor
    ) -> TensorDict:
        """Fixed widths P and R, so that batches of different steps have one shape."""
        rows, width = len(prompt_ids), self.config.prompt_length
        prompts, prompt_mask = left_pad(prompt_ids, width, self.tokenizer.pad_token_id)
        response_mask = (torch.arange(responses.shape[1]) < lengths[:, None]).long()
        attention_mask = torch.cat([prompt_mask, response_mask], dim=-1)
        fields = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": response_mask,
            "input_ids": torch.cat([prompts, responses], dim=-1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=-1) - 1).clamp(min=0) * attention_mask,
        }
        if self.config.calculate_log_probs:
            fields["rollout_log_probs"] = log_probs
        return TensorDict(fields, batch_size=rows)


def left_pad(prompt_ids: list[tuple[int, ...]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Returns: int64 [B, width] ids with the padding first, and their mask (1 = real token)."""
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in prompt_ids])
    lengths = torch.tensor([len(row) for row in prompt_ids])
    return ids, (torch.arange(width) >= width - lengths[:, None]).long()


def generate(
    decoder: Decoder,
    prompt_ids: list[list[int]],
    parent: Tensor,
    uniforms: Tensor,
    params: SamplingParams,
    *,
    greedy: Tensor | None,
    eos_token_id: int | None,
    pad_token_id: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """The decoding loop.

    Args:
        prompt_ids: the distinct prompts, b of them
        parent: int64 [B], the prompt of each row
        uniforms: [B, R], the number that decides each draw
        greedy: bool [B] or None

    Returns:
        responses int64 [B, R], right-padded; lengths int64 [B], EOS counted; log-probs float32 [B, R].
    """
    rows, steps = uniforms.shape
    responses = torch.full((rows, steps), pad_token_id)
    log_probs = torch.zeros(rows, steps)
    lengths = torch.full((rows,), steps)
    ids, mask = left_pad(prompt_ids, max(map(len, prompt_ids)), pad_token_id)
    # one prefill per distinct prompt; its cache row and its logits are then copied to every sibling
    logits = decoder.prefill(ids.to(device), mask.to(device), steps)[parent.to(device)]
    decoder.select(parent.to(device))
    held = torch.arange(rows)  # the rows still in the decoder's batch
    alive = torch.ones(rows, dtype=torch.bool)  # those of `held` that have not ended
    for t in range(steps):
        token, log_prob = pick(
            logits,
            uniforms[held, t].to(device),
            None if greedy is None else greedy[held].to(device),
            params,
        )
        drawn, drawn_log_prob = token.cpu(), log_prob.cpu()
        going = held[alive]
        responses[going, t] = drawn[alive]
        log_probs[going, t] = drawn_log_prob[alive]
        ended = alive & (drawn == eos_token_id) if eos_token_id is not None else torch.zeros_like(alive)
        lengths[held[ended]] = t + 1
        alive = alive & ~ended
        remaining = int(alive.sum())
        if remaining == 0 or t + 1 == steps:
            break
        # dropping rows copies the cache, so wait until a quarter of the batch has ended
        if remaining <= 0.75 * len(held):
            keep = alive.nonzero()[:, 0]
            decoder.select(keep.to(device))
            held, token, alive = held[keep], token[keep.to(device)], alive[keep]
        logits = decoder.step(token)
    return responses, lengths, log_probs
