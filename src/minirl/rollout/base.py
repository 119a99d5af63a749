"""The rollout interface: what the trainer needs from whatever generates responses.

In:  non_tensor_batch[raw_prompt] (already repeated n times) -> Out: prompts, responses, response_mask,
input_ids, attention_mask, position_ids and, if rollout.calculate_log_probs, rollout_log_probs.
Simplified: one object in this process instead of a manager over agent loops and inference servers.
verl: verl.experimental.agent_loop.agent_loop:AgentLoopManager
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from minirl.protocol import DataProto


class Rollout(ABC):
    """Generates responses with its own copy of the policy's weights.

    `version` is that of the weights it holds: the policy that generates is only as new as the last sync.

    verl: verl.workers.rollout.base:BaseRollout
    """

    version: int

    @abstractmethod
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate one response per row.

        Args:
            prompts: B rows. non_tensor_batch: `raw_prompt` (list of message dicts), optional `__do_sample__`
                (bool, False makes the row greedy), optional `__seed__` (int, the row's own).
                meta_info, all optional: `validate`, `global_steps`, `rollout_seed`, `temperature`, `top_p`,
                `top_k`, `do_sample`.

        Returns:
            DataProto with int64 `prompts` [B, P] left-padded, `responses` [B, R] right-padded,
            `response_mask` [B, R], `input_ids`, `attention_mask`, `position_ids` [B, P+R]; float32
            `rollout_log_probs` [B, R] if rollout.calculate_log_probs;
            non_tensor_batch `__num_turns__` int32, `multi_modal_inputs`, `raw_prompt`; meta_info `timing`.

        verl: verl.experimental.agent_loop.agent_loop:AgentLoopManager.generate_sequences
        """

    @abstractmethod
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the trainer's weights into the rollout's own and remember their version.

        verl: verl.workers.rollout.base:BaseRollout.update_weights
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free what only generation needs (KV cache, weights) while the trainer uses the memory."""

    @abstractmethod
    def wake_up(self) -> None:
        """Undo `sleep`; generation is allowed again."""
