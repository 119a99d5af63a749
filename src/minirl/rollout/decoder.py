"""Incremental decoding of any transformers causal LM: the prompt once, then one token per row and call.

In:  token ids, left-padded -> Out: next-token logits [rows, V].
Simplified: one KV cache for the whole batch; no paging, no continuous batching.
verl: verl.workers.rollout.hf_rollout:HFRollout
"""

import inspect
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache


class Decoder(Protocol):
    """Holds the KV cache of the rows being generated."""

    def prefill(self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int) -> Tensor:
        """[b, P] distinct prompts -> logits [b, V] of their first response token; starts a new cache."""

    def select(self, rows: Tensor) -> None:
        """Keep the cache rows `rows`, in this order: repeated for siblings, left out when finished."""

    def step(self, tokens: Tensor) -> Tensor:
        """[rows] the tokens just drawn -> logits [rows, V] of the next."""


class CausalLMDecoder:
    """The generic path: the model's own forward with a DynamicCache."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in accepted
        # without it the prompt's logits [b, P, V] are all computed for one row of each
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def prefill(self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int) -> Tensor:
        self.cache = DynamicCache(config=self.model.config)
        self.mask = attention_mask
        # real tokens count from 0 whatever the padding before them
        positions = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
        self.next_position = positions[:, -1] + 1
        return self._forward(input_ids, positions)

    def select(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]
        self.next_position = self.next_position[rows]

    def step(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=-1)
        positions = self.next_position[:, None]
        self.next_position = self.next_position + 1
        return self._forward(tokens[:, None], positions)

    def _forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        where = {"position_ids": positions} if self.takes_positions else {}
        out = self.model(
            input_ids=input_ids,
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
            **where,
            **self.last_only,
        )
        return out.logits[:, -1]
