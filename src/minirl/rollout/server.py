"""What one replica of the rollout service does: token ids in, token ids out, weights in.

In:  prompt_ids, SamplingParams, max_tokens, seed -> Out: TokenOutput.
Simplified: a plain object with coroutines, where verl has a Ray actor around an engine with an HTTP server.
verl: verl.workers.rollout.replica:RolloutReplica
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from minirl.rollout.sampling import SamplingParams


class ReplicaError(RuntimeError):
    """The replica cannot answer (its process is dead, its engine stopped): ask another one."""


@dataclass
class TokenOutput:
    """One response. All its tokens were drawn with the weights of `version`.

    verl: verl.workers.rollout.replica:TokenOutput
    """

    token_ids: list[int]  # EOS included where it was drawn
    # of each token under the distribution it was drawn from: after temperature, top-k, top-p, renormalised;
    # greedy: the model's own. None when rollout.calculate_log_probs is off and they would cost something
    log_probs: list[float] | None
    stop_reason: str  # completed (EOS) | length (max_tokens) | aborted
    version: int


class RolloutServer(ABC):
    """One replica: its own copy of the weights, its own KV cache.

    All coroutines of a server run in one event loop.
    verl: verl.workers.rollout.replica:RolloutReplica
    """

    version: int  # of the weights it holds; 0 before the first sync

    @abstractmethod
    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: SamplingParams,
        *,
        request_id: str,
        max_tokens: int,
        seed: int,
    ) -> TokenOutput:
        """Continue `prompt_ids` by at most `max_tokens` >= 1 tokens; requests that overlap may share a batch.

        Args:
            request_id: of this call alone (one turn, one try), so that `abort` can name it.
            seed: 0 <= seed < 2**64. The same seed, prompt and weights give the same tokens, whatever else the
                server is decoding.

        Cancelling the coroutine (a timeout does) frees the request. On a sleeping server: AssertionError.

        Raises:
            ReplicaError: this replica will not answer; another may.
        """

    @abstractmethod
    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take the trainer's weights: names and shapes as in transformers. Wakes the server.

        Requests in flight are aborted first, so no response mixes two versions; cached prefixes are dropped,
        as their keys and values came from the old weights.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Abort what is in flight; free the memory that only generation needs."""

    @abstractmethod
    async def wake_up(self) -> None:
        """Undo `sleep`: generation is allowed again."""

    @abstractmethod
    async def abort(self, request_ids: list[str] | None = None) -> None:
        """Stop these requests (None = all). They return the tokens they have, stop_reason "aborted".

        Unknown or finished ids are ignored. New requests are accepted at once.
        verl: verl.workers.rollout.replica:RolloutReplica.abort_all_requests
        """

    @abstractmethod
    async def close(self) -> None:
        """Abort what is in flight and free everything; the server is not used again."""
