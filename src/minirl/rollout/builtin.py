"""The default rollout: a KV-cache sampler over transformers, in this process.

In:  non_tensor_batch[raw_prompt] -> Out: prompts, responses, response_mask, input_ids, attention_mask,
position_ids, rollout_log_probs (see base.py).
Simplified: a single turn, one batch in lockstep; siblings share one prefill, finished rows leave the batch.
verl: verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop
"""

import copy
import time
from collections.abc import Iterable

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from minirl.protocol import DataProto
from minirl.rollout import qwen2_decoder
from minirl.rollout.base import Rollout
from minirl.rollout.batch_layout import assemble
from minirl.rollout.chat_template import encode_prompt
from minirl.rollout.decoder import CausalLMDecoder, Decoder
from minirl.rollout.lockstep import generate
from minirl.rollout.sampling import row_seed, row_uniforms, sampling_params, sibling_ranks


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
        params = sampling_params(self.config, prompts.meta_info)
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
        batch = assemble(
            prompt_ids,
            responses,
            lengths,
            log_probs=log_probs if self.config.calculate_log_probs else None,
            prompt_length=self.config.prompt_length,
            pad_token_id=self.tokenizer.pad_token_id,
        )
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

    def _tokenize(self, raw_prompt: np.ndarray) -> list[tuple[int, ...]]:
        seen: dict[str, tuple[int, ...]] = {}
        prompt_ids = []
        for messages in raw_prompt:
            key = repr(messages)
            if key not in seen:
                seen[key] = tuple(encode_prompt(self.tokenizer, messages, limit=self.config.prompt_length))
            prompt_ids.append(seen[key])
        return prompt_ids

    def _row_seeds(self, prompts: DataProto, prompt_ids: list[tuple[int, ...]]) -> np.ndarray:
        """uint64 [B]"""
        run = (prompts.meta_info.get("rollout_seed", 0), prompts.meta_info.get("global_steps", 0))
        own = prompts.non_tensor_batch.get("__seed__")
        own = sibling_ranks(prompt_ids) if own is None else own
        seeds = [row_seed(*run, rank, ids) for rank, ids in zip(own, prompt_ids, strict=True)]
        return np.array(seeds, dtype=np.uint64)
