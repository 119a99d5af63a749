"""One replica over the builtin decoder.

In:  requests one by one -> Out: TokenOutput each; those that wait together are decoded together.
Simplified: a request that arrives while a batch is decoded waits for its end (no continuous batching).
verl: none (verl's replicas are vLLM, SGLang and TensorRT-LLM)
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from minirl.rollout.builtin import BuiltinRollout
from minirl.rollout.lockstep import LockstepBatch
from minirl.rollout.sampling import SamplingParams, row_uniforms
from minirl.rollout.server import RolloutServer, TokenOutput


@dataclass(eq=False)
class _Request:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    request_id: str
    max_tokens: int
    seed: int
    output: asyncio.Future[TokenOutput] = field(default_factory=asyncio.Future)


class BuiltinServer(RolloutServer):
    """The event loop runs the decoder: other coroutines have their turn between two steps."""

    def __init__(self, config: DictConfig, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        """config is `actor_rollout_ref.rollout`; the model is copied, so that only a sync changes it."""
        self.rollout = BuiltinRollout(config, model, tokenizer)  # the weights and their decoder
        self.eos_token_id = None if config.ignore_eos else tokenizer.eos_token_id
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []  # row i of the batch
        self.batch: LockstepBatch | None = None
        self.decoding: asyncio.Task | None = None

    @property
    def version(self) -> int:
        return self.rollout.version

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: SamplingParams,
        *,
        request_id: str,
        max_tokens: int,
        seed: int,
    ) -> TokenOutput:
        assert not self.rollout.asleep, "generate on a sleeping server: call wake_up or update_weights first"
        assert max_tokens >= 1, max_tokens
        request = _Request(tuple(prompt_ids), sampling_params, request_id, max_tokens, seed)
        self.waiting.append(request)
        if self.decoding is None or self.decoding.done():
            # runs after the coroutines that are ready now, so that their requests are in the first batch
            self.decoding = asyncio.create_task(self._decode_all())
        try:
            return await request.output
        except asyncio.CancelledError:
            self._drop(request)
            raise

    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        await self.abort()
        self.rollout.update_weights(named_tensors, version)

    async def sleep(self) -> None:
        await self.abort()
        self.rollout.sleep()

    async def wake_up(self) -> None:
        self.rollout.wake_up()

    async def abort(self, request_ids: list[str] | None = None) -> None:
        for request in [*self.waiting, *self.running]:
            if request_ids is None or request.request_id in request_ids:
                self._answer(request, "aborted", tokens=self._drop(request))

    async def close(self) -> None:
        await self.sleep()

    async def _decode_all(self) -> None:
        while self.waiting:
            self.running, self.waiting = self._next_batch()
            try:
                await self._decode()
            except Exception as error:  # of the model: whoever waits for it must hear of it
                for request in self.running:
                    if not request.output.done():
                        request.output.set_exception(error)
            self.running, self.batch = [], None

    def _next_batch(self) -> tuple[list[_Request], list[_Request]]:
        """The requests that share the first sampling parameters, and the greedy ones; then the rest."""
        params = next((r.params for r in self.waiting if not r.params.greedy), None)
        together = [r for r in self.waiting if r.params.greedy or r.params == params]
        return together, [r for r in self.waiting if not r.params.greedy and r.params != params]

    async def _decode(self) -> None:
        requests = self.running
        # the distinct prompts in order of appearance; siblings point to the same one
        number = {ids: i for i, ids in enumerate(dict.fromkeys(request.prompt_ids for request in requests))}
        limits = torch.tensor([request.max_tokens for request in requests])
        seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        greedy = torch.tensor([request.params.greedy for request in requests])
        params = next((r.params for r in requests if not r.params.greedy), requests[0].params)
        with torch.inference_mode():
            self.batch = LockstepBatch(
                self.rollout.decoder,
                [list(ids) for ids in number],
                torch.tensor([number[request.prompt_ids] for request in requests]),
                row_uniforms(seeds, int(limits.max())),
                params,
                limits=limits,
                greedy=greedy if greedy.any() and not params.greedy else None,
                eos_token_id=self.eos_token_id,
                pad_token_id=self.rollout.tokenizer.pad_token_id,
                device=next(self.rollout.model.parameters()).device,
            )
        while self.batch.going:
            with torch.inference_mode():
                ended = self.batch.step()
            for row in ended:
                eos = int(self.batch.responses[row, self.batch.drawn - 1]) == self.eos_token_id
                self._answer(requests[row], "completed" if eos else "length", self.batch.drawn)
            await asyncio.sleep(0)  # requests come in, aborts and cancellations take effect

    @torch.inference_mode()
    def _drop(self, request: _Request) -> int:
        """Take a request out; returns how many tokens it has."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request not in self.running:
            return 0
        self.batch.stop(self.running.index(request))
        return self.batch.drawn

    def _answer(self, request: _Request, stop_reason: str, tokens: int) -> None:
        if request.output.done():
            return
        token_ids, log_probs = [], []
        if tokens:
            row = self.running.index(request)
            token_ids = self.batch.responses[row, :tokens].tolist()
            log_probs = self.batch.log_probs[row, :tokens].tolist()
        request.output.set_result(TokenOutput(token_ids, log_probs, stop_reason, self.version))
