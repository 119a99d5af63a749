"""The trainer's weights into a running vLLM worker, in place.

In:  (name, tensor) pairs as transformers names them -> Out: nothing; the next forward pass uses them.
vLLM mixes this class into its worker (`worker_extension_cls`) and calls its methods by name.
Simplified: whole tensors on every rank, no quantisation, no LoRA.
verl: verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension
"""

from __future__ import annotations

import torch
from torch import Tensor


class WeightReceiver:
    """begin_weights, then receive_* any number of times, then end_weights.

    A worker does not keep what a checkpoint holds: q, k and v are one matrix, and a CPU's matrices are packed
    for its instructions. vLLM's layerwise reload loads a layer as at the start, repacks it and copies the
    result over the old one, so that captured CUDA graphs stay valid.
    """

    def begin_weights(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.get_model()
        # tied parameters are listed once
        self.awaited_weights = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def receive_tensors(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self.awaited_weights -= self.get_model().load_weights(named_tensors)

    def receive_file(self, path: str) -> None:
        from safetensors.torch import load_file

        self.receive_tensors(list(load_file(path).items()))

    def end_weights(self) -> list[str]:
        """Returns: the parameters that got no tensor."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.get_model()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
            # a tied head is not in the checkpoint, so the reload passes it by: its weight is the embedding's
            # and new, but what a CPU packed from it is old
            head = getattr(model, "lm_head", None)
            if self.model_config.hf_text_config.tie_word_embeddings and head is not None:
                head.quant_method.process_weights_after_loading(head)
        return sorted(self.awaited_weights)
