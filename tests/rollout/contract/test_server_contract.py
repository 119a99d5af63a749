"""What every RolloutServer must do, whatever engine is behind it: one suite over all backends.

The reference is transformers: its greedy text, and a full forward for log-probs.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from moved_model import moved

from minirl.config import compose
from minirl.data.build import SHIPPED
from minirl.rollout.sampling import SamplingParams, filter_logits
from minirl.rollout.server import RolloutServer, TokenOutput
from minirl.workers.model import load_causal_lm, load_tokenizer

TINY = str(SHIPPED / "tiny_lm")
EOS, R = 1, 24
PLAIN, GREEDY = SamplingParams(), SamplingParams(do_sample=False)


@dataclass
class Backend:
    """A started server and the event loop it lives in; `tolerance` is of its log-probs."""

    server: RolloutServer
    run: Callable[[Any], Any] = asyncio.run
    tolerance: float = 2e-5

    def sample(self, prompt_ids: list[list[int]], params=PLAIN, *, seed: int = 0, **options):
        """One request per prompt, all at once; row i has seed + i. `params`: one for all, or a list."""
        params = params if isinstance(params, list) else [params] * len(prompt_ids)

        async def all_at_once() -> list[TokenOutput]:
            return await asyncio.gather(
                *[
                    self.server.generate(
                        ids, own, request_id=f"row {i}", seed=seed + i, **{"max_tokens": R} | options
                    )
                    for i, (ids, own) in enumerate(zip(prompt_ids, params, strict=True))
                ]
            )

        return self.run(all_at_once())

    def sync(self, model, version: int) -> None:
        self.run(self.server.update_weights(model.named_parameters(), version))


def start_builtin() -> Backend:
    from minirl.rollout.builtin_server import BuiltinServer

    config = compose(["actor_rollout_ref.rollout.calculate_log_probs=True"]).actor_rollout_ref.rollout
    return Backend(BuiltinServer(config, load_causal_lm(TINY), load_tokenizer(TINY)))


def start_vllm(in_process: bool = True) -> Backend:
    from minirl.rollout.vllm import VLLMServer

    key = "actor_rollout_ref.rollout"
    overrides = [f"{key}.calculate_log_probs=True", f"{key}.dtype=float32"]
    config = compose(overrides).actor_rollout_ref.rollout
    config.engine_kwargs.vllm.block_size = 32  # prompts of several blocks, though short
    loop = asyncio.new_event_loop()  # the engine in its own process belongs to the loop it was first used in
    server = VLLMServer(config, TINY, EOS, in_process=in_process)
    return Backend(server, loop.run_until_complete, tolerance=1e-4)


BACKENDS = {
    "builtin": pytest.param(start_builtin),
    "vllm": pytest.param(start_vllm, marks=pytest.mark.vllm),
    "vllm-own-process": pytest.param(lambda: start_vllm(in_process=False), marks=pytest.mark.vllm),
}


@pytest.fixture(scope="module", params=BACKENDS.values(), ids=BACKENDS)
def started(request):
    backend = request.param()
    yield backend
    backend.run(backend.server.close())


@pytest.fixture
def backend(started) -> Backend:
    """Awake, with the weights of the checkpoint as version 0, whatever a test before has done."""
    started.sync(load_causal_lm(TINY), version=0)
    return started


@pytest.fixture
def model():
    return load_causal_lm(TINY).eval()


def prompts(rows: int, length: int = 12, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(4, 300, size=(rows, length)).tolist()


@torch.no_grad()
def gap(model, prompt_ids, outputs, params) -> float:
    """Largest |reported log-prob - that of a full forward| over all tokens."""
    largest = 0.0
    for ids, output in zip(prompt_ids, outputs, strict=True):
        tokens = torch.tensor(output.token_ids)
        logits = model(input_ids=torch.tensor([ids + output.token_ids])).logits[0, len(ids) - 1 : -1].float()
        if not params.greedy:
            logits = filter_logits(logits / params.temperature, top_k=params.top_k, top_p=params.top_p)
        expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        largest = max(largest, (expected - torch.tensor(output.log_probs)).abs().max().item())
    return largest


SAMPLING = {
    "temperature 1": PLAIN,
    "temperature 0.6": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.8),
    "all three": SamplingParams(temperature=1.3, top_k=20, top_p=0.9),
    "greedy": GREEDY,
    "temperature 0": SamplingParams(temperature=0),
}


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
def test_log_probs_are_of_the_distribution_that_was_sampled(backend, model, params):
    ids = prompts(16)
    outputs = backend.sample(ids, params)
    assert all(len(output.log_probs) == len(output.token_ids) for output in outputs)
    assert gap(model, ids, outputs, params) < backend.tolerance


def test_greedy_text_equals_transformers(backend, model):
    ids = prompts(8)
    expected = model.generate(
        torch.tensor(ids), max_new_tokens=R, do_sample=False, pad_token_id=0, eos_token_id=EOS
    )[:, 12:].tolist()
    for output, row in zip(backend.sample(ids, GREEDY), expected, strict=True):
        length = row.index(EOS) + 1 if EOS in row else R
        assert output.token_ids == row[:length]


def test_a_response_ends_with_eos_or_at_max_tokens_and_says_which(backend):
    outputs = backend.sample(prompts(16)) + backend.sample(prompts(16), max_tokens=3)
    for i, output in enumerate(outputs):
        limit = R if i < 16 else 3
        assert EOS not in output.token_ids[:-1] and 1 <= len(output.token_ids) <= limit
        ended = output.token_ids[-1] == EOS
        assert output.stop_reason == ("completed" if ended else "length")
        assert ended or len(output.token_ids) == limit
    assert {output.stop_reason for output in outputs} == {"completed", "length"}


def test_each_request_ends_at_its_own_max_tokens(backend):
    limits, ids = [1, 2, 5, 9, R], prompts(1)[0]

    async def scenario():
        return await asyncio.gather(
            *[backend.server.generate(ids, PLAIN, request_id=f"{n}", seed=3, max_tokens=n) for n in limits]
        )

    *short, whole = backend.run(scenario())
    assert [output.token_ids for output in short] == [whole.token_ids[:n] for n in limits[:-1]]


def test_a_seed_decides_the_tokens_whatever_else_is_decoded(backend):
    ids = prompts(12)
    together = backend.sample(ids, seed=2**63)
    alone = [backend.sample([ids[i]], seed=2**63 + i)[0] for i in (0, 7)]
    assert [output.token_ids for output in alone] == [together[0].token_ids, together[7].token_ids]
    assert len({tuple(output.token_ids) for output in backend.sample([ids[0]] * 12)}) > 1


def test_requests_with_different_parameters_are_served_at_once(backend, model):
    ids = prompts(14)
    mixed = backend.sample(ids, list(SAMPLING.values()) * 2)
    for i, params in enumerate(list(SAMPLING.values()) * 2):
        assert mixed[i].token_ids == backend.sample([ids[i]], params, seed=i)[0].token_ids
        assert gap(model, [ids[i]], [mixed[i]], params) < backend.tolerance


def test_prompts_of_any_length_and_shared_prefixes(backend, model):
    long = prompts(1, length=80)[0]
    ids = [long[:n] for n in (1, 2, 40, 79, 80)] + [long[:60] + prompts(1, seed=1)[0]]
    assert gap(model, ids, backend.sample(ids), PLAIN) < backend.tolerance
    assert gap(model, ids, backend.sample(ids, seed=50), PLAIN) < backend.tolerance  # prefixes are cached now


def test_only_a_sync_changes_text_and_log_probs(backend, model):
    ids = prompts(8, length=70)  # several blocks of a paged cache, so prefixes are worth caching
    before = backend.sample(ids, GREEDY)
    new = moved(model)
    assert [o.token_ids for o in backend.sample(ids, GREEDY)] == [o.token_ids for o in before]
    backend.sync(new, version=7)
    after = backend.sample(ids, GREEDY)
    assert [o.token_ids for o in after] != [o.token_ids for o in before]
    assert gap(new, ids, after, GREEDY) < backend.tolerance  # no key or value of the old weights is left
    assert gap(new, ids, backend.sample(ids), PLAIN) < backend.tolerance
    assert {o.version for o in before} == {0} and {o.version for o in after} == {backend.server.version} == {
        7
    }


@pytest.fixture
def endless(backend) -> Backend:
    """With weights that find all 362 tokens equally likely: an EOS is far off."""
    model = load_causal_lm(TINY)
    model.lm_head.weight.data.zero_()
    backend.sync(model, version=0)
    return backend


def long_request(backend, request_id: str, seed: int = 0) -> asyncio.Task:
    request = backend.server.generate(prompts(1)[0], PLAIN, request_id=request_id, seed=seed, max_tokens=100)
    return asyncio.ensure_future(request)


def test_abort_returns_the_tokens_so_far(endless):
    async def scenario():
        task = long_request(endless, "mine")
        while not task.done():
            await asyncio.sleep(0.001)
            await endless.server.abort(["mine"])
        return await task, await long_request(endless, "again")

    part, whole = endless.run(scenario())
    assert part.stop_reason == "aborted"
    assert len(part.token_ids) == len(part.log_probs) < len(whole.token_ids)
    assert part.token_ids == whole.token_ids[: len(part.token_ids)]


def test_abort_stops_the_named_requests_only_and_ignores_unknown_ones(endless):
    async def scenario():
        tasks = [long_request(endless, name) for name in ("a", "b")]
        await asyncio.sleep(0)
        await endless.server.abort(["b", "nobody"])
        return await asyncio.gather(*tasks)

    a, b = endless.run(scenario())
    assert a.stop_reason != "aborted" and b.stop_reason == "aborted"
    assert endless.sample(prompts(1))[0].stop_reason != "aborted"


def test_a_sync_aborts_what_is_in_flight_which_keeps_its_version(endless, model):
    async def scenario():
        task = long_request(endless, "old")
        await asyncio.sleep(0)
        await endless.server.update_weights(moved(model).named_parameters(), 3)
        return await task, await long_request(endless, "new")

    old, new = endless.run(scenario())
    assert (old.stop_reason, old.version) == ("aborted", 0)
    assert new.stop_reason != "aborted" and new.version == 3


def test_a_sleeping_server_refuses_and_wakes_as_it_was(backend):
    ids = prompts(4)
    before = backend.sample(ids)
    backend.run(backend.server.sleep())
    with pytest.raises(AssertionError, match="wake_up"):
        backend.sample(ids)
    backend.run(backend.server.wake_up())
    assert [o.token_ids for o in backend.sample(ids)] == [o.token_ids for o in before]


def test_a_sync_wakes_the_server(backend, model):
    backend.run(backend.server.sleep())
    new = moved(model)
    backend.sync(new, version=2)
    ids = prompts(4)
    assert gap(new, ids, backend.sample(ids), PLAIN) < backend.tolerance


def test_cancelling_a_request_frees_it(endless):
    async def scenario():
        tasks = [long_request(endless, f"{i}", seed=i) for i in range(8)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        return await long_request(endless, "next")

    assert endless.run(scenario()).stop_reason != "aborted"
