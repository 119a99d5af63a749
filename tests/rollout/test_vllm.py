"""What is vLLM's own behind RolloutServer: arguments, weights in place, caches, a trainer on it.

What it shares with the other backends is in contract/test_server_contract.py.
"""

import asyncio
import sys
import types

import numpy as np
import pytest
import torch
from moved_model import moved
from omegaconf import DictConfig
from transformers import Qwen2Config, Qwen2ForCausalLM

from minirl.config import compose
from minirl.data.build import SHIPPED
from minirl.rollout.sampling import SamplingParams, filter_logits
from minirl.rollout.vllm import VLLMServer, buckets, engine_arguments, require_vllm
from minirl.rollout.vllm_in_process import InProcessEngine
from minirl.trainer import PPOTrainer
from minirl.workers.model import load_causal_lm

EOS, R = 1, 24
PLAIN = SamplingParams()
TINY = str(SHIPPED / "tiny_lm")


def rollout_config(**changes) -> DictConfig:
    overrides = {"calculate_log_probs": True, "dtype": "float32", "max_model_len": 128} | changes
    return compose(
        [f"actor_rollout_ref.rollout.{k}={v}" for k, v in overrides.items()]
    ).actor_rollout_ref.rollout


def start(model_path: str = TINY, **changes) -> VLLMServer:
    config = rollout_config(**{"engine_kwargs.vllm.block_size": 32} | changes)  # several blocks in a prompt
    return VLLMServer(config, model_path, EOS, in_process=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tied")
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def engines(tied):
    """The engines of this process: the end of one is the end of all, see InProcessEngine.shutdown."""
    servers = {"tiny_lm": start(), "tied": start(str(tied[0])), "bfloat16": start(dtype="bfloat16")}
    yield servers
    for server in servers.values():
        asyncio.run(server.close())


@pytest.fixture
def server(engines):
    """With the weights of the checkpoint, whatever a test before has done."""
    asyncio.run(engines["tiny_lm"].update_weights(load_causal_lm(TINY).named_parameters(), version=0))
    return engines["tiny_lm"]


@pytest.fixture
def model():
    return load_causal_lm(TINY).eval()


def prompts(rows: int, length: int = 12, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(3, 300, size=(rows, length)).tolist()


async def sample(server: VLLMServer, prompt_ids: list[list[int]], params=PLAIN, seed: int = 0, **kw):
    options = dict(max_tokens=R) | kw
    return await asyncio.gather(
        *(
            server.generate(ids, params, request_id=f"{row}", seed=seed + row, **options)
            for row, ids in enumerate(prompt_ids)
        )
    )


@torch.no_grad()
def gap(model, prompt_ids, outputs, params=PLAIN) -> torch.Tensor:
    """|log-prob that vLLM reports - that of a full forward|, of every token."""
    differences = []
    for ids, output in zip(prompt_ids, outputs, strict=True):
        tokens = torch.tensor(output.token_ids)
        logits = model(input_ids=torch.tensor([ids + output.token_ids])).logits[0, len(ids) - 1 : -1].float()
        if not params.greedy:
            logits = filter_logits(logits / params.temperature, top_k=params.top_k, top_p=params.top_p)
        expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        differences.append((expected - torch.tensor(output.log_probs)).abs())
    return torch.cat(differences)


@pytest.mark.vllm
def test_raw_log_probs_would_be_those_of_another_temperature(server, model):
    ids, params = prompts(16), SamplingParams(temperature=0.6)
    outputs = asyncio.run(sample(server, ids, params))
    assert gap(model, ids, outputs, PLAIN).mean() > 0.05


@pytest.mark.vllm
def test_new_weights_are_used_and_stale_ones_show(server, model):
    ids, after = prompts(8), moved(load_causal_lm(TINY))
    before = asyncio.run(sample(server, ids))
    assert gap(after, ids, before).mean() > 0.5  # what a forgotten sync looks like
    asyncio.run(server.update_weights(after.named_parameters(), version=7))
    outputs = asyncio.run(sample(server, ids))
    assert gap(after, ids, outputs).max() < 1e-4
    assert {o.version for o in outputs} == {7}
    assert [o.token_ids for o in outputs] != [o.token_ids for o in before]


@pytest.mark.vllm
def test_a_tied_head_follows_the_embedding(engines, tied):
    server, model = engines["tied"], tied[1]
    ids, after = [[4, 5, 6, 7], [9, 8, 7]], moved(model, scale=0.3)

    async def run():
        first = await sample(server, ids)
        await server.update_weights(after.named_parameters(), version=1)
        return first, await sample(server, ids)

    first, second = asyncio.run(run())
    assert gap(model, ids, first).max() < 1e-4
    assert gap(after, ids, first).mean() > 0.1
    assert gap(after, ids, second).max() < 1e-4


@pytest.mark.vllm
def test_a_parameter_without_a_tensor_is_named(server, model):
    all_but_one = [(n, p) for n, p in model.named_parameters() if n != "model.norm.weight"]
    with pytest.raises(ValueError, match=r"no tensor for model\.norm\.weight"):
        asyncio.run(server.update_weights(all_but_one, version=1))


@pytest.mark.vllm
@pytest.mark.parametrize("forget", [False, True])
def test_cached_prefixes_go_with_the_weights(server, monkeypatch, forget):
    ids, after = prompts(1, length=100, seed=3), moved(load_causal_lm(TINY))
    if forget:

        async def nothing():
            pass

        monkeypatch.setattr(server, "_come_to_rest", nothing)

    async def run():
        await sample(server, ids)
        await server.update_weights(after.named_parameters(), version=1)
        return await sample(server, ids)

    difference = gap(after, ids, asyncio.run(run())).max()
    assert difference > 0.1 if forget else difference < 1e-4


@pytest.mark.vllm
def test_the_start_leaves_the_process_as_it_was(server):
    assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1


@pytest.mark.vllm
def test_bfloat16_shows_in_the_log_probs_and_costs_no_sync(engines, model):
    server, after = engines["bfloat16"], moved(model)

    async def run():
        before = await sample(server, ids)
        await server.update_weights(after.named_parameters(), version=1)
        return before, await sample(server, ids)

    ids = prompts(16)
    before, outputs = asyncio.run(run())
    assert 1e-4 < gap(model, ids, before).mean() < 0.02
    assert 1e-4 < gap(after, ids, outputs).mean() < 0.02 < gap(after, ids, before).mean()


@pytest.mark.vllm
def test_a_trainer_rolls_out_with_vllm_and_shows_a_forgotten_sync(engines, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    key = "actor_rollout_ref"
    trainer = PPOTrainer(
        compose(
            [
                "algorithm.adv_estimator=grpo",
                "data.train_batch_size=4",
                f"{key}.actor.ppo_mini_batch_size=2",
                f"{key}.actor.ppo_micro_batch_size_per_gpu=8",
                f"{key}.actor.optim.lr=0.01",
                f"{key}.rollout.n=4",
                f"{key}.rollout.name=vllm",
                f"{key}.rollout.dtype=float32",
                f"{key}.rollout.calculate_log_probs=true",
                "trainer.total_training_steps=2",
                "trainer.val_before_train=false",
                "trainer.logger=[]",
            ]
        )
    )
    (engines["trainer's"],) = trainer.rollout.servers
    assert isinstance(engines["trainer's"].engine, InProcessEngine)

    def gaps() -> list[float]:
        return [step["training/rollout_probs_diff_mean"] for step in trainer.fit()[-2:]]

    assert max(gaps()) < 1e-4
    assert trainer.rollout.version == 2

    async def nothing(named_tensors, version):
        await engines["trainer's"].wake_up()

    monkeypatch.setattr(engines["trainer's"], "update_weights", nothing)
    synced, stale = gaps()
    assert synced < 1e-4  # the end of the first fit brought the weights that this one begins with
    assert stale > 0.01


def test_engine_arguments_follow_the_configuration():
    config = rollout_config(
        gpu_memory_utilization=0.4,
        enforce_eager=True,
        tensor_model_parallel_size=2,
        max_num_batched_tokens=512,
        max_num_seqs=32,
        enable_prefix_caching=False,
        logprobs_mode="raw_logprobs",
        **{"engine_kwargs.vllm.block_size": 32, "engine_kwargs.vllm.max_num_seqs": 8},
    )
    arguments = engine_arguments(config, "a/model", on_cpu=False, sleep_mode=True)
    expected = dict(
        model="a/model",
        dtype="float32",
        max_model_len=128,
        gpu_memory_utilization=0.4,
        enforce_eager=True,
        tensor_parallel_size=2,
        max_num_batched_tokens=512,
        max_num_seqs=8,  # engine_kwargs has the last word
        enable_prefix_caching=False,
        logprobs_mode="raw_logprobs",
        enable_sleep_mode=True,
        block_size=32,
    )
    assert arguments | expected == arguments


def test_weights_travel_in_buckets_of_limited_size():
    tensors = [
        (name, torch.full((size,), float(size))) for name, size in zip("abcd", (3, 3, 9, 1), strict=True)
    ]
    assert [list(bucket) for bucket in buckets(tensors, limit=24)] == [["a", "b"], ["c"], ["d"]]
    assert all((t == t.numel()).all() for bucket in buckets(tensors, limit=24) for t in bucket.values())


def test_a_missing_vllm_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"rollout\.name=vllm.*make vllm.*requirements/gpu\.txt"):
        VLLMServer(rollout_config(), TINY, EOS)


def test_a_gpu_build_without_a_gpu_is_an_error_with_the_remedy(monkeypatch):
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(device_type="")
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    with pytest.raises(ValueError, match="built for a GPU and finds none"):
        require_vllm()


def test_a_process_cannot_hold_two_tensor_parallel_ranks(monkeypatch):
    monkeypatch.setattr("minirl.rollout.vllm.require_vllm", lambda: "cuda")
    with pytest.raises(ValueError, match="tensor_model_parallel_size=2"):
        VLLMServer(rollout_config(tensor_model_parallel_size=2), TINY, EOS, in_process=True)
