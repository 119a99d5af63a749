"""The decoding loop: a batch of prompts in lockstep, one token per row and step.

In:  distinct prompts, one uniform number per row and step -> Out: responses, lengths, log-probs.
Simplified: rows may leave the batch, but none may join it (vLLM's continuous batching lets them).
verl: verl.workers.rollout.hf_rollout:HFRollout
"""

import torch
from torch import Tensor

from minirl.rollout.batch_layout import left_pad
from minirl.rollout.decoder import Decoder
from minirl.rollout.sampling import SamplingParams, pick


class LockstepBatch:
    """Prefills at construction; each `step` then draws one token for every row that has not ended.

    Args:
        prompt_ids: the distinct prompts, b of them.
        parent: int64 [B], the prompt of each row.
        uniforms: float32 [B, R], the number that decides each draw.
        limits: int64 [B], tokens after which a row ends without EOS; None = R for all.
        greedy: bool [B], rows that take the argmax; None when no row does.

    Attributes:
        responses: int64 [B, R], right-padded.
        lengths: int64 [B], of the rows that have ended, EOS counted.
        log_probs: float32 [B, R], 0 after the end.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_ids: list[list[int]],
        parent: Tensor,
        uniforms: Tensor,
        params: SamplingParams,
        *,
        limits: Tensor | None = None,
        greedy: Tensor | None,
        eos_token_id: int | None,
        pad_token_id: int,
        device: torch.device,
    ) -> None:
        rows, width = uniforms.shape
        self.decoder, self.params, self.device = decoder, params, device
        self.uniforms, self.greedy, self.eos_token_id = uniforms, greedy, eos_token_id
        self.responses = torch.full((rows, width), pad_token_id)
        self.log_probs = torch.zeros(rows, width)
        self.lengths = torch.full((rows,), width) if limits is None else limits.clone()
        self.drawn = 0  # tokens so far, of every row that still goes
        ids, mask = left_pad(prompt_ids, max(map(len, prompt_ids)), pad_token_id)
        # one prefill per distinct prompt; its cache row and its logits are then copied to every sibling
        self.logits = decoder.prefill(ids.to(device), mask.to(device), width)[parent.to(device)]
        decoder.select(parent.to(device))
        self.held = torch.arange(rows)  # the rows still in the decoder's batch
        self.alive = torch.ones(rows, dtype=torch.bool)  # those of `held` that have not ended
        self.going = rows  # how many those are

    def step(self) -> list[int]:
        """Draw one token for every row that goes; returns the rows that ended with it."""
        t, held = self.drawn, self.held
        greedy = None if self.greedy is None else self.greedy[held].to(self.device)
        token, log_prob = pick(self.logits, self.uniforms[held, t].to(self.device), greedy, self.params)
        drawn, drawn_log_prob = token.cpu(), log_prob.cpu()
        going = held[self.alive]
        self.responses[going, t] = drawn[self.alive]
        self.log_probs[going, t] = drawn_log_prob[self.alive]
        self.drawn += 1
        ended = self.lengths[held] == self.drawn
        if self.eos_token_id is not None:
            ended |= drawn == self.eos_token_id
        ended &= self.alive
        self._end(ended)
        if self.going:
            self._advance(token)
        return held[ended].tolist()

    def stop(self, row: int) -> None:
        """End a row where it stands. Between steps only."""
        self._end((self.held == row) & self.alive)

    def _end(self, ended: Tensor) -> None:
        self.lengths[self.held[ended]] = self.drawn
        self.alive &= ~ended
        self.going = int(self.alive.sum())

    def _advance(self, token: Tensor) -> None:
        """The logits after `token` [rows of `held`]."""
        # dropping rows copies the cache, so wait until a quarter of the batch has ended
        if self.going <= 0.75 * len(self.held):
            keep = self.alive.nonzero()[:, 0]
            self.decoder.select(keep.to(self.device))
            self.held, self.alive, token = self.held[keep], self.alive[keep], token[keep.to(self.device)]
        self.logits = self.decoder.step(token)


def generate(
    decoder: Decoder,
    prompt_ids: list[list[int]],
    parent: Tensor,
    uniforms: Tensor,
    params: SamplingParams,
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    """The whole loop; arguments as for LockstepBatch.

    Returns:
        responses int64 [B, R], right-padded; lengths int64 [B], EOS counted; log-probs float32 [B, R].
    """
    batch = LockstepBatch(decoder, prompt_ids, parent, uniforms, params, **options)
    while batch.going:
        batch.step()
    return batch.responses, batch.lengths, batch.log_probs
