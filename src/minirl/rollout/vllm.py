"""vLLM as one replica of the rollout service: the real engine behind the same interface as the builtin one.

In:  prompt_ids, SamplingParams, max_tokens, seed -> Out: TokenOutput (see server.py).
Two forms, one class: the engine in this process, or in processes of its own as verl runs it.
Simplified: no HTTP server around it, one node; weights travel through shared memory, not CUDA IPC or NCCL.
verl: verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from minirl.rollout.sampling import SamplingParams
from minirl.rollout.server import ReplicaError, RolloutServer, TokenOutput
from minirl.rollout.vllm_in_process import InProcessEngine

BUCKET_BYTES = 256 * 2**20  # of weights in shared memory at a time
CPU_KV_CACHE_BYTES = 2**30


class VLLMServer(RolloutServer):
    """One engine with its own weights, read from `model_path` and replaced by every sync.

    verl: verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer
    """

    def __init__(
        self,
        config: DictConfig,
        model_path: str,
        eos_token_id: int,
        *,
        in_process: bool | None = None,
    ) -> None:
        """Start the engine; seconds in this process, up to a minute in its own.

        Args:
            config: `actor_rollout_ref.rollout`.
            eos_token_id: what ends a response, the tokenizer's; vLLM's own tokenizer is not loaded.
            in_process: None = as vLLM's variable VLLM_ENABLE_V1_MULTIPROCESSING says (0 or 1); where that is
                not set, in this process on a CPU and in its own on a GPU.

        Raises:
            ValueError: vLLM is not installed, or it is the build for a device that this machine lacks.
        """
        on_cpu = require_vllm() == "cpu"
        if in_process is None:
            in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if on_cpu else "1") == "0"
        if in_process and config.tensor_model_parallel_size != 1:
            raise ValueError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={config.tensor_model_parallel_size} "
                "needs a process per rank: set VLLM_ENABLE_V1_MULTIPROCESSING=1, or the size to 1"
            )
        if on_cpu:  # vLLM's sampler compiles a function even where the model runs eagerly
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the engine's processes
            torch._dynamo.config.disable = True  # and this one
        self.config = config
        self.eos_token_id = eos_token_id
        self.in_process = in_process
        self.version = 0
        self.asleep = False
        # vLLM ignores sleep on a CPU, there is no second memory to move to: only the flag above works there
        self.frees_memory = config.free_cache_engine and not on_cpu
        self.running: set[str] = set()
        self.open = asyncio.Event()  # closed while weights change: requests wait
        self.open.set()
        arguments = engine_arguments(config, model_path, on_cpu=on_cpu, sleep_mode=self.frees_memory)
        self.engine = InProcessEngine(arguments) if in_process else _own_process(arguments)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: SamplingParams,
        *,
        request_id: str,
        max_tokens: int,
        seed: int,
    ) -> TokenOutput:
        from vllm import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        await self.open.wait()
        assert not self.asleep, "generate on a sleeping server: call wake_up or update_weights first"
        assert request_id not in self.running, f"request {request_id!r} is already being decoded"
        params = self._vllm_params(sampling_params, max_tokens, seed)
        version, final = self.version, None
        self.running.add(request_id)
        try:
            prompt = TokensPrompt(prompt_token_ids=list(prompt_ids))
            async with aclosing(self.engine.generate(prompt, params, request_id)) as stream:
                async for output in stream:
                    final = output.outputs[0]
        except (EngineDeadError, EngineGenerateError) as error:
            raise ReplicaError(f"vLLM's engine stopped while decoding {request_id!r}") from error
        finally:
            self.running.discard(request_id)
        if final is None:  # aborted before the engine had heard of it
            return TokenOutput([], [] if self.config.calculate_log_probs else None, "aborted", version)
        log_probs = None
        if self.config.calculate_log_probs:
            pairs = zip(final.token_ids, final.logprobs, strict=True)
            log_probs = [entry[token].logprob for token, entry in pairs]
        reasons = {"stop": "completed", "length": "length", "abort": "aborted"}
        return TokenOutput(list(final.token_ids), log_probs, reasons[final.finish_reason], version)

    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.open.clear()
        try:
            await self._come_to_rest()
            if self.asleep and self.frees_memory:  # the KV cache comes back last: less memory at the peak
                await self.engine.wake_up(tags=["weights"])
            await self.engine.collective_rpc("begin_weights")
            if self.in_process:
                await self.engine.collective_rpc("receive_tensors", args=(list(named_tensors),))
            else:
                await self._send(named_tensors)
            missing = (await self.engine.collective_rpc("end_weights"))[0]
            if missing:
                raise ValueError(
                    f"update_weights got no tensor for {', '.join(missing)}: send all parameters"
                )
            if self.asleep and self.frees_memory:
                await self.engine.wake_up(tags=["kv_cache"])
            self.version, self.asleep = version, False
        finally:
            self.open.set()

    async def sleep(self) -> None:
        """Weights to host memory, KV cache dropped (vLLM's level 1); nothing moves on a CPU or with
        free_cache_engine=false.

        verl drops the weights too (level 2), as a sync always follows there; here `wake_up` alone must do.
        """
        await self._come_to_rest()
        if self.frees_memory and not self.asleep:
            await self.engine.sleep(level=1)
        self.asleep = True

    async def wake_up(self) -> None:
        if self.frees_memory and self.asleep:
            await self.engine.wake_up()
        self.asleep = False

    async def abort(self, request_ids: list[str] | None = None) -> None:
        chosen = set(self.running) if request_ids is None else self.running & set(request_ids)
        # a request that is still on its way into the engine is unknown there: until it has arrived, ask again
        while chosen := chosen & self.running:
            await self.engine.abort(list(chosen))
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.abort()
        self.engine.shutdown()
        del self.engine

    async def _send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Weights to the engine's processes: a file in shared memory per bucket, as tensors do not pickle."""
        from safetensors.torch import save_file

        shared = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
            path = str(Path(folder) / "bucket.safetensors")
            for bucket in buckets(named_tensors, BUCKET_BYTES):
                save_file(bucket, path)
                await self.engine.collective_rpc("receive_file", args=(path,))

    async def _come_to_rest(self) -> None:
        """End all requests and drop the cached prefixes: keys and values of old weights serve no new one."""
        await self.abort()
        for _ in range(1000):
            # refused until the step in flight is over: on a GPU it still writes to an aborted request's cache
            if await self.engine.reset_prefix_cache():
                return
            await asyncio.sleep(0.01)
        raise ReplicaError("vLLM's engine does not come to rest: some request holds its KV cache")

    def _vllm_params(self, params: SamplingParams, max_tokens: int, seed: int) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = params.greedy
        return VLLMSamplingParams(
            temperature=0.0 if greedy else params.temperature,
            top_p=1.0 if greedy else params.top_p,
            top_k=-1 if greedy else params.top_k,
            max_tokens=max_tokens,
            seed=seed % 2**63,  # vLLM keeps it as int64
            # the tokenizer's EOS alone, as in every backend; vLLM would add those of generation_config.json
            ignore_eos=True,
            stop_token_ids=[] if self.config.ignore_eos else [self.eos_token_id],
            logprobs=0 if self.config.calculate_log_probs else None,  # 0 = of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def require_vllm() -> str:
    """The kind of device that the installed vLLM runs on: cpu, cuda, ...

    Raises:
        ValueError: vLLM is missing, or finds no device it was built for.
    """
    # before the first import, which reads them; a user's own setting wins
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    where = "`make vllm` installs it for a CPU, `pip install -r requirements/gpu.txt` for a GPU"
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"actor_rollout_ref.rollout.name=vllm needs vLLM ({error}): {where}; or set it to builtin"
        ) from error
    from vllm.platforms import current_platform

    # the GPU build imports without a GPU, so only the platform tells
    if not current_platform.device_type:
        raise ValueError(
            f"actor_rollout_ref.rollout.name=vllm: this vLLM is built for a GPU and finds none: {where}"
        )
    return current_platform.device_type


def engine_arguments(
    config: DictConfig, model_path: str, *, on_cpu: bool, sleep_mode: bool
) -> dict[str, Any]:
    """vLLM's EngineArgs by `actor_rollout_ref.rollout`; `engine_kwargs.vllm` has the last word.

    verl: verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.launch_server
    """
    arguments = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "logprobs_mode": config.logprobs_mode,
        "enforce_eager": config.enforce_eager,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_sleep_mode": sleep_mode,
        "worker_extension_cls": "minirl.rollout.vllm_weights.WeightReceiver",
        "disable_log_stats": True,
        "seed": 0,  # of the engine; every request brings its own
    }
    if on_cpu:
        # compiling costs minutes there, and a share of the machine's memory is no budget for a KV cache
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    return arguments | OmegaConf.to_container(config.engine_kwargs.vllm, resolve=True)


def buckets(named_tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Host copies of the tensors, at most `limit` bytes at a time unless one tensor alone is larger."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket


def _own_process(arguments: dict[str, Any]) -> Any:
    """vLLM's AsyncLLM: scheduler and workers in processes of their own."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
