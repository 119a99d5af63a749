"""The rollout service against the builtin rollout: the same batch, whoever asks the decoder."""

import asyncio
import gc
import threading
import time

import numpy as np
import pytest
import tiny_run
import torch
from omegaconf import OmegaConf
from runs import small, steady, weights

from minirl.config import compose
from minirl.protocol import DataProto
from minirl.rollout.agent_loop import AGENT_LOOPS, AgentLoopBase, AgentLoopOutput, register
from minirl.rollout.agent_loop_manager import gather
from minirl.rollout.builtin_server import BuiltinServer
from minirl.rollout.load import load_rollout
from minirl.rollout.sampling import SamplingParams
from minirl.trace import trace
from minirl.trainer import PPOTrainer
from minirl.workers.model import load_causal_lm, load_tokenizer

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def parts():
    config = compose()
    path = config.actor_rollout_ref.model.path
    return load_causal_lm(path), load_tokenizer(path)


def rollout(parts, mode: str, *overrides: str):
    config = compose([f"{ROLLOUT}.mode={mode}", f"{ROLLOUT}.calculate_log_probs=True", *overrides])
    return load_rollout(config.actor_rollout_ref.rollout, *parts, config.minirl.rollout)


def prompts(groups: int = 4, n: int = 4, columns: dict | None = None, **meta_info) -> DataProto:
    rows = [
        [{"role": "user", "content": f"Tom has {i % groups} pens."}] for i in range(groups) for _ in range(n)
    ]
    raw_prompt = np.empty(len(rows), dtype=object)
    raw_prompt[:] = rows
    return DataProto(non_tensor_batch={"raw_prompt": raw_prompt, **(columns or {})}, meta_info=meta_info)


def assert_same(a: DataProto, b: DataProto) -> None:
    assert set(a.batch.keys()) == set(b.batch.keys())
    for key in a.batch.keys():
        if key == "rollout_log_probs":  # other batch sizes round otherwise
            torch.testing.assert_close(a.batch[key], b.batch[key], atol=2e-5, rtol=0)
        else:
            assert torch.equal(a.batch[key], b.batch[key]), key
            assert a.batch[key].dtype == b.batch[key].dtype, key


META = {
    "training": {"global_steps": 3, "rollout_seed": 5},
    "validation": {"validate": True},
    "hot": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "global_steps": 1},
}


@pytest.mark.parametrize("meta_info", META.values(), ids=META)
@pytest.mark.parametrize("service", [(), ("num_replicas=3",), ("max_in_flight=5",)], ids=str)
def test_service_gives_the_batch_of_the_builtin_rollout(parts, meta_info, service):
    overrides = [f"minirl.rollout.{change}" for change in service]
    ours = rollout(parts, "async", *overrides, f"{ROLLOUT}.agent.num_workers=3")
    a = ours.generate_sequences(prompts(**meta_info))
    b = rollout(parts, "sync").generate_sequences(prompts(**meta_info))
    assert_same(a, b)
    assert set(a.non_tensor_batch) == set(b.non_tensor_batch) | {"min_global_steps", "max_global_steps"}
    assert a.non_tensor_batch["__num_turns__"].tolist() == b.non_tensor_batch["__num_turns__"].tolist()
    assert a.non_tensor_batch["__num_turns__"].dtype == np.int32
    assert list(a.non_tensor_batch["raw_prompt"]) == list(b.non_tensor_batch["raw_prompt"])
    assert set(b.meta_info["timing"]) < set(a.meta_info["timing"])
    assert a.meta_info["timing"]["agent_loop/slowest/response_length"] > 0


@pytest.mark.parametrize("key", ["__seed__", "__do_sample__"])
def test_rows_keep_their_own_seed_and_their_own_greediness(parts, key):
    value = {"__seed__": np.arange(16)[::-1], "__do_sample__": np.arange(16) % 2 == 0}[key]
    pair = [
        rollout(parts, mode).generate_sequences(prompts(columns={key: value})) for mode in ("async", "sync")
    ]
    assert_same(*pair)
    assert key not in pair[0].non_tensor_batch


def test_versions_travel_with_the_batch_and_a_sync_reaches_every_replica(parts):
    ours = rollout(parts, "async", "minirl.rollout.num_replicas=2")
    before = ours.generate_sequences(prompts(validate=True))
    assert before.non_tensor_batch["min_global_steps"].tolist() == [0] * 16
    ours.sleep()
    with pytest.raises(AssertionError, match="wake_up"):
        ours.generate_sequences(prompts())
    ours.wake_up()
    assert_same(ours.generate_sequences(prompts(validate=True)), before)
    new = load_causal_lm(compose().actor_rollout_ref.model.path)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.5)
    ours.sleep()
    ours.update_weights(iter(new.named_parameters()), version=9)  # a generator: read once, for two replicas
    after = ours.generate_sequences(prompts(validate=True))
    assert ours.version == 9 and [server.version for server in ours.servers] == [9, 9]
    assert after.non_tensor_batch["max_global_steps"].tolist() == [9] * 16
    assert_same(after, rollout((new, parts[1]), "sync").generate_sequences(prompts(validate=True)))


def test_each_row_runs_the_loop_that_its_agent_name_says(parts):
    @register("echo_for_test")
    class Echo(AgentLoopBase):
        async def run(self, sampling_params, *, draw, raw_prompt, uid, **kwargs):
            return AgentLoopOutput(
                [5], [uid], [1], [-1.0], num_turns=7, metrics={}, extra_fields={"note": uid}
            )

    try:
        names = np.array(["single_turn_agent", "echo_for_test"] * 8, dtype=object)
        columns = {"agent_name": names, "uid": np.arange(10, 26).astype(object)}
        out = rollout(parts, "async").generate_sequences(prompts(columns=columns))
    finally:
        del AGENT_LOOPS["echo_for_test"]
    plain = rollout(parts, "sync").generate_sequences(prompts())
    assert torch.equal(out.batch["responses"][::2], plain.batch["responses"][::2])
    assert out.batch["responses"][1::2, 0].tolist() == list(range(11, 26, 2))
    assert out.non_tensor_batch["__num_turns__"].tolist() == [2, 7] * 8
    assert out.non_tensor_batch["note"].tolist()[:4] == [None, 11, None, 13]
    assert out.non_tensor_batch["max_global_steps"].tolist()[:2] == [0, None]


def test_an_unknown_agent_is_named_with_the_known_ones(parts):
    columns = {"agent_name": np.array(["tool_agent", "nobody"] * 8, dtype=object)}
    with pytest.raises(ValueError, match="'nobody'.*default_agent_loop.*single_turn_agent, tool_agent"):
        rollout(parts, "async").generate_sequences(prompts(columns=columns))
    with pytest.raises(ValueError, match="'mine'"):
        rollout(parts, "async", f"{ROLLOUT}.agent.default_agent_loop=mine")
    with pytest.raises(ValueError, match="rollout.mode=async"):
        compose([f"{ROLLOUT}.agent.default_agent_loop=tool_agent"])


def test_an_overlong_prompt_names_the_field_and_leaves_nothing_in_flight(parts):
    ours = rollout(parts, "async")
    long = prompts()
    long.non_tensor_batch["raw_prompt"][9] = [{"role": "user", "content": "Tom has pens. " * 40}]
    with pytest.raises(ValueError, match="data.max_prompt_length is 32"):
        ours.generate_sequences(long)
    server = ours.servers[0]
    assert not server.running and not server.waiting
    ours.generate_sequences(prompts())


def test_first_failure_cancels_the_others_and_is_raised_as_it_is():
    ended = []

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("wait")

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(gather([wait(), fail(), wait()]))
    assert ended == ["wait", "wait"]


def test_the_thread_ends_with_its_manager(parts):
    ours = rollout(parts, "async")
    ours.generate_sequences(prompts())
    thread = next(t for t in threading.enumerate() if t.name == "rollout" and t.is_alive())
    alive = sum(t.name == "rollout" for t in threading.enumerate())
    ours.close()
    del ours
    gc.collect()
    for _ in range(200):
        if sum(t.name == "rollout" for t in threading.enumerate()) < alive:
            return
        time.sleep(0.01)
    raise AssertionError(f"{thread} still runs")


def test_abort_keeps_the_tokens_drawn_so_far(parts):
    config = compose([f"{ROLLOUT}.ignore_eos=True"]).actor_rollout_ref.rollout
    server = BuiltinServer(config, *parts)

    def request(name: str):
        return server.generate([5, 6], SamplingParams(), request_id=name, max_tokens=50, seed=1)

    async def scenario():
        tasks = [asyncio.create_task(request(name)) for name in ("a", "b")]
        for _ in range(12):
            await asyncio.sleep(0)
        late = asyncio.create_task(request("late"))  # waits for the end of the batch
        await asyncio.sleep(0)
        await server.abort(["a", "late"])
        return await asyncio.gather(*tasks, late)

    a, b, late = asyncio.run(scenario())
    assert (a.stop_reason, b.stop_reason, late.stop_reason) == ("aborted", "length", "aborted")
    assert 5 < len(a.token_ids) < 50 and a.token_ids == b.token_ids[: len(a.token_ids)]
    assert a.log_probs == b.log_probs[: len(a.token_ids)] and late.token_ids == []


def test_an_error_of_the_model_reaches_who_waits_and_the_server_goes_on(parts, monkeypatch):
    config = compose().actor_rollout_ref.rollout
    server = BuiltinServer(config, *parts)

    def request(name: str):
        return server.generate([5, 6], SamplingParams(), request_id=name, max_tokens=4, seed=1)

    def broken(*args):
        raise RuntimeError("out of memory")

    async def scenario():
        with monkeypatch.context() as patch:
            patch.setattr(type(server.rollout.decoder), "prefill", broken)
            failures = await asyncio.gather(request("a"), request("b"), return_exceptions=True)
        return failures, await request("c")

    failures, answer = asyncio.run(scenario())
    assert [str(failure) for failure in failures] == ["out of memory"] * 2
    assert 1 <= len(answer.token_ids) <= 4 and answer.stop_reason != "aborted"


CASES = {
    "grpo": ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.calculate_log_probs=True"],
    "gae": ["algorithm.adv_estimator=gae"],
    "remax": ["algorithm.adv_estimator=remax"],
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_training_is_the_same_in_both_modes(overrides):
    runs = []
    for mode in ("sync", "async"):
        trainer = PPOTrainer(small(*overrides, f"{ROLLOUT}.mode={mode}", "trainer.test_freq=2"))
        with trace(trainer) as t:
            trainer.fit()
        runs.append((steady(trainer.history), weights(trainer), t))
    (history, actor, traced), (other_history, other_actor, other_traced) = runs
    assert len(history) == 2 and history == other_history
    assert all(torch.equal(a, b) for a, b in zip(actor, other_actor, strict=True))
    for mine, theirs in zip(traced.steps, other_traced.steps, strict=True):
        assert list(mine.stations) == list(theirs.stations)
        keys = [set(step.stations["update_actor"].rows[0]) for step in (mine, theirs)]
        assert keys[1] - keys[0] <= {"min_global_steps", "max_global_steps"} and not keys[0] - keys[1]


@pytest.mark.oracle
def test_verls_own_fit_trains_on_the_service():
    from minirl.verl_bridge import VerlTrainer

    histories = []
    for mode in ("sync", "async"):
        trainer = VerlTrainer(small("algorithm.adv_estimator=grpo", f"{ROLLOUT}.mode={mode}"))
        histories.append(steady(trainer.fit()))
    assert histories[0] == histories[1] and len(histories[0]) == 2


def test_validation_rows_keep_their_agent_name(tmp_path):
    import pandas as pd

    overrides = tiny_run.make(tmp_path)
    rows = pd.read_parquet(tmp_path / "train.parquet")
    rows["agent_name"] = "nobody"
    rows.to_parquet(tmp_path / "val.parquet")
    config = compose(
        [*overrides, f"data.val_files={tmp_path}/val.parquet", f"{ROLLOUT}.mode=async", "trainer.logger=[]"]
    )
    assert OmegaConf.select(config, "trainer.val_before_train")
    with pytest.raises(ValueError, match="'nobody'"):
        PPOTrainer(config).fit()
